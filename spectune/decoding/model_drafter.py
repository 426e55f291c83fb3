"""Drafters that run a language model: a separate draft model, or the target itself with fewer layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Slots, Step, advance, on_device, send
from spectune.decoding.draft_choice import chain
from spectune.decoding.drafter import Draft, Kept, Round, Row, draft_recorded
from spectune.decoding.graphs import Graphs, Tensors
from spectune.decoding.random import pick
from spectune.decoding.sampling import is_greedy, penalize, probabilities


class ModelDrafter:
    """Drafts K tokens with K forwards of a causal language model.

    Args:
        model: the draft.
        shared_vocab: ids below this exist in both vocabularies and may be proposed.
        target_vocab: width of the target's distributions; q is padded with zeros to it.
        shares_target_cache: self-speculation. The draft reads the verified keys of the layers it runs in the target's
            own cache and writes its own behind them, which the verification overwrites.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self, model: CausalModel, *, shared_vocab: int, target_vocab: int, shares_target_cache: bool = False
    ) -> None:
        self.model = model
        self.shared_vocab = shared_vocab
        self.target_vocab = target_vocab
        self.shares_target_cache = shares_target_cache
        self.store = KVStore(0, 0)
        self.graphs: Graphs | None = None
        self._ahead: tuple[tuple[Row, ...], Draft] | None = None
        self.cached: list[int] = []  # tokens of each row in the cache

    @property
    def device(self) -> torch.device | None:
        return self.model.device

    def record_with(self, graphs: Graphs | None) -> None:
        self.graphs = graphs

    def start(self, rows: int, capacity: int) -> None:
        self._ahead = None
        self.cached = [0] * rows
        if rows and self.shares_target_cache:
            return
        capacity = min(capacity, self.model.max_context)
        if self.graphs is not None and rows:
            self.store = self.graphs.store(f"draft {id(self)}", rows, capacity)
        else:
            self.store = KVStore(rows, capacity)

    def adopt(self, store: KVStore) -> None:
        """Self-speculation uses the target's cache of this run."""
        if self.shares_target_cache:
            self.store = store

    def admit(self, index: int, row: Row, states: Tensor | None = None) -> None:
        self.cached[index] = 0
        self._catch_up(index, row)

    def _gap(self, index: int, row: Row) -> int:
        """Known tokens that the cache lacks; at least 1, the newest."""
        return 1 if self.shares_target_cache else row.length - self.cached[index]

    def _catch_up(self, index: int, row: Row) -> None:
        """Fill the cache up to the newest token, which the next draft step feeds."""
        if self._gap(index, row) > 1 and row.length - 1 <= self.store.capacity:
            start = self.cached[index]
            ids = self._known(row.tokens[start:-1])[None]
            step = Step(index, (start,), ids.shape[1], self.model.device)
            self.model.forward(ids, step, self.store, last_only=True)
            self.cached[index] = row.length - 1

    def _known(self, tokens: list[int]) -> Tensor:
        """Token ids the draft can look up; a padding id only the target has becomes the draft's last one."""
        return torch.tensor(tokens, device=self.model.device).clamp(max=self.model.vocab_size - 1)

    def propose(self, round_: Round) -> Draft | None:
        rows = round_.rows
        # Fed are the newest token and the first K - 1 drafted ones, at positions n - 1 … n + K - 2.
        limits = [
            max(0, min(limit, self.store.capacity - row.length + 1))
            for limit, row in zip(round_.limits, rows, strict=True)
        ]
        if max(limits) == 0:
            return None
        # A fully accepted draft leaves its last token out of the cache: feed two tokens then. Feeding a cached token
        # again rewrites the same values, so all rows can feed equally many.
        for index, row in enumerate(rows):
            if self._gap(index, row) > 2:
                self._catch_up(index, row)
        if round_.fixed and not self.shares_target_cache:
            feed = 2  # always, so that all rounds have one shape; a row has two tokens at least
        else:
            feed = max(self._gap(index, row) for index, row in enumerate(rows) if limits[index])
        # Rows beyond the draft's context ride along on its last slots; nothing they produce is offered.
        starts = tuple(min(row.length, self.store.capacity) - feed for row in rows)
        ids = send([row.tokens[-feed:] for row in rows], self.model.device)
        width = round_.places(limits)
        if self.graphs is None:
            drafted = self._draft(ids, starts, round_, width, limits)
        else:
            drafted = self._taken_up(rows, width, round_.numbers(self.model.device, limits).limits) or self._recorded(
                self.graphs, ids, on_device(starts, self.model.device), round_, round_.inputs(self.model.device, limits)
            )
        for index, row in enumerate(rows):
            if limits[index]:
                self.cached[index] = row.length + limits[index] - 1
                if row.length + width - 1 > self.store.capacity:
                    # Places beyond the row's own limit were drafted over the last slot.
                    self.cached[index] = min(self.cached[index], self.store.capacity - 1)
            elif row.length > self.store.capacity:
                # What rode along overwrote the last slots; as a stage the row may come back to them.
                self.cached[index] = min(self.cached[index], self.store.capacity - feed)
        return drafted

    def draft_ahead(self, round_: Round, newest: Tensor, tokens: Tensor, accepted: Tensor, closing: Tensor) -> None:
        self._ahead = None
        k, device = round_.nodes, self.model.device
        longest = max(row.length for row in round_.rows) + 2 * (k + 1)
        if (
            self.graphs is None
            or round_.device != device
            or round_.history.seen is not None  # what the rows have seen is the host's to say
            or min(round_.limits) < k  # some row did not draft all, so its cache lacks more
            or longest > self.store.capacity
        ):
            return
        line = torch.cat([newest, tokens], 1)
        last = line.gather(1, accepted[:, None])  # the token before the closing one
        ids = closing[:, None] if self.shares_target_cache else torch.cat([last, closing[:, None]], 1)
        numbers = round_.numbers(device)
        positions = numbers.positions + accepted + 1
        inputs = {"seeds": numbers.seeds, "positions": positions, "limits": torch.full_like(positions, k), "seen": None}
        draft = self._recorded(self.graphs, ids, positions - ids.shape[1], round_, inputs)
        self._ahead = tuple(round_.rows), draft

    def _taken_up(self, rows: Sequence[Row], width: int, limits: Tensor) -> Draft | None:
        """What was drafted ahead for these very rows at this width, cut to their limits [B]; None if nothing was."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or len(ahead[0]) != len(rows) or any(a is not b for a, b in zip(ahead[0], rows, strict=True)):
            return None
        draft = ahead[1]
        if draft.tokens.shape[1] != width:
            return None
        return draft._replace(counts=torch.minimum(draft.counts, limits), ahead=True)

    def _recorded(self, graphs: Graphs, ids: Tensor, starts: Tensor, round_: Round, numbers: Tensors) -> Draft:
        """`_draft` of K places run from its recording. numbers: see `Round.inputs`."""
        out = draft_recorded(
            graphs,
            ("draft", id(self), round_.nodes),
            round_,
            {"ids": ids, "starts": starts, **numbers},
            lambda given, inside: self._draft(given["ids"], given["starts"], inside, round_.nodes),
        )
        return Draft(out["tokens"], out["counts"], out["q"], round_.nodes)

    def _draft(
        self, ids: Tensor, starts: Slots, round_: Round, width: int, limits: Sequence[int] | None = None
    ) -> Draft:
        """Draft `width` tokens behind `ids` [B, feed], whose first slots are `starts`."""
        ids = ids.clamp(max=self.model.vocab_size - 1)  # as `_known`
        tokens: list[Tensor] = []
        distributions: list[Tensor | None] = []
        for place in range(width):
            step = Step(0, starts, ids.shape[1], self.model.device, reach=self.store.capacity)
            logits = self.model.forward(ids, step, self.store, last_only=True)[:, -1, : self.shared_vocab]
            token, q = self._choose(logits, tokens, round_, place)
            tokens.append(token)
            distributions.append(q)
            starts = advance(starts, ids.shape[1], self.store.capacity - 1)
            ids = token[:, None]
        allowed = round_.numbers(round_.device, limits).limits
        return chain(tokens, distributions, allowed, round_, None, self.target_vocab, width)

    def _choose(self, logits: Tensor, before: list[Tensor], round_: Round, place: int) -> tuple[Tensor, Tensor | None]:
        """The draft's next token [B] and, where the rule needs it, its distribution [B, V]."""
        if round_.history.seen is not None:
            seen = round_.history.after(round_.count, before)[:, : self.shared_vocab]
            logits = penalize(logits, seen.to(logits.device), round_.history.penalty)
        if is_greedy(round_.sampling) or round_.rule == "typical":
            return logits.argmax(-1), None
        q = probabilities(logits, round_.sampling)
        token = pick(q, round_.draft_coins(place, logits.device))
        return token, None if round_.rule == "match" else q

    def keep(self, rows: Sequence[Row], kept: Kept) -> None:
        for index, row in enumerate(rows):
            self.cached[index] = min(self.cached[index], row.length - 1)

    def move(self, source: int, destination: int) -> None:
        self.cached[destination] = self.cached[source]
        if not self.shares_target_cache:
            self.store.move(source, destination)
