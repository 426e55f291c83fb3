"""Shapes of static trees: which children of which nodes are worth drafting.

Both methods start from measured chances: that a draft's r-th guess at a node is the token the target goes on with. A
node's own chance is the product along its path, and a tree emits as many tokens per round as its nodes' chances sum
to, the root's 1 included.

No torch here: the sweep plans shapes before any model is loaded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Shape(NamedTuple):
    """A tree of drafted tokens, sorted by depth and, within a level, by parent and rank."""

    parents: tuple[int, ...]  # node of each drafted token's parent: 0 the root, i the i-th drafted token
    ranks: tuple[int, ...]  # which guess of its parent each drafted token is, from 0


def grow(rank_acceptance: Sequence[Sequence[float]], nodes: int) -> Shape:
    """The likeliest nodes, one after the other (Medusa, Cai et al. 2024, arXiv 2401.10774, section 2.1.2).

    For heads that guess independently of each other: the r-th guess at depth i has one chance in all the tree.

    Args:
        rank_acceptance: [depth][rank] chance that the guess is right; a level may have its own number of ranks.
        nodes: size of the tree; fewer if there are no more guesses. Of equal nodes the shallower one comes first,
            then the one of lower ranks.
    """
    paths: list[tuple[int, ...]] = []
    frontier: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    while frontier and len(paths) <= nodes:
        chance, depth, path = heapq.heappop(frontier)
        paths.append(path)
        for rank, acceptance in enumerate(rank_acceptance[depth] if depth < len(rank_acceptance) else ()):
            heapq.heappush(frontier, (chance * acceptance, depth + 1, (*path, rank)))
    return _shape(paths)


def _shape(paths: Iterable[tuple[int, ...]]) -> Shape:
    """The shape whose nodes, the root included, have these ranks on their paths."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    number = {path: node for node, path in enumerate(ordered)}
    drafted = ordered[1:]
    return Shape(tuple(number[path[:-1]] for path in drafted), tuple(path[-1] for path in drafted))


class SequoiaTable:
    """The best tree of every size and depth (Sequoia, Chen et al. 2024, arXiv 2402.12374, section 4.1).

    Assumes that a node's r-th child is accepted with one and the same chance everywhere in the tree.

    Args:
        acceptance: [rank] chance that the r-th child is the one that is accepted.
        max_nodes: of drafted nodes.
        max_depth: levels below the root.

    Attributes:
        expected: [max_depth + 1, max_nodes + 1], entry [d, n]: tokens per round of the best tree with at most n
            drafted nodes, none deeper than d.
    """

    def __init__(self, acceptance: Sequence[float], max_nodes: int, max_depth: int) -> None:
        if min(acceptance, default=0.0) < 0 or sum(acceptance) > 1 + 1e-9:
            raise ValueError(f"chances of exclusive events must be at least 0 and sum to at most 1: {list(acceptance)}")
        sizes = max_nodes + 1  # of a tree, its root included
        exactly = np.full(sizes + 1, -np.inf)  # tokens of the best tree of exactly so many nodes, at this depth
        exactly[1] = 1.0
        levels = [exactly]
        # Both are filled by [depth - 1]: how many children a root of m nodes has, and how many of its m nodes hang
        # from the last of b children.
        self._children: list[NDArray[np.int64]] = []
        self._last: list[list[NDArray[np.int64]]] = []
        size = np.arange(sizes + 1)
        # [m, y] nodes left when the last child's subtree takes y; no tree has 0 nodes, so 0 stands for "too few" too.
        rest = (size[:, None] - size).clip(min=0)
        for _ in range(max_depth):
            below = levels[-1]
            forests = [levels[0]]  # by number of children: a root of m nodes with exactly so many
            last = []
            for chance in acceptance:
                joined = forests[-1][rest] + _worth(chance, below)
                last.append(joined.argmax(1))
                forests.append(joined.max(1))
            stacked = np.stack(forests)
            self._children.append(stacked.argmax(0))
            self._last.append(last)
            levels.append(stacked.max(0))
        self._exactly = np.stack(levels)[:, 1:]
        self.expected: NDArray[np.float64] = np.maximum.accumulate(self._exactly, axis=1)

    def shape(self, nodes: int, depth: int) -> Shape:
        """The best tree of at most `nodes` drafted nodes and levels 1 … depth; the smallest of equally good ones."""
        size = int(self._exactly[depth, : nodes + 1].argmax()) + 1
        paths: list[tuple[int, ...]] = []
        open_: list[tuple[tuple[int, ...], int, int]] = [((), size, depth)]
        while open_:
            path, left, levels = open_.pop()
            paths.append(path)
            if left > 1:
                for rank in reversed(range(self._children[levels - 1][left])):
                    child = int(self._last[levels - 1][rank][left])
                    open_.append(((*path, rank), child, levels - 1))
                    left -= child
        return _shape(paths)


def _worth(chance: float, below: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a child of this chance adds with its subtree; no tree of a size stays no tree, also at chance 0."""
    return np.where(np.isfinite(below), chance * np.where(np.isfinite(below), below, 0.0), -np.inf)


class Choice(NamedTuple):
    shape: Shape
    tokens: float  # expected per round
    seconds: float  # of a round


def choose(table: SequoiaTable, draft_step_seconds: float, verify_seconds: Callable[[int], float]) -> Choice:
    """The tree that takes the least time per token; no tree at all where none is worth its cost.

    Args:
        draft_step_seconds: measured time to draft one level.
        verify_seconds: measured time of a target forward over n tokens, root included.
    """
    depths, sizes = table.expected.shape
    verify = np.array([verify_seconds(nodes + 1) for nodes in range(sizes)])
    seconds = draft_step_seconds * np.arange(depths)[:, None] + verify
    depth, nodes = np.unravel_index((seconds / table.expected).argmin(), seconds.shape)
    return Choice(
        table.shape(int(nodes), int(depth)), float(table.expected[depth, nodes]), float(seconds[depth, nodes])
    )
