"""Trees of drafted tokens.

Node 0 is the root: the newest token, known but in no cache yet. Node j + 1 is the drafted token `tokens[:, j]`. Nodes
stand parent before child and sorted by depth, so that a prefix of the nodes is a tree again: `counts` cuts a row's
tree short, and a chain is the tree in which every node's parent is the node before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

# How the children of one node were produced, which decides the acceptance rule: chosen and distinct (top-k),
# drawn independently, or drawn one after the other without replacement.
Siblings = Literal["distinct", "iid", "without_replacement"]


@dataclass(frozen=True)
class TokenTree:
    """The shapes of a batch of trees.

    Args:
        parents: [B, K] int64, the parent node of `tokens[:, j]`: 0 the root, i the token `tokens[:, i - 1]`. Padding
            behind a row's count has parent 0.
        levels: no node is deeper than this. Whoever states it vouches for the order of the nodes too, and nothing is
            read back from the device; without it the order is checked and the depth measured.
        bounds: no node of level i has more than bounds[i] children; without it they are counted where needed.

    Raises:
        ValueError: a node stands before its parent.
    """

    parents: Tensor
    levels: int | None = None
    bounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.parents.ndim != 2:
            raise ValueError(f"parents must be [B, K], got {list(self.parents.shape)}")
        if self.levels is None:
            place = torch.arange(self.parents.shape[1], device=self.parents.device)
            wrong = ((self.parents < 0) | (self.parents > place)).any(0)
            if bool(wrong.any()):
                node = int(wrong.nonzero()[0]) + 1
                raise ValueError(f"node {node} does not stand behind its parent (parents: {self.parents.tolist()})")

    @classmethod
    def chain(cls, rows: int, k: int, device: torch.device) -> TokenTree:
        """K nodes in a line, for every row."""
        return cls(torch.arange(k, device=device).expand(rows, k), levels=k)

    @classmethod
    def of(cls, parents: Sequence[int], rows: int, device: torch.device) -> TokenTree:
        """One shape for all rows."""
        shape = cls(torch.tensor([list(parents)], dtype=torch.long))  # checked and measured on the host
        return cls(shape.parents.to(device).expand(rows, -1), levels=shape.height)

    @property
    def rows(self) -> int:
        return self.parents.shape[0]

    @property
    def width(self) -> int:
        """K, the drafted nodes of a row, padding included."""
        return self.parents.shape[1]

    @cached_property
    def nodes(self) -> Tensor:
        """[K + 1] node numbers."""
        return torch.arange(self.width + 1, device=self.parents.device)

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, K + 1, K + 1] bool, [b, i, j]: node j is node i or an ancestor of it."""
        # Pointer doubling: after n steps `up` leads 2^n nodes up (staying at the root) and `seen` covers the way.
        up = torch.nn.functional.pad(self.parents, (1, 0))
        seen = (self.nodes[:, None] == self.nodes).expand(self.rows, -1, -1)
        for _ in range(self.width.bit_length()):
            seen = seen | seen.gather(1, up[:, :, None].expand_as(seen))
            up = up.gather(1, up)
        return seen

    @cached_property
    def depths(self) -> Tensor:
        """[B, K + 1] steps from the root, whose depth is 0."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def height(self) -> int:
        """D: no node of the batch is deeper. The batch's exact depth unless `levels` was stated."""
        return int(self.depths.max()) if self.levels is None else self.levels

    @cached_property
    def elders(self) -> Tensor:
        """[B, K, K] bool, [b, i, j]: tokens i and j have one parent and j stands before i."""
        place = self.nodes[1:]
        return (self.parents[:, :, None] == self.parents[:, None, :]) & (place < place[:, None])

    @cached_property
    def ranks(self) -> Tensor:
        """[B, K] place of each drafted token among its siblings, from 0."""
        return self.elders.sum(-1)

    def real(self, counts: Tensor) -> Tensor:
        """[B] counts -> [B, K] bool: which drafted tokens are not padding."""
        return self.nodes[:-1] < counts[:, None]

    def within(self, limits: Tensor) -> Tensor:
        """[B] deepest level allowed -> [B] how many nodes keep to it: a prefix, since nodes are sorted by depth."""
        return (self.depths[:, 1:] <= limits[:, None]).sum(1)

    def breadths(self, counts: Tensor) -> list[int]:
        """How many children the widest node of each level has, from the root's level down. [B] -> height + 1 numbers.

        Padding does not count. Reads back from the device once, unless `bounds` were stated.
        """
        if self.bounds is not None:
            return list(self.bounds)
        widest = torch.zeros(self.height + 1, dtype=torch.long, device=self.parents.device)
        level = self.depths[:, 1:] - 1  # of the parent
        children = torch.where(self.real(counts), self.ranks + 1, 0)
        return widest.scatter_reduce(0, level.flatten(), children.flatten(), "amax").tolist()

    def path_to(self, nodes: Tensor) -> Tensor:
        """The way from the root to one node of every row. [B] -> [B, D + 1] node numbers, padded with 0 behind it."""
        row = torch.arange(self.rows, device=nodes.device)
        on_path = self.ancestors[row, nodes]
        path = torch.zeros(self.rows, self.height + 1, dtype=torch.long, device=nodes.device)
        return path.scatter_reduce(1, self.depths, torch.where(on_path, self.nodes, 0), "amax")
