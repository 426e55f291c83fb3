"""Staged drafting: a fast first drafter speeds up a second one, whose tokens are the draft (Spector & Ré 2023, arXiv
2308.04623).

Within one round of the target, the two drafters play rounds of their own until the draft is long enough: the first
proposes a few tokens, the second verifies them in one forward by a lossless rule, and what that rule emits, the token
after a rejection or full acceptance included, is drafted. The target never hears of the first drafter.

Why this is exact. Say q_i is the second drafter's distribution at place i of the draft, recorded from the forward
that token i came from. The inner rule is lossless: given all that was emitted before, token i has exactly the law q_i.
That is all an outer rule asks of a draft, wherever the tokens came from. Which q_i it is may depend on how the inner
rounds went so far (an EAGLE head's does, see `EagleStage`), since that is settled before token i is drawn. It must not
depend on later coins, nor may the outer rule use a coin that helped to draw the draft: hence every inner round has a
seed of its own, derived from the row's seed, the target's round and the place in the draft. Two shortcuts would break
it: dropping the token that ends an inner round (what was accepted is biased towards the first drafter), and testing
against the first drafter's distributions.

Where the target decodes greedily, the second stage does too; under `match` it chooses with the target's own coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spectune.decoding import rules
from spectune.decoding.cache import KVStore, send
from spectune.decoding.draft_choice import penalize_draft, widen
from spectune.decoding.drafter import Draft, Drafter, Kept, Recordable, Round, Row, no_draft
from spectune.decoding.graphs import Graphs
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.random import Coins, CounterCoins, Stream, fork, pick, uniform
from spectune.decoding.sampling import History, is_greedy, probabilities
from spectune.decoding.stages import StageModel, stage_of
from spectune.errors import UsageError

# Most tokens the first drafter proposes at once. Longer guesses are seldom right to the end, and each place costs the
# second stage a row of its output head.
INNER = 4


class StagedDrafter:
    """Drafts with the second stage, helped by the first. `Draft.steps` counts the forwards of both.

    Args:
        first: drafts chains; None: the second stage drafts alone.
        second: verifies them; its tokens and its distributions make the draft.

    Raises:
        UsageError: a first drafter that reads the target's states.
    """

    def __init__(self, first: Drafter | None, second: StageModel) -> None:
        if first is not None and first.taps:
            raise UsageError(
                "a head that reads the target's states cannot be the first stage of a staged draft: the target has not "
                "seen the tokens between the stages",
                "put the head last, for example staged:ngram>eagle3:PATH",
            )
        self.first = first
        self.second = second
        self.taps = second.taps

    @property
    def device(self) -> torch.device | None:
        return self.second.device

    def record_with(self, graphs: Graphs | None) -> None:
        if isinstance(self.first, Recordable):
            self.first.record_with(graphs if self.first.device == self.device else None)
        self.second.record_with(graphs)

    def start(self, rows: int, capacity: int) -> None:
        if self.first is not None:
            self.first.start(rows, capacity)
        self.second.start(rows, capacity, INNER)

    def adopt(self, store: KVStore) -> None:
        """Self-speculation: stages made of the target's own layers use the target's cache of this run."""
        if isinstance(self.first, StagedDrafter):
            self.first.adopt(store)
        self.second.adopt(store)

    def admit(self, index: int, row: Row, states: Tensor | None) -> None:
        if self.first is not None:
            self.first.admit(index, row, None)
        self.second.admit(index, row, states)

    def propose(self, round_: Round) -> Draft | None:
        left = [
            max(0, min(limit, self.second.room(row))) for limit, row in zip(round_.limits, round_.rows, strict=True)
        ]
        width = max(left)
        if width == 0:
            return None
        # Copies: these grow with every inner round, the target's rows do not.
        rows = [Row(list(row.tokens), row.seed) for row in round_.rows]
        history = _copy(round_.history, len(rows))
        stop_ids = set(round_.stop_ids.tolist())
        recorded: list[_Rows] = []
        steps = self.second.begin(round_.rows)
        while max(left) > 0:
            inner = self._inner_round(round_, rows, left, history)
            guess = self.first.propose(inner) if self.first is not None and inner.width > 0 else None
            if guess is None:
                guess = no_draft(len(rows), inner.device)
            logits, forwards = self.second.extend(rows, guess.tokens)
            steps += guess.steps + forwards
            verdict, q = self._verify(logits, guess, inner)
            accepted, emitted = _emitted(guess.tokens, verdict, left, stop_ids)
            if q is not None:
                places = [row.length - known.length for row, known in zip(rows, round_.rows, strict=True)]
                recorded.append(_Rows.of(q, places, list(map(len, emitted))))
            for index, new in enumerate(emitted):
                rows[index].tokens += new
                left[index] = 0 if stop_ids.intersection(new) else left[index] - len(new)
                if new:
                    history.add(index, new)
            self.rewind(rows, accepted)
        drafted = [row.tokens[known.length :] for row, known in zip(rows, round_.rows, strict=True)]
        tokens = send([d + [0] * (width - len(d)) for d in drafted], round_.device)
        counts = send(list(map(len, drafted)), round_.device)
        return Draft(tokens, counts, _Rows.joined(recorded, len(rows), width, round_.device), steps)

    def _inner_round(self, round_: Round, rows: Sequence[Row], left: Sequence[int], history: History) -> Round:
        """What the first drafter may know. Gives every row this inner round's seed, where coins are tossed."""
        sampling, rule = round_.sampling, round_.rule
        if is_greedy(sampling) or rule == "typical":
            rule, sampling = "greedy", sampling.model_copy(update={"temperature": 0.0})
        elif rule != "match":
            rule = "speculative"
            host = torch.device("cpu")
            first = round_.positions(host)
            place = torch.tensor([row.length for row in rows]) - first
            forks = fork(round_.seeds(host), Stream.STAGE, first, place)
            for row, seed in zip(rows, forks.tolist(), strict=True):
                row.seed = seed
        # The second stage itself adds a token behind the guess.
        limits = [min(INNER, max(0, n - 1)) for n in left]
        most = max(limits)
        device = self.second.device
        stop_ids = round_.stop_ids.to(device)
        return Round(rows, limits, most, most, rule, sampling, history, stop_ids, device, fixed=round_.fixed)

    def _coins(self, inner: Round) -> Coins:
        return CounterCoins(inner.seeds(inner.device), inner.positions(inner.device))

    def _verify(self, logits: Tensor, guess: Draft, inner: Round) -> tuple[rules.Verdict, Tensor | None]:
        """The inner rule, and the second stage's distributions [B, w + 1, V] where coins are tossed.

        logits: [B, w + 1, D] of the second stage, behind the row and behind each of the guessed tokens.
        """
        if guess.tree is not None:
            raise UsageError(
                "the first stage of a staged draft drafts chains, not trees", "leave tree: out of its name"
            )
        ids, past = self.second.draft_ids, guess.tokens.unbind(1)
        places = [penalize_draft(row, past[:i], inner, ids) for i, row in enumerate(logits.unbind(1))]
        logits = torch.stack(places, 1)
        if inner.rule == "greedy":
            return rules.match(guess.tokens, guess.counts, _named(logits.argmax(-1), ids)), None
        q = probabilities(logits, inner.sampling)
        if inner.rule == "match":
            position = inner.positions(q.device)[:, None] + torch.arange(q.shape[1], device=q.device)
            u = uniform(inner.seeds(q.device)[:, None], Stream.TARGET, position, torch.zeros_like(position))
            return rules.match(guess.tokens, guess.counts, _named(pick(q, u), ids)), None
        q = widen(q, ids, self.second.target_vocab)
        guessed = guess.probabilities
        if guessed is None:
            guessed = rules.one_hot(guess.tokens, q.shape[-1], q.dtype)
        return rules.speculative(guess.tokens, guess.counts, q, guessed, self._coins(inner)), q

    def rewind(self, rows: Sequence[Row], accepted: Sequence[int]) -> None:
        """The rows have grown by `accepted` drafted tokens and one more each, none of them seen by the target yet."""
        self.second.rewind(rows, accepted)
        if isinstance(self.first, StagedDrafter):
            self.first.rewind(rows, accepted)
        elif isinstance(self.first, ModelDrafter):
            # A model cuts its cache; lookup has none, and should learn only from what the target has kept.
            place = torch.arange(max(accepted) + 1)
            path = torch.where(place <= torch.tensor(accepted)[:, None], place, 0)
            self.first.keep(rows, Kept(accepted, path, None))

    def keep(self, rows: Sequence[Row], kept: Kept) -> None:
        if self.first is not None:
            self.first.keep(rows, kept)
        self.second.keep(rows, kept)

    def move(self, source: int, destination: int) -> None:
        if self.first is not None:
            self.first.move(source, destination)
        self.second.move(source, destination)


class _Rows(NamedTuple):
    """Distributions [n, V] of emitted tokens, and where in the draft they belong."""

    q: Tensor
    row: list[int]
    place: list[int]

    @classmethod
    def of(cls, q: Tensor, places: Sequence[int], counts: Sequence[int]) -> _Rows:
        """The first `counts[b]` of q [B, w + 1, V], whose first stands at place `places[b]` of row b's draft."""
        pairs = [(b, i) for b, count in enumerate(counts) for i in range(count)]
        row, inner = [b for b, _ in pairs], [i for _, i in pairs]
        return cls(q[row, inner], row, [places[b] + i for b, i in pairs])

    @staticmethod
    def joined(parts: Sequence[_Rows], rows: int, width: int, device: torch.device) -> Tensor | None:
        """[B, K, V], zero where nothing was drafted; None without parts."""
        if not parts:
            return None
        q = torch.cat([part.q for part in parts]).to(device)
        whole = q.new_zeros(rows, width, q.shape[-1])
        whole[[b for part in parts for b in part.row], [i for part in parts for i in part.place]] = q
        return whole


def stage_names(name: str, text: str) -> list[str]:
    """`ngram>early-exit:20` -> the drafters' names, first stage first.

    Args:
        name: of the whole drafter, for errors.

    Raises:
        UsageError: fewer than two names, or an empty one.
    """
    names = text.split(">")
    if len(names) < 2 or not all(names):
        raise UsageError(
            f"drafter {name!r} wants two stages", "write staged:FIRST>SECOND in quotes, as 'staged:ngram>early-exit:20'"
        )
    return names


def staged(drafters: Sequence[Drafter]) -> StagedDrafter:
    """Two or more drafters, each verified by the next: staged([a, b, c]) lets a and b together draft for c.

    Raises:
        UsageError: drafters that cannot stand where they do.
    """
    first, *others = drafters
    if isinstance(first, ModelDrafter) and first.shares_target_cache:
        # As a stage the target's own layers keep account of keys that the target has not verified yet.
        first = StagedDrafter(None, stage_of(first))
    for other in others:
        first = StagedDrafter(first, stage_of(other))
    assert isinstance(first, StagedDrafter), "a staged draft has two stages or more"
    return first


def _named(index: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Places in the draft vocabulary as the target's ids."""
    return index if draft_ids is None else draft_ids[index]


def _emitted(
    guess: Tensor, verdict: rules.Verdict, left: Sequence[int], stop_ids: set[int]
) -> tuple[list[int], list[list[int]]]:
    """What an inner round adds to each row: the kept part of the guess [B, w] and a token behind it, up to a stop.

    Returns:
        How much of the guess was kept, and the tokens; none for rows that are complete.
    """
    packed = torch.cat([verdict.accepted[:, None], verdict.token[:, None], guess], 1).tolist()
    emitted = []
    for (accepted, closing, *guessed), wanted in zip(packed, left, strict=True):
        tokens = [*guessed[:accepted], closing] if wanted > 0 else []
        end = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens) - 1)
        emitted.append(tokens[: end + 1])
    return [accepted for accepted, *_ in packed], emitted


def _copy(history: History, rows: int) -> History:
    """The first rows' history, to be continued with tokens that are only drafted."""
    return History.of(None if history.seen is None else history.seen[:rows].clone(), history.penalty)
