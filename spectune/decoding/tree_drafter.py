"""Trees drafted by a language model: a separate draft model, or the target itself with fewer layers.

A level costs one forward of the draft over its nodes that have children, however many they are; the first forward
feeds the tokens that the cache still lacks, the newest last. Two plans decide which nodes there are: `DynamicPlan`
follows the draft's confidence, `StaticPlan` fills a shape that was planned before (see `tree_plans`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from spectune.decoding.cache import KVStore, Slots, Step, Tail, advance, on_device, send
from spectune.decoding.draft_choice import widen
from spectune.decoding.drafter import Draft, Round, Row, draft_recorded
from spectune.decoding.exit_drafter import TrimmedDrafter
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.sampling import penalize
from spectune.decoding.tree_growth import Frontier

_MOST_PENDING = 16  # tokens fed to all rows at once; a row that lacks more catches up alone first


class Vocabulary(NamedTuple):
    """What a draft's D logits stand for."""

    draft_ids: Tensor | None  # [D] the target's ids, ascending, on the draft's device; None: the first D ids
    target_width: int  # V
    device: torch.device  # the draft's

    def tokens(self, places: Tensor) -> Tensor:
        """The target's ids at places of the logits."""
        return places if self.draft_ids is None else self.draft_ids[places]

    def widen(self, q: Tensor) -> Tensor:
        """[..., D] -> [..., V], zero for the ids that the draft lacks."""
        return widen(q, self.draft_ids, self.target_width)


class Growth(Protocol):
    """A round's tree while it grows."""

    def extend(self, logits: Tensor) -> Frontier | None:
        """Add a level below the frontier, at first the root, from its penalised logits [B, W, D].

        Returns:
            The next frontier; None when the tree is complete.
        """

    def draft(self, steps: int) -> Draft: ...


class TreeShape(Protocol):
    """What is settled about a round's tree before it grows, and so what is computed."""

    def __hash__(self) -> int: ...

    @property
    def room(self) -> int:
        """Nodes behind the root that the draft will be fed."""

    @property
    def levels(self) -> int: ...

    def draft(self, out: Mapping[str, Any]) -> Draft:
        """The draft from its tensors, see `draft_recorded`."""


class Plan(Protocol):
    """Which trees are drafted."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the results should know about the trees so far."""

    def prepare(self, round_: Round, limits: Sequence[int], slots: int, device: torch.device) -> TreeShape | None:
        """Decide on the shape; None where no node is worth drafting.

        Args:
            limits: [B] deepest level per row, at least one of them positive.
            slots: rows of the whole run, of which some may be empty by now.
            device: the draft's.
        """

    def start(self, shape: Any, round_: Round, limits: Tensor, vocabulary: Vocabulary) -> Growth:
        """Begin a tree on the draft's device. shape: from `prepare`; limits: [B]."""


class TreeModelDrafter(ModelDrafter):
    """Drafts a tree with one forward per level.

    The tree's keys are dropped after the round. What was accepted is fed again with the next round's root, in the one
    forward that has to be made anyway: a few more tokens in it cost less than moving the accepted path's keys together
    in every layer would, and leaves, which were never fed, would have to be fed after all.

    Args:
        drafter: names the model and its vocabulary; its own state is not used.
        plan: which trees.
    """

    def __init__(self, drafter: ModelDrafter, plan: Plan) -> None:
        super().__init__(
            drafter.model,
            shared_vocab=drafter.shared_vocab,
            target_vocab=drafter.target_vocab,
            shares_target_cache=drafter.shares_target_cache,
        )
        self.vocabulary = vocabulary_of(drafter)
        self.plan = plan
        self.context = 0  # positions that a row may fill
        self.room = 0  # slots that trees have needed behind the text so far

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the results should know; grows while trees are planned."""
        return self.plan.notes

    def start(self, rows: int, capacity: int) -> None:
        super().start(rows, capacity)
        self.context = min(capacity, self.model.max_context)
        if rows and not self.shares_target_cache:
            self._make_room()

    def adopt(self, store: KVStore) -> None:
        super().adopt(store)
        self._make_room()

    def _make_room(self) -> None:
        """Lengthen the cache so that the text and the largest tree so far fit; free before the first write.

        Needed in a shared cache too: a dynamic tree is chosen from more nodes than the target gets to see.
        """
        lacking = self.context + self.room - self.store.capacity
        if lacking <= 0:
            return
        for buffers in (self.store.keys, self.store.values):
            for layer, buffer in buffers.items():
                buffers[layer] = torch.nn.functional.pad(buffer, (0, 0, 0, lacking))
        self.store.capacity += lacking
        if self.graphs is not None:
            self.graphs.forget()

    def draft_ahead(self, round_: Round, newest: Tensor, tokens: Tensor, accepted: Tensor, closing: Tensor) -> None:
        """Nothing: which nodes were kept, and so what the cache lacks, is not known yet."""

    def propose(self, round_: Round) -> Draft | None:
        round_.refuse_block()
        rows = round_.rows
        # Fed are the root at position n - 1 and nodes above the last level.
        limits = [
            max(0, min(limit, self.context - row.length + 1)) for limit, row in zip(round_.limits, rows, strict=True)
        ]
        if max(limits) == 0:
            return None
        device = self.model.device
        shape = self.plan.prepare(round_, limits, len(self.cached), device)
        if shape is None:
            return None
        self.room = max(self.room, shape.room)
        self._make_room()
        ids, starts = self._roots(rows, limits, shape.levels + 1 if round_.fixed else 0)
        # Rows beyond the draft's context ride along on its last slots; nothing they produce is offered.
        base = tuple(min(row.length, self.context) for row in rows)

        if self.graphs is None:
            return self._grow(ids, starts, base, round_, round_.numbers(device, limits).limits, shape)
        places = {"ids": ids, "starts": on_device(starts, device), "base": on_device(base, device)}
        return shape.draft(
            draft_recorded(
                self.graphs,
                ("tree", id(self), shape),
                round_,
                places | round_.inputs(device, limits),
                lambda given, inside: self._grow(
                    given["ids"], given["starts"], given["base"], inside, inside.numbers(device).limits, shape
                ),
            )
        )

    def _grow(self, ids: Tensor, starts: Slots, base: Slots, round_: Round, limits: Tensor, shape: TreeShape) -> Draft:
        """Feed what the cache lacks, `ids` [B, feed] at slots `starts`, and grow a tree at slots `base`."""
        device, reach = self.model.device, self.store.capacity
        growth = self.plan.start(shape, round_, limits, self.vocabulary)
        step = Step(0, starts, ids.shape[1], device, reach=reach)
        logits = self.model.forward(ids, step, self.store, last_only=True)[..., : self.shared_vocab]
        paths = torch.zeros(len(ids), 1, 0, dtype=torch.long, device=device)  # [B, W, d]
        fed, steps = 0, 1
        draft_ids = self.vocabulary.draft_ids
        while (frontier := growth.extend(penalize_paths(logits, paths, round_, draft_ids))) is not None:
            tokens = frontier.tokens
            width = tokens.shape[1]
            above = paths.gather(1, frontier.previous[:, :, None].expand(-1, -1, paths.shape[2]))
            paths = torch.cat([above, tokens[:, :, None]], 2)
            tail = Tail(base, frontier.depths, frontier.visible)
            step = Step(0, advance(base, fed, reach - width), width, device, tail, reach)
            logits = self.model.forward(tokens, step, self.store)[..., : self.shared_vocab]
            fed += width
            steps += 1
        return growth.draft(steps)

    def _roots(self, rows: Sequence[Row], limits: Sequence[int], fixed: int) -> tuple[Tensor, Slots]:
        """What the cache lacks up to the newest token, [B, feed], and its slots; it counts as fed from now on.

        Args:
            fixed: feed so many, where rows are long enough; 0: as many as are lacking.
        """
        most = min(_MOST_PENDING, self.context, *(row.length for row in rows))
        for index, row in enumerate(rows):
            if limits[index] and self._gap(index, row) > most:
                self._catch_up(index, row)
        # Feeding a cached token again rewrites the same values, so all rows can feed equally many.
        feed = max(self._gap(index, row) for index, row in enumerate(rows) if limits[index])
        if not self.shares_target_cache:
            feed = max(feed, min(fixed, most))
        for index, row in enumerate(rows):
            if limits[index]:
                self.cached[index] = row.length
        starts = tuple(min(row.length, self.context) - feed for row in rows)
        ids = send([row.tokens[-feed:] for row in rows], self.model.device)
        return ids.clamp(max=self.model.vocab_size - 1), starts


def penalize_paths(logits: Tensor, paths: Tensor, round_: Round, draft_ids: Tensor | None) -> Tensor:
    """Apply the run's repetition penalty to the logits of a tree's nodes, each with its own past.

    Args:
        logits: [B, W, D].
        paths: [B, W, d] the target's ids on each node's path, its own included; d = 0 for the root.
        draft_ids: [D] what the logits stand for; None: the first D ids.
    """
    if round_.history.seen is None:
        return logits
    seen = round_.history.seen[: round_.count, None].to(logits.device).repeat(1, paths.shape[1], 1)
    seen = seen.scatter(2, paths, True)
    seen = seen[..., : logits.shape[-1]] if draft_ids is None else seen[..., draft_ids]
    return penalize(logits, seen, round_.history.penalty)


def vocabulary_of(drafter: ModelDrafter) -> Vocabulary:
    draft_ids = drafter.draft_ids if isinstance(drafter, TrimmedDrafter) else None
    return Vocabulary(draft_ids, drafter.target_vocab, drafter.model.device)
