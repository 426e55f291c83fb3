"""Medusa and blockwise drafting: all coming tokens from the state that the last verification left behind.

The target reads tokens up to position t and names token t + 1, the row's newest. From its state at t, head i names
token t + 2 + i: head 0 drafts the first token of the round. So a round costs one small product of the heads and no
forward of a draft network. The heads do not see what the others chose, so a tree's nodes of one depth all have the
same children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from spectune.decoding.draft_choice import chain, choose, penalize_draft
from spectune.decoding.drafter import Draft, Round, draft_recorded
from spectune.decoding.last_state import LastState
from spectune.decoding.product import Product
from spectune.decoding.tree import TokenTree
from spectune.decoding.tree_shapes import grow
from spectune.heads.blockwise import BlockwiseHeads
from spectune.heads.medusa import MedusaHeads, ResidualBlocks
from spectune.heads.parallel import RankAccuracy, linears

Fused = Callable[[Tensor], Tensor]  # [B, h] -> [B, n, D]


class ParallelDrafter(LastState):
    """Drafts a chain or a static tree with parallel heads.

    Args:
        heads: bound to the target, on its device and in its type.
        layers: of the target; the heads read the state behind the last.
        target_vocab: width of the target's distributions.
        tree: draft a tree grown from the heads' measured rank accuracies, with `Round.nodes` nodes.
        product: what multiplies with the matrices that several heads share.
    """

    def __init__(
        self,
        heads: MedusaHeads | BlockwiseHeads,
        *,
        layers: int,
        target_vocab: int,
        tree: bool,
        product: type[Product] = Product,
    ) -> None:
        super().__init__(layers, heads.head_weight(), heads.hidden_size)
        self.target_vocab = target_vocab
        self.draws_tree = tree
        self.heads = heads.heads
        self.draft_ids = heads.draft_ids
        self.rank_accuracy = heads.rank_accuracy or usual_accuracy(heads.heads, min(10, heads.draft_size))
        self.logits = fuse(heads, product)
        self._shapes: dict[tuple[int, int, int], _Shape] = {}

    def propose(self, round_: Round) -> Draft | None:
        limits = [min(limit, self.heads) for limit in round_.limits]
        if max(limits) == 0:
            return None
        depth = min(round_.places(limits), self.heads)
        state = self.state[: round_.count]
        device = state.device
        if self.draws_tree:
            round_.refuse_block()
        if self.graphs is None:
            return self._draft(state, depth, round_, round_.numbers(device, limits).limits)
        if self.draws_tree:
            self._shape(round_.nodes, depth, self.graphs.rows, round_.device)  # made now: recordings cannot
        out = draft_recorded(
            self.graphs,
            ("heads", id(self), depth, round_.nodes),
            round_,
            {"state": state} | round_.inputs(device, limits),
            lambda given, inside: self._draft(given["state"], depth, inside, inside.numbers(device).limits),
        )
        tree = self._shape(round_.nodes, depth, len(state), round_.device).tree if self.draws_tree else None
        return Draft(out["tokens"], out["counts"], out["q"], 1, tree)

    def _draft(self, state: Tensor, depth: int, round_: Round, limits: Tensor) -> Draft:
        """Draft down to `depth` from states [B, h]; limits [B]."""
        logits = self.logits(state)[:, :depth]
        limits = limits.clamp(max=depth).to(round_.device)
        if self.draws_tree:
            return self._tree(logits, limits, round_)
        tokens: list[Tensor] = []
        distributions: list[Tensor | None] = []
        for place in range(depth):
            token, q = choose(logits[:, place], tokens, round_, self.draft_ids)
            tokens.append(token)
            distributions.append(q)
        return chain(tokens, distributions, limits, round_, self.draft_ids, self.target_vocab, steps=1)

    def _tree(self, logits: Tensor, limits: Tensor, round_: Round) -> Draft:
        """The static tree: a node of depth d and rank r is head d - 1's r-th most likely token. logits [B, n, D]."""
        rows, depth, _ = logits.shape
        shape = self._shape(round_.nodes, depth, rows, round_.device)
        # All nodes share the row's past: which path leads to a node is not known to the heads.
        best = penalize_draft(logits, (), round_, self.draft_ids).topk(shape.ranks_needed).indices  # [B, n, R]
        tokens = best[:, shape.places, shape.ranks]
        if self.draft_ids is not None:
            tokens = self.draft_ids[tokens]
        return Draft(tokens.to(round_.device), shape.tree.within(limits), None, steps=1, tree=shape.tree)

    def _shape(self, nodes: int, depth: int, rows: int, device: torch.device) -> _Shape:
        key = nodes, depth, rows
        if key not in self._shapes:
            parents, ranks = grow(self.rank_accuracy[:depth], nodes)
            tree = TokenTree.of(parents, rows, device)
            places = (tree.depths[0, 1:] - 1).to(self.state.device)
            self._shapes[key] = _Shape(tree, places, torch.tensor(ranks, device=places.device), 1 + max(ranks))
        return self._shapes[key]


@dataclass(frozen=True, slots=True)
class _Shape:
    """A static tree, and which head's which guess stands at each node."""

    tree: TokenTree  # on the target's device, all else on the drafter's
    places: Tensor  # [K] head
    ranks: Tensor  # [K] guess of that head
    ranks_needed: int


def usual_accuracy(heads: int, ranks: int) -> RankAccuracy:
    """Stands in for rank accuracies that a checkpoint does not state (public ones never do).

    Falling like a power of the rank and geometrically from head to head, as Medusa's published accuracies do; only
    the shape of the tree depends on it.
    """
    return tuple(tuple(0.5 * 0.75**i / (1 + r) ** 1.7 for r in range(ranks)) for i in range(heads))


def fuse(heads: MedusaHeads | BlockwiseHeads, product: type[Product] = Product) -> Fused:
    """All heads in as few products as possible, with weights laid out for the processor."""
    with torch.no_grad():
        states = _fuse_medusa(heads, product) if isinstance(heads, MedusaHeads) else _fuse_blockwise(heads, product)
        weight = heads.head_weight().detach()
        if weight.dim() == 2:
            shared = product(weight)
            return lambda x: shared(states(x))
        own = [product(w) for w in weight]
        return lambda x: torch.stack([rows(y) for rows, y in zip(own, states(x).unbind(1), strict=True)], 1)


def _fuse_medusa(heads: MedusaHeads, product: type[Product]) -> Fused:
    """[B, h] -> [B, n, h]: the first block of all heads is one product, deeper ones are one batched product each."""
    n, h = heads.heads, heads.hidden_size
    blocks = [linears(block.layers) for block in heads.blocks if isinstance(block, ResidualBlocks)]
    layers = list(zip(*blocks, strict=True))
    first = product.of(*layers[0])
    deeper = []
    for modules in layers[1:]:
        bias = torch.stack([m.bias for m in modules])[:, None] if heads.config.bias else None
        deeper.append((torch.stack([m.weight.T for m in modules]), bias))  # [n, h, h], [n, 1, h]

    def states(x: Tensor) -> Tensor:
        y = x[:, None] + functional.silu(first(x).view(-1, n, h))
        for weight, bias in deeper:
            z = torch.bmm(y.transpose(0, 1), weight)
            y = y + functional.silu(z if bias is None else z + bias).transpose(0, 1)
        return y

    return states


def _fuse_blockwise(heads: BlockwiseHeads, product: type[Product]) -> Fused:
    """[B, h] -> [B, n, h]."""
    inner, outer = product.of(heads.inner), product.of(heads.outer)
    n, h = heads.heads, heads.hidden_size
    return lambda x: x[:, None] + outer(functional.silu(inner(x))).view(-1, n, h)
