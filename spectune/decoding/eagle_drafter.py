"""Drafting with an EAGLE head of either version: a chain, or a tree (EAGLE-2's, or a planned shape).

Slot i of the head's cache holds the pair (state i, token i + 1), see `spectune.heads.eagle`. With n tokens known, the
pairs 0 … n - 2 are true ones; the output at pair n - 2 proposes the first token. Pairs behind it, at slots n - 1 …,
are made of the head's own outputs and drafted tokens. The next round overwrites them: its true pairs start at slot
n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from spectune.decoding.cache import KVStore, Slots, Step, Tail, advance, on_device, send
from spectune.decoding.draft_choice import chain, choose
from spectune.decoding.drafter import Draft, Kept, Round, Row, draft_recorded
from spectune.decoding.eagle_network import EagleNetwork
from spectune.decoding.graphs import Graphs
from spectune.decoding.product import Product
from spectune.decoding.tree_drafter import Plan, TreeShape, Vocabulary, penalize_paths
from spectune.decoding.tree_plans import DynamicPlan
from spectune.heads.eagle import EagleHead

_MOST_PAIRS = 32  # fed to all rows at once; a row with more pending pairs catches up alone first


class _Pairs(NamedTuple):
    """Pairs of every row, to be fed at once; shorter rows are padded behind."""

    ids: Tensor  # [B, m]
    states: Tensor  # [B, m, taps * h]
    starts: Slots
    last: Tensor | None  # [B] each row's last real pair; None: the last one of all rows

    def inputs(self, device: torch.device | None) -> dict[str, Tensor | None]:
        """For a recorded computation, whose shape does not depend on how even the rows are."""
        assert device is not None
        last = torch.full_like(self.ids[:, 0], self.ids.shape[1] - 1) if self.last is None else self.last
        return {"ids": self.ids, "states": self.states, "starts": on_device(self.starts, device), "last": last}

    @classmethod
    def of(cls, given: dict[str, Any]) -> _Pairs:
        return cls(given["ids"], given["states"], given["starts"], given["last"])


class EagleDrafter:
    """Drafts a chain with one small forward per token, the first of which also takes in what the target has said since.

    Args:
        head: bound to the target, on its device and in its type.
        target_vocab: width of the target's distributions.
        product: what multiplies with the head's matrices.
    """

    def __init__(self, head: EagleHead, *, target_vocab: int, product: type[Product] = Product) -> None:
        self.network = EagleNetwork(head, product)
        self.taps = head.config.taps
        self.draft_ids = head.draft_ids
        self.target_vocab = target_vocab
        self.context = head.config.context
        self.store = KVStore(0, 0)
        self.graphs: Graphs | None = None
        self.room = 0  # slots that rows may fill
        self.fed: list[int] = []  # true pairs of each row in the cache
        self.pending: list[list[Tensor]] = []  # states [n, taps * h] of the true pairs that are not

    @property
    def device(self) -> torch.device | None:
        return self.network.device

    def record_with(self, graphs: Graphs | None) -> None:
        self.graphs = graphs

    def start(self, rows: int, capacity: int) -> None:
        self.room = capacity
        if self.graphs is not None and rows:
            self.store = self.graphs.store(f"eagle {id(self)}", rows, capacity + _MOST_PAIRS)
        else:
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
            if self.graphs is not None:
                self.graphs.forget()
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
        """Put pending true pairs into the cache, see `_pairs`. -> [B, h] the output at every row's last pair."""
        return self._take_in(self._pairs(rows, states, first_row), first_row)

    def _pairs(self, rows: Sequence[Row], states: Sequence[Tensor], first_row: int, most: int = 0) -> _Pairs:
        """Pending pairs side by side.

        Args:
            rows: neighbours, the first of them number `first_row`.
            states: [m, taps * h] per row; rows may differ in m, shorter ones are padded behind.
            most: pad to this at least.
        """
        counts = [len(s) for s in states]
        most = max(most, *counts)
        starts = tuple(self.fed[first_row : first_row + len(rows)])
        ids = [row.tokens[start + 1 : start + 1 + most] for row, start in zip(rows, starts, strict=True)]
        numbers = [[*tokens, *[0] * (most - len(tokens)), count - 1] for tokens, count in zip(ids, counts, strict=True)]
        packed = send(numbers, self.network.device)
        joined = states[0][None] if len(states) == 1 else pad_sequence(list(states), batch_first=True)
        if joined.shape[1] < most:
            joined = functional.pad(joined, (0, 0, 0, most - joined.shape[1]))
        even = min(counts) == most
        joined = joined.to(self.network.device, self.network.dtype)
        return _Pairs(packed[:, :-1], joined, starts, None if even else packed[:, -1])

    def _take_in(self, pairs: _Pairs, first_row: int = 0) -> Tensor:
        """Feed pairs; [B, h] the output at every row's last one."""
        features = self.network.fuse(pairs.states)
        step = Step(first_row, pairs.starts, pairs.ids.shape[1], self.network.device, reach=self.store.capacity)
        output = self.network.step(pairs.ids, features, step, self.store)
        if pairs.last is None:
            return output[:, -1]
        return output[torch.arange(len(output), device=output.device), pairs.last]

    def propose(self, round_: Round) -> Draft | None:
        rows = round_.rows
        limits = [self._limit(limit, row) for limit, row in zip(round_.limits, rows, strict=True)]
        if max(limits) == 0:
            return None
        width = round_.places(limits)
        base = tuple(row.length - 1 for row in rows)
        pairs = self._pending(rows, self._fixed_pairs(width))
        device = self.network.device
        if self.graphs is None:
            return self._chain(pairs, base, round_, round_.numbers(device, limits).limits, width)
        out = draft_recorded(
            self.graphs,
            ("eagle", id(self), width),
            round_,
            pairs.inputs(device) | round_.inputs(device, limits),
            lambda given, inside: self._chain(
                _Pairs.of(given), inside.positions(device) - 1, inside, inside.numbers(device).limits, width
            ),
        )
        return Draft(out["tokens"], out["counts"], out["q"], width)

    def _fixed_pairs(self, levels: int) -> int:
        """Pairs to feed in every round of a fixed shape: one more than a round may accept. 0: as many as there are."""
        return levels + 1 if self.graphs is not None else 0

    def _chain(self, pairs: _Pairs, base: Slots, round_: Round, limits: Tensor, width: int) -> Draft:
        """Draft `width` tokens. base: [B] the first slots behind the true pairs; limits: [B]."""
        output = self._take_in(pairs)
        tokens: list[Tensor] = []
        distributions: list[Tensor | None] = []
        starts = base
        for place in range(width):
            token, q = choose(self.network.logits(output), tokens, round_, self.draft_ids)
            tokens.append(token)
            distributions.append(q)
            if place + 1 < width:
                # Rows that may not draft so far ride along on their last slot; nothing they produce is offered.
                starts = advance(starts, 1 if place else 0, self.store.capacity - 1)
                step = Step(0, starts, 1, self.network.device, reach=self.store.capacity)
                features = self.network.following(output)[:, None]
                output = self.network.step(token[:, None], features, step, self.store)[:, -1]
        allowed = limits.to(round_.device)
        return chain(tokens, distributions, allowed, round_, self.draft_ids, self.target_vocab, width)

    def _limit(self, limit: int, row: Row) -> int:
        """Tokens a row may draft: the last is proposed at slot n - 3 + K, and only the first from a true pair."""
        return max(0, min(limit, min(self.room, self.context) - row.length + 2))

    def feed_pending(self, rows: Sequence[Row]) -> Tensor:
        """Feed all pending pairs of all rows; [B, h] the outputs that the next tokens come from."""
        pairs = self._pending(rows)
        if self.graphs is None:
            return self._take_in(pairs)

        def feed(given: dict[str, Any]) -> dict[str, Any]:
            return {"output": self._take_in(_Pairs.of(given))}

        out = self.graphs.run(("eagle pairs", id(self)), feed, pairs.inputs(self.device))
        return out["output"].clone()  # outlives the next feed

    def _pending(self, rows: Sequence[Row], most: int = 0) -> _Pairs:
        """All pending pairs of all rows, which count as fed from now on.

        Args:
            most: pad to so many.
        """
        for index, row in enumerate(rows):
            if row.length - 1 - self.fed[index] > (most or _MOST_PAIRS):
                self._catch_up(index, row)
        states = [p[0] if len(p) == 1 else torch.cat(p) for p in self.pending[: len(rows)]]
        pairs = self._pairs(rows, states, 0, most)
        for index, row in enumerate(rows):
            self.fed[index] = row.length - 1
            self.pending[index] = []
        return pairs

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
        head, target_vocab, product: as for chains.
        plan: which trees; EAGLE-2's if not given.
    """

    def __init__(
        self, head: EagleHead, plan: Plan | None = None, *, target_vocab: int, product: type[Product] = Product
    ) -> None:
        super().__init__(head, target_vocab=target_vocab, product=product)
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
        device = self.network.device
        shape = self.plan.prepare(round_, limits, len(self.fed), device)
        if shape is None:
            return None
        self._make_room(max(_MOST_PAIRS, shape.room))
        base = tuple(row.length - 1 for row in rows)
        pairs = self._pending(rows, self._fixed_pairs(shape.levels))

        if self.graphs is None:
            return self._tree(pairs, base, round_, round_.numbers(device, limits).limits, shape)
        return shape.draft(
            draft_recorded(
                self.graphs,
                ("eagle tree", id(self), shape),
                round_,
                pairs.inputs(device) | round_.inputs(device, limits),
                lambda given, inside: self._tree(
                    _Pairs.of(given), inside.positions(device) - 1, inside, inside.numbers(device).limits, shape
                ),
            )
        )

    def _tree(self, pairs: _Pairs, base: Slots, round_: Round, limits: Tensor, shape: TreeShape) -> Draft:
        growth = self.plan.start(shape, round_, limits, self.vocabulary)
        output = self._take_in(pairs)[:, None]  # [B, W, h]
        # [B, W, d] tokens from the root on
        paths = torch.zeros(len(output), 1, 0, dtype=torch.long, device=output.device)
        written, steps = 0, 1
        while (
            frontier := growth.extend(penalize_paths(self.network.logits(output), paths, round_, self.draft_ids))
        ) is not None:
            above = frontier.previous[:, :, None]
            paths = torch.cat([paths.gather(1, above.expand(-1, -1, paths.shape[2])), frontier.tokens[:, :, None]], 2)
            features = self.network.following(output).gather(1, above.expand(-1, -1, output.shape[2]))
            width = frontier.tokens.shape[1]
            tail = Tail(base, frontier.depths, frontier.visible)
            starts = advance(base, written, self.store.capacity - width)
            step = Step(0, starts, width, self.network.device, tail, self.store.capacity)
            output = self.network.step(frontier.tokens, features, step, self.store)
            written += width
            steps += 1
        return growth.draft(steps)
