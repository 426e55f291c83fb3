"""Which trees a model drafts: dynamic ones, or a planned shape.

Both are grown level by level from the draft's logits (`Growth` of `tree_drafter`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from spectune.decoding.drafter import Draft, Round, is_any
from spectune.decoding.random import Stream, pick, uniform
from spectune.decoding.sampling import is_greedy, probabilities
from spectune.decoding.tree import Siblings, TokenTree
from spectune.decoding.tree_drafter import Growth, Vocabulary
from spectune.decoding.tree_growth import DynamicTree, Frontier
from spectune.decoding.tree_size import TreeSize, default_growth
from spectune.sweeping.cell import Rule, Sampling


class DynamicPlan:
    """EAGLE-2's trees: the draft's likeliest paths (see `tree_growth`), whatever the sampling settings.

    Args:
        size: how far to search, from the node budget.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, size: Callable[[int], TreeSize] = default_growth) -> None:
        self.size = size

    def prepare(self, round_: Round, limits: Sequence[int], slots: int, device: torch.device) -> DynamicShape:
        width, depth = self.size(round_.nodes)
        return DynamicShape(width, depth if round_.fixed else min(depth, max(limits)))

    def start(self, shape: Any, round_: Round, limits: Tensor, vocabulary: Vocabulary) -> Growth:
        return _DynamicGrowth(shape, limits, round_, vocabulary)


@dataclass(frozen=True, slots=True)
class DynamicShape:
    """How far a dynamic tree is searched."""

    width: int  # nodes of a level that are extended
    levels: int

    @property
    def room(self) -> int:
        return self.width * (self.levels - 1)

    def draft(self, out: Mapping[str, Any]) -> Draft:
        return _rebuilt(out, self.levels, "distinct", None)


def _rebuilt(out: Mapping[str, Any], levels: int, siblings: Siblings, breadths: tuple[int, ...] | None) -> Draft:
    """A draft from its tensors, see `draft_recorded`."""
    tree = TokenTree(out["parents"], levels)
    return Draft(out["tokens"], out["counts"], out["q"], levels, tree, siblings, breadths=breadths)


class _DynamicGrowth:
    def __init__(self, shape: DynamicShape, limits: Tensor, round_: Round, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.depth = shape.levels
        self.round = round_
        self.tree = DynamicTree(shape.width, limits, round_.stop_ids.to(vocabulary.device))

    def extend(self, logits: Tensor) -> Frontier | None:
        logits = logits.float()
        best = logits.topk(min(self.tree.width, logits.shape[-1]))
        log_p = best.values - logits.logsumexp(-1, keepdim=True)
        frontier = self.tree.extend(self.vocabulary.tokens(best.indices), log_p)
        return frontier if self.tree.depth < self.depth else None

    def draft(self, steps: int) -> Draft:
        tokens, counts, tree = self.tree.select(self.round.nodes)
        to = self.round.device
        return Draft(tokens.to(to), counts.to(to), None, steps, TokenTree(tree.parents.to(to), levels=tree.levels))


def draws_children(rule: Rule, sampling: Sampling) -> bool:
    """Whether the rule uses the distribution that children are drawn from. Greedy decoding, `match` and `typical`
    look at tokens only, and the draft's likeliest tokens serve them best."""
    return rule == "speculative" and not is_greedy(sampling)


class Shapes(Protocol):
    """Chooses static shapes."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the results should know about the shapes so far."""

    def parents(self, round_: Round, slots: int) -> Sequence[int]:
        """Parent node of each drafted token, at most `Round.nodes`, sorted by depth; siblings in order of rank."""


class StaticPlan:
    """Trees of a planned shape, with children drawn from the draft's distribution, or its likeliest tokens
    (`draws_children`).

    Args:
        shapes: the shape of a round's tree.
        siblings: how children are drawn: one after the other without replacement (Sequoia) or independently
            (SpecInfer).
    """

    def __init__(self, shapes: Shapes, siblings: Literal["without_replacement", "iid"]) -> None:
        self.shapes = shapes
        self.siblings: Literal["without_replacement", "iid"] = siblings
        self._layouts: dict[tuple[Sequence[int], int, torch.device, Siblings], Layout] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return self.shapes.notes

    def prepare(self, round_: Round, limits: Sequence[int], slots: int, device: torch.device) -> Layout | None:
        parents = tuple(self.shapes.parents(round_, slots))
        siblings: Siblings = self.siblings if draws_children(round_.rule, round_.sampling) else "distinct"
        depth = len(parents) if round_.fixed else max(limits)
        key = parents, depth, device, siblings
        if key not in self._layouts:
            self._layouts[key] = Layout.of(*key)
        layout = self._layouts[key]
        return layout if layout.steps else None

    def start(self, shape: Any, round_: Round, limits: Tensor, vocabulary: Vocabulary) -> Growth:
        return _StaticGrowth(shape, limits, round_, vocabulary)


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of one depth that have children, n of them, and those children, m in all."""

    nodes: Tensor  # [n] their numbers
    among: Tensor  # [n] their places among the children of the level above
    previous: Tensor  # [1, n] their parents' places among that level's nodes
    visible: Tensor  # [1, n, T] which of all nodes fed behind the root they see
    depths: Tensor  # [1, T] how many drafted tokens stand above each of those
    places: Tensor  # [m] of each child's parent among `nodes`
    ranks: Tensor  # [m] of each child among its siblings
    turns: tuple[tuple[Tensor, Tensor], ...]  # by rank: which children have it, and their parents' places
    first: int  # children are tokens number first … first + m - 1


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A shape, down to a depth, ready to be filled."""

    parents: Tensor  # [K]
    depths: Tensor  # [K]
    steps: tuple[_Level, ...]
    siblings: Siblings

    @property
    def levels(self) -> int:
        return len(self.steps)

    @property
    def room(self) -> int:
        return sum(len(level.nodes) for level in self.steps[1:])

    @property
    def breadths(self) -> tuple[int, ...]:
        """Most children of a node by level; leaves have none."""
        return (*(len(level.turns) for level in self.steps), 0)

    def draft(self, out: Mapping[str, Any]) -> Draft:
        return _rebuilt(out, self.levels, self.siblings, self.breadths)

    @classmethod
    def of(cls, parents: Sequence[int], depth: int, device: torch.device, siblings: Siblings) -> Layout:
        whole = TokenTree(torch.tensor([parents], dtype=torch.long).reshape(1, -1))
        kept = int(whole.within(torch.tensor([depth])))
        tree = TokenTree(whole.parents[:, :kept])  # a prefix, since nodes are sorted by depth
        depths, ancestors, parent = tree.depths[0], tree.ancestors[0], tree.parents[0]
        inner = torch.zeros(kept + 1, dtype=torch.bool).index_fill(0, parent, True)
        levels: list[_Level] = []
        fed = torch.zeros(0, dtype=torch.long)
        nodes = children = torch.zeros(1, dtype=torch.long)
        for level in range(tree.height if kept else 0):
            above = nodes
            nodes = (inner & (depths == level)).nonzero()[:, 0]
            among = torch.searchsorted(children, nodes)
            previous = torch.searchsorted(above, parent[nodes - 1]) if level else among
            if level:
                fed = torch.cat([fed, nodes])
            children = (depths == level + 1).nonzero()[:, 0]
            places = torch.searchsorted(nodes, parent[children - 1])
            ranks = tree.ranks[0, children - 1]
            having = [(ranks == rank).nonzero()[:, 0] for rank in range(int(ranks.max()) + 1)]
            levels.append(
                _Level(
                    nodes=nodes.to(device),
                    among=among.to(device),
                    previous=previous[None].to(device),
                    visible=ancestors[nodes][None, :, fed].to(device),
                    depths=depths[None, fed].sub(1).to(device),
                    places=places.to(device),
                    ranks=ranks.to(device),
                    turns=tuple((who.to(device), places[who].to(device)) for who in having),
                    first=int(children[0]) - 1,
                )
            )
        return cls(parent.to(device), depths[1:].to(device), tuple(levels), siblings)


class _StaticGrowth:
    """Fills a shape. Nodes that turn out to have no place in the tree are taken out at the end."""

    def __init__(self, layout: Layout, limits: Tensor, round_: Round, vocabulary: Vocabulary) -> None:
        device = vocabulary.device
        self.layout = layout
        self.siblings = layout.siblings
        self.round = round_
        self.vocabulary = vocabulary
        self.limits = limits
        self.stop_ids = round_.stop_ids.to(device)
        self.seeds = round_.seeds(device)[:, None]
        self.positions = round_.positions(device)[:, None]
        self.tokens: list[Tensor] = []  # [B, m] of each level
        self.exists: list[Tensor] = []  # likewise: nothing stands behind a stop token, or where q is used up
        self.open = torch.ones(len(limits), 1, dtype=torch.bool, device=device)  # [B, n] which nodes may have children
        self.sources: list[Tensor] = []  # [B, n, D] q of each level

    def extend(self, logits: Tensor) -> Frontier | None:
        level = self.layout.steps[len(self.tokens)]
        if self.siblings == "distinct":
            places = logits.topk(len(level.turns)).indices[:, level.places, level.ranks]
            exists = self.open[:, level.places]
        else:
            places, drawn = self._draw(logits, level)
            exists = self.open[:, level.places] & drawn
        tokens = self.vocabulary.tokens(places)
        self.tokens.append(tokens)
        self.exists.append(exists)
        if len(self.tokens) == self.layout.levels:
            return None
        below = self.layout.steps[len(self.tokens)]
        rows = len(tokens)
        self.open = (exists & ~is_any(tokens, self.stop_ids))[:, below.among]
        return Frontier(
            tokens[:, below.among],
            below.previous.expand(rows, -1),
            below.visible.expand(rows, -1, -1),
            below.depths.expand(rows, -1),
        )

    def _draw(self, logits: Tensor, level: _Level) -> tuple[Tensor, Tensor]:
        """[B, n, D] -> the children's places in the logits [B, m], and whether anything was left to draw [B, m]."""
        q = probabilities(logits, self.round.sampling)
        self.sources.append(q)
        left = q if self.siblings == "iid" else q.clone()
        rows = torch.arange(len(q), device=q.device)[:, None]
        result = torch.zeros(len(q), len(level.places), dtype=torch.long, device=q.device)
        drawn = torch.zeros_like(result, dtype=torch.bool)
        for who, places in level.turns:
            # A node's coin is that of its place in the shape: in a chain, the chain's own.
            coins = uniform(self.seeds, Stream.DRAFT, self.positions, (level.first + who)[None])
            weights = left[:, places]
            chosen = pick(weights, coins).clamp(max=q.shape[-1] - 1)  # behind the end where all weights are 0
            result[:, who] = chosen
            drawn[:, who] = weights.amax(-1) > 0
            if self.siblings == "without_replacement":
                left.index_put_((rows, places[None], chosen), left.new_zeros(()))
        return result, drawn

    def draft(self, steps: int) -> Draft:
        tokens, exists = torch.cat(self.tokens, 1), torch.cat(self.exists, 1)
        # Existing nodes first, in their order, so that a prefix is the tree.
        order = (~exists).long().argsort(dim=1, stable=True)
        number = torch.nn.functional.pad(order.argsort(1) + 1, (1, 0))  # [B, K + 1] of each node of the shape
        parents = number.gather(1, self.layout.parents[order])
        counts = (exists & (self.layout.depths <= self.limits[:, None])).sum(1)
        to = self.round.device
        tree = TokenTree(torch.where(exists.gather(1, order), parents, 0).to(to), levels=self.layout.levels)
        q_all = None
        if self.sources:
            q_all = torch.zeros(*number.shape, self.vocabulary.target_width, dtype=self.sources[0].dtype, device=to)
            rows = torch.arange(len(number), device=to)[:, None]
            for level, q in zip(self.layout.steps, self.sources, strict=True):
                q_all[rows, number[:, level.nodes].to(to)] = self.vocabulary.widen(q).to(to)
        chosen = tokens.gather(1, order).to(to)
        return Draft(chosen, counts.to(to), q_all, steps, tree, self.siblings, breadths=self.layout.breadths)
