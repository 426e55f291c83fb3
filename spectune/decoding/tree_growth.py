"""Dynamic trees (EAGLE-2, Li et al. 2024, arXiv 2406.16858): the drafter's own confidence decides the shape.

Level by level the drafter names the likeliest next tokens of its frontier; each is a candidate, scored by the draft
probability of its whole path. The best candidates of a level are the next frontier, and the best of all levels are
the tree. The shape is a function of the text alone, so the children are chosen and not drawn: siblings are
"distinct".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spectune.decoding.drafter import is_any
from spectune.decoding.tree import TokenTree


class Frontier(NamedTuple):
    """The nodes that the drafter runs on next, W per row.

    The entries of all frontiers so far, T in all, are what the drafter's cache holds behind the text; this frontier's
    own are the last W of them. A row that has reached its limit or has fewer candidates gets entries of no meaning.
    """

    tokens: Tensor  # [B, W]
    previous: Tensor  # [B, W] each node's parent, as its place in the frontier before; 0, the root, at first
    visible: Tensor  # [B, W, T] bool: which entries stand on a node's path, its own included
    depths: Tensor  # [B, T] how many drafted tokens stand above each entry, 0 on the first level


class Grown(NamedTuple):
    tokens: Tensor  # [B, K] int64
    counts: Tensor  # [B] how many of them are real
    tree: TokenTree


class DynamicTree:
    """Collects a round's candidates.

    Equal scores are settled by age everywhere: a path never scores higher than its beginning, so a node chosen
    among equals always has its parent chosen too, also where probabilities round to 1.

    Args:
        width: most nodes of a frontier.
        limits: [B] deepest level per row.
        stop_ids: [n] tokens that nothing can follow: offered, but never extended.
    """

    def __init__(self, width: int, limits: Tensor, stop_ids: Tensor) -> None:
        rows, device = limits.shape[0], limits.device
        self.width = width
        self.limits = limits
        self.stop_ids = stop_ids
        self.depth = 0
        # Candidates are numbered by age: 0 is the root, from 1 on the candidates level by level.
        self._tokens: list[Tensor] = []  # [B, n] of each level, as the two below
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._count = 0
        self._frontier = torch.zeros(rows, 1, dtype=torch.long, device=device)  # [B, W] numbers
        self._frontier_scores = torch.zeros(rows, 1, device=device)
        self._visible = torch.zeros(rows, 1, 0, dtype=torch.bool, device=device)
        self._depths = torch.zeros(rows, 0, dtype=torch.long, device=device)

    def extend(self, tokens: Tensor, log_p: Tensor) -> Frontier:
        """Add a level.

        Args:
            tokens: [B, W, k] distinct candidates behind each node of the frontier (W = 1, the root, at first), on the
                device of `limits`; siblings are verified in this order.
            log_p: [B, W, k] their log-probabilities under the draft.

        Returns:
            The next frontier, of min(width, W * k) nodes.
        """
        self.depth += 1
        k = tokens.shape[2]
        scores = self._frontier_scores[:, :, None] + log_p.float().clamp(max=0)  # log-softmax may round above 0
        scores = scores.masked_fill((self.limits < self.depth)[:, None, None], -torch.inf)
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores.flatten(1))
        self._parents.append(self._frontier.repeat_interleave(k, 1))

        open_ = self._scores[-1].masked_fill(is_any(self._tokens[-1], self.stop_ids), -torch.inf)
        best = open_.sort(dim=1, descending=True, stable=True)
        place = best.indices[:, : self.width]
        self._frontier = 1 + self._count + place
        self._frontier_scores = best.values[:, : self.width]
        self._count += tokens.shape[1] * k
        previous = place // k
        rows, width = place.shape
        own = torch.eye(width, dtype=torch.bool, device=place.device).expand(rows, -1, -1)
        above = self._visible.gather(1, previous[:, :, None].expand(-1, -1, self._visible.shape[2]))
        self._visible = torch.cat([above, own], 2)
        self._depths = torch.cat([self._depths, torch.full_like(place, self.depth - 1)], 1)
        return Frontier(self._tokens[-1].gather(1, place), previous, self._visible, self._depths)

    def select(self, nodes: int) -> Grown:
        """The tree of the best candidates, `nodes` per row at most, after at least one level."""
        tokens, scores, parents = (torch.cat(x, 1) for x in (self._tokens, self._scores, self._parents))
        best = scores.sort(dim=1, descending=True, stable=True)
        chosen = best.indices[:, :nodes]
        impossible = best.values[:, :nodes].isneginf()
        # By age, which is by depth; what is no candidate at all goes behind.
        place = (chosen + impossible * self._count).sort(1).values
        real = place < self._count
        chosen = place % self._count
        node = torch.arange(1, chosen.shape[1] + 1, device=chosen.device).expand_as(chosen)
        number = torch.zeros(len(chosen), self._count + 1, dtype=torch.long, device=chosen.device)
        number.scatter_(1, chosen + 1, node)  # of a candidate in the tree, by age
        parent = number.gather(1, parents.gather(1, chosen))
        tree = TokenTree(torch.where(real, parent, 0), levels=self.depth)
        return Grown(torch.where(real, tokens.gather(1, chosen), 0), real.sum(1), tree)
