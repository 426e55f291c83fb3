"""Drafting with an EAGLE head of either version: a chain, or a tree (EAGLE-2's, or a planned shape).

Slot i of the head's cache holds the pair (state i, token i + 1), see `spectune.heads.eagle`. With n tokens known, the
pairs 0 … n - 2 are true ones; the output at pair n - 2 proposes the first token. Pairs behind it, at slots n - 1 …,
are made of the head's own outputs and drafted tokens. The next round overwrites them: its true pairs start at slot
n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from spectune.decoding.cache import KVStore, Step, Tail
from spectune.decoding.draft_choice import chain, choose
from spectune.decoding.drafter import Draft, Kept, Round, Row
from spectune.decoding.eagle_network import EagleNetwork
from spectune.decoding.tree_drafter import Plan, Vocabulary, penalize_paths
from spectune.decoding.tree_plans import DynamicPlan
from spectune.heads.eagle import EagleHead

_MOST_PAIRS = 32  # fed to all rows at once; a row with more pending pairs catches up alone first


class EagleDrafter:
    """Drafts a chain with one small forward per token, the first of which also takes in what the target has said since.

    Args:
        head: bound to the target, on its device and in its type.
        target_vocab: width of the target's distributions.
    """

    def __init__(self, head: EagleHead, *, target_vocab: int) -> None:
        self.network = EagleNetwork(head)
        self.taps = head.config.taps
        self.draft_ids = head.draft_ids
        self.target_vocab = target_vocab
        self.context = head.config.context
        self.store = KVStore(0, 0)
        self.room = 0  # slots that rows may fill
        self.fed: list[int] = []  # true pairs of each row in the cache
        self.pending: list[list[Tensor]] = []  # states [n, taps * h] of the true pairs that are not

    @property
    def device(self) -> torch.device | None:
        return self.network.device

    def start(self, rows: int, capacity: int) -> None:
        self.room = capacity
        self.store = KVStore(rows, capacity)
        self._make_room(_MOST_PAIRS)  # padding of a ragged feed may reach so far behind a row's last pair
        self.fed = [0] * rows
        self.pending = [[] for _ in range(rows)]

    def _make_room(self, slots: int) -> None:
        """Lengthen the cache so that this many slots lie behind the longest row; free before the first write."""
        lacking = self.room + slots - self.store.capacity
        if lacking > 0:
            for buffers in (self.store.keys, self.store.values):
                for layer, buffer in buffers.items():
                    buffers[layer] = functional.pad(buffer, (0, 0, 0, lacking))
            self.store.capacity += lacking
        self.network.make_room(self.store.capacity)

    def admit(self, index: int, row: Row, states: Tensor | None) -> None:
        assert states is not None, "the decoder hands over the taps that a drafter names"
        self.fed[index] = 0
        self.pending[index] = [states]
        self._catch_up(index, row)

    def _catch_up(self, index: int, row: Row) -> None:
        """Feed a row's pending pairs but the last, which the next draft's first step feeds."""
        states = torch.cat(self.pending[index])
        count = len(states) - 1
        if count:
            self._feed([row], [states[:-1]], index)
        self.fed[index] += count
        self.pending[index] = [states[-1:]]

    def _feed(self, rows: Sequence[Row], states: Sequence[Tensor], first_row: int) -> Tensor:
        """Put pending true pairs into the cache.

        Args:
            rows: neighbours, the first of them number `first_row`.
            states: [m, taps * h] per row; rows may differ in m, shorter ones are padded behind.

        Returns:
            [B, h] the output at every row's last pair.
        """
        counts = [len(s) for s in states]
        most = max(counts)
        starts = tuple(self.fed[first_row : first_row + len(rows)])
        ids = [row.tokens[start + 1 : start + 1 + most] for row, start in zip(rows, starts, strict=True)]
        padded = torch.tensor([tokens + [0] * (most - len(tokens)) for tokens in ids], device=self.device)
        joined = states[0][None] if len(states) == 1 else pad_sequence(list(states), batch_first=True)
        features = self.network.fuse(joined.to(self.network.device, self.network.dtype))
        step = Step(first_row, starts, most, self.network.device)
        output = self.network.step(padded, features, step, self.store)
        if min(counts) == most:
            return output[:, -1]
        last = torch.tensor(counts, device=output.device) - 1
        return output[torch.arange(len(rows), device=output.device), last]

    def propose(self, round_: Round) -> Draft | None:
        rows = round_.rows
        limits = [self._limit(limit, row) for limit, row in zip(round_.limits, rows, strict=True)]
        width = max(limits)
        if width == 0:
            return None
        output = self._take_in(rows)
        tokens: list[Tensor] = []
        distributions: list[Tensor | None] = []
        for place in range(width):
            token, q = choose(self.network.logits(output), tokens, round_, self.draft_ids)
            tokens.append(token)
            distributions.append(q)
            if place + 1 < width:
                # Rows that may not draft so far ride along on their last slot; nothing they produce is offered.
                starts = tuple(min(row.length - 1 + place, self.store.capacity - 1) for row in rows)
                step = Step(0, starts, 1, self.network.device)
                features = self.network.following(output)[:, None]
                output = self.network.step(token[:, None], features, step, self.store)[:, -1]
        allowed = torch.tensor(limits, device=round_.device)
        return chain(tokens, distributions, allowed, round_, self.draft_ids, self.target_vocab, width)

    def _limit(self, limit: int, row: Row) -> int:
        """Tokens a row may draft: the last is proposed at slot n - 3 + K, and only the first from a true pair."""
        return max(0, min(limit, min(self.room, self.context) - row.length + 2))

    def _take_in(self, rows: Sequence[Row]) -> Tensor:
        """Feed all pending pairs of all rows; [B, h] the outputs that the first drafted tokens come from."""
        for index, row in enumerate(rows):
            if row.length - 1 - self.fed[index] > _MOST_PAIRS:
                self._catch_up(index, row)
        states = [p[0] if len(p) == 1 else torch.cat(p) for p in self.pending[: len(rows)]]
        output = self._feed(rows, states, 0)
        for index, row in enumerate(rows):
            self.fed[index] = row.length - 1
            self.pending[index] = []
        return output

    def keep(self, rows: Sequence[Row], kept: Kept) -> None:
        assert kept.states is not None, "the decoder hands over the taps that a drafter names"
        row = torch.arange(len(rows), device=kept.path.device)[:, None]
        along = kept.states[row, kept.path]  # [B, D + 1, taps * h] from the root on
        for index, accepted in enumerate(kept.accepted):
            self.pending[index].append(along[index, : accepted + 1])

    def move(self, source: int, destination: int) -> None:
        self.fed[destination] = self.fed[source]
        self.pending[destination] = list(self.pending[source])
        self.store.move(source, destination)


class EagleTreeDrafter(EagleDrafter):
    """Drafts a tree with one forward per level, on all of its nodes that have children at once.

    Args:
        head, target_vocab: as for chains.
        plan: which trees; EAGLE-2's if not given.
    """

    def __init__(self, head: EagleHead, plan: Plan | None = None, *, target_vocab: int) -> None:
        super().__init__(head, target_vocab=target_vocab)
        self.plan = plan or DynamicPlan()
        self.vocabulary = Vocabulary(head.draft_ids, target_vocab, self.network.device)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the results should know; grows while trees are planned."""
        return self.plan.notes

    def propose(self, round_: Round) -> Draft | None:
        round_.refuse_block()
        rows = round_.rows
        limits = [self._limit(limit, row) for limit, row in zip(round_.limits, rows, strict=True)]
        if max(limits) == 0:
            return None
        growth = self.plan.start(round_, limits, len(self.fed), self.vocabulary)
        if growth is None:
            return None
        self._make_room(growth.room)
        device = self.network.device
        base = tuple(row.length - 1 for row in rows)
        output = self._take_in(rows)[:, None]  # [B, W, h]
        paths = torch.zeros(len(rows), 1, 0, dtype=torch.long, device=device)  # [B, W, d] tokens from the root on
        written, steps = 0, 1
        while (
            frontier := growth.extend(penalize_paths(self.network.logits(output), paths, round_, self.draft_ids))
        ) is not None:
            above = frontier.previous[:, :, None]
            paths = torch.cat([paths.gather(1, above.expand(-1, -1, paths.shape[2])), frontier.tokens[:, :, None]], 2)
            features = self.network.following(output).gather(1, above.expand(-1, -1, output.shape[2]))
            width = frontier.tokens.shape[1]
            starts = tuple(slot + written for slot in base)
            step = Step(0, starts, width, device, Tail(base, frontier.depths, frontier.visible))
            output = self.network.step(frontier.tokens, features, step, self.store)
            written += width
            steps += 1
        return growth.draft(steps)
