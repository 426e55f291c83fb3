"""Acceptance rules for trees of drafted tokens.

Notation as in `rules`: `p` is the target's distribution at a node, `q` the distribution a node's children were drawn
from. A rule walks from the root towards the leaves; at every node it goes on to one child or stops there and names
the closing token. How the children came about decides which rule is lossless:

- `walk`: any children, if the target's choices ignore them (greedy decoding, sample-then-match).
- `distinct`: children that are a function of the text, such as a top-k (Medusa, EAGLE-2).
- `iid`: children drawn independently from q (SpecInfer, Miao et al. 2023, arXiv 2305.09781, algorithm 2).
- `without_replacement`: children drawn one after the other from what is left of q, listed in the order in which they
  were drawn (Sequoia, Chen et al. 2024, arXiv 2402.12374, algorithm 2).
- `typical`: lossy (Medusa, Cai et al. 2024, arXiv 2401.10774, section 2.3.1).

Rows may hold fewer than K nodes (`counts`); what stands behind a row's count is padding and never looked at. On a
chain, where every node has one child, each rule decides exactly as its counterpart in `rules`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spectune.decoding.random import Coins, CounterCoins, Stream, uniform
from spectune.decoding.tree import TokenTree


class TreeVerdict(NamedTuple):
    accepted: Tensor  # [B] how many drafted tokens are kept
    nodes: Tensor  # [B, D + 1] the root and the kept nodes in order, padded with 0
    token: Tensor  # [B] the token that follows them


class TreeCoins(CounterCoins):
    """Coins of one round whose drafted nodes are tested in several steps: node j + 1 has the coin of place j."""

    _drawn: Tensor | None = None

    def below(self, thresholds: Tensor) -> Tensor:
        if self._drawn is None or self._drawn.shape != thresholds.shape:
            place = torch.arange(thresholds.shape[1], device=thresholds.device)
            self._drawn = uniform(self.seeds[:, None], Stream.ACCEPT, self.positions[:, None], place[None])
        return self._drawn < thresholds


def walk(tree: TokenTree, tokens: Tensor, counts: Tensor, choices: Tensor) -> TreeVerdict:
    """Go on to the child that equals the target's own choice; of equal siblings, to the first.

    With choices = argmax this is greedy decoding; with choices drawn from p it is sample-then-match, lossless for any
    drafter that does not see the target's coins.

    Args:
        tokens: [B, K] drafted tokens; counts: [B] how many of them are real.
        choices: [B, K + 1] the target's choice at each node.
    """
    node = _descend(tree, counts, tokens == choices.gather(1, tree.parents))
    return _verdict(tree, node, choices.gather(1, node[:, None]).squeeze(1))


def distinct(tree: TokenTree, tokens: Tensor, counts: Tensor, p: Tensor, coins: Coins) -> TreeVerdict:
    """Test the children in order, each with its share of the mass that its elder siblings left of p.

    A token that an elder sibling already offered has no mass left.

    Args:
        tokens: [B, K]; counts: [B].
        p: [B, K + 1, V] target distributions.
        coins: the round's random decisions; place j is node j + 1.
    """
    mass = _at(p, tree.parents, tokens)
    elders = tree.elders
    repeats = (elders & (tokens[:, :, None] == tokens[:, None, :])).any(-1)
    mass = mass.masked_fill(repeats, 0.0)
    # In float64, since the mass left over is a difference of nearly equal numbers.
    total = p.sum(-1).double().gather(1, tree.parents)
    left = total - (elders * mass[:, None, :].double()).sum(-1)
    share = torch.where(left > 0, mass / left, 0.0)
    # The first child's threshold is p itself, as in a chain, whatever p's sum is rounded to.
    passed = coins.below(torch.where(elders.any(-1), share, mass.double()))
    node = _descend(tree, counts, passed)

    p_next = _row(p, node)
    is_child = tree.real(counts) & (tree.parents == node[:, None])
    rows, vocab_size = p_next.shape
    tried = torch.zeros(rows, vocab_size + 1, dtype=torch.bool, device=p.device)  # the last column takes non-children
    tried.scatter_(1, torch.where(is_child, tokens, vocab_size), True)
    rest = p_next.masked_fill(tried[:, :-1], 0.0)
    return _verdict(tree, node, coins.draw(_or_else(rest, p_next)))


def iid(tree: TokenTree, tokens: Tensor, counts: Tensor, p: Tensor, q: Tensor, coins: Coins) -> TreeVerdict:
    """Multi-step speculative sampling for children drawn independently from q; equal siblings all count.

    Args:
        tokens: [B, K]; counts: [B].
        p: [B, K + 1, V] target distributions.
        q: [B, K or K + 1, V], row i the distribution from which the children of node i were drawn.
        coins: the round's random decisions; place j is node j + 1.
    """
    return _in_turn(tree, tokens, counts, p, q, coins, replaced=True)


def without_replacement(
    tree: TokenTree, tokens: Tensor, counts: Tensor, p: Tensor, q: Tensor, coins: Coins
) -> TreeVerdict:
    """As `iid` for children drawn without replacement: after each rejection p and q both change.

    Siblings must stand in the order in which they were drawn.
    """
    return _in_turn(tree, tokens, counts, p, q, coins, replaced=False)


def typical(
    tree: TokenTree,
    tokens: Tensor,
    counts: Tensor,
    p: Tensor,
    coins: Coins | None,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> TreeVerdict:
    """Keep the longest path of tokens that are not too unlikely: p > min(epsilon, delta * exp(-entropy)). Lossy.

    Of equally long paths the one whose tokens are likeliest together is kept. The closing token obeys the same
    threshold.

    Args:
        tokens: [B, K]; counts: [B].
        p: [B, K + 1, V] target distributions.
        coins: draw the closing token; None takes the likeliest.
    """
    # 1e-5 as in Medusa's code: it lowers the entropy of a long flat tail a little.
    entropy = -(p * (p + 1e-5).log()).sum(-1)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)  # [B, K + 1]
    p_token = _at(p, tree.parents, tokens)
    reached = _reached(tree, tree.real(counts) & (p_token > threshold.gather(1, tree.parents)))

    length = torch.where(reached, tree.depths, -1)
    longest = length == length.amax(1, keepdim=True)
    log_p = torch.nn.functional.pad(p_token.clamp(min=torch.finfo(p.dtype).tiny).log(), (1, 0))
    score = (tree.ancestors * log_p[:, None, :]).sum(-1).masked_fill(~longest, -torch.inf)
    # The first of the best, since argmax may return any of equals.
    best = score == score.amax(1, keepdim=True)
    node = torch.where(best, tree.nodes, tree.width).amin(1)

    p_next = _row(p, node)
    if coins is None:
        return _verdict(tree, node, p_next.argmax(-1))
    kept = p_next * (p_next > threshold.gather(1, node[:, None]))
    return _verdict(tree, node, coins.draw(_or_else(kept, p_next)))


def _in_turn(
    tree: TokenTree, tokens: Tensor, counts: Tensor, p: Tensor, q: Tensor, coins: Coins, *, replaced: bool
) -> TreeVerdict:
    """Level by level, test the children of each row's node one after the other.

    Only the distributions on the path are touched: [B, V] per test, where testing all nodes at once would update
    [B, K + 1, V].
    """
    row = torch.arange(tree.rows, device=p.device)
    real = tree.real(counts)
    node = torch.zeros_like(row)
    moving = torch.ones_like(row, dtype=torch.bool)
    left = _row(p, node)  # what the tests so far have left of p: the weights of the closing draw
    for breadth in tree.breadths(counts):
        left = torch.where(moving[:, None], _row(p, node), left)
        if breadth == 0:
            break
        source = _row(q, node.clamp(max=q.shape[1] - 1))  # a leaf has no children and may have no q
        child = torch.zeros_like(node)
        for rank in range(breadth):
            # [B, K]: the one node that is tested; none in a row that has moved on, stopped, or run out of children.
            tested = real & (tree.parents == node[:, None]) & (tree.ranks == rank) & (moving & (child == 0))[:, None]
            has = tested.any(1)
            if rank > 0:
                left = torch.where(has[:, None], _normalized(left), left)
                source = source if replaced else _normalized(source)
            token = (tokens * tested).sum(1)
            p_token, q_token = left[row, token], source[row, token]
            ratio = torch.where(q_token > 0, p_token / q_token, 0.0).clamp(max=1.0)
            passed = coins.below(torch.where(tested, ratio[:, None], 0.0)) & tested
            child = child + (passed * tree.nodes[1:]).sum(1)
            rejected = has & ~passed.any(1)
            rest = _or_else((left - source).clamp(min=0), left)
            left = torch.where(rejected[:, None], rest, left)
            if not replaced:
                source = source.index_put((row, token), torch.zeros_like(q_token))
        moving = moving & (child > 0)
        node = torch.where(moving, child, node)
    return _verdict(tree, node, coins.draw(left))


def _reached(tree: TokenTree, open_: Tensor) -> Tensor:
    """Which nodes are open together with all their ancestors. [B, K] -> [B, K + 1]; the root always is."""
    open_nodes = torch.nn.functional.pad(open_, (1, 0), value=True)
    return (open_nodes[:, None, :] | ~tree.ancestors).all(-1)


def _descend(tree: TokenTree, counts: Tensor, passed: Tensor) -> Tensor:
    """Where the walk ends that goes on to each node's first child that passed. [B], [B, K] bool -> [B] node."""
    passed = passed & tree.real(counts)
    first = passed & ~(tree.elders & passed[:, None, :]).any(-1)
    return (_reached(tree, first) * tree.nodes).amax(1)


def _verdict(tree: TokenTree, node: Tensor, token: Tensor) -> TreeVerdict:
    accepted = tree.depths.gather(1, node[:, None]).squeeze(1)
    return TreeVerdict(accepted, tree.path_to(node), token)


def _row(x: Tensor, node: Tensor) -> Tensor:
    """x[b, node[b]] for every row b. [B, n, V], [B] -> [B, V]."""
    return x[torch.arange(x.shape[0], device=x.device), node]


def _at(x: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
    """x[b, nodes[b, j], tokens[b, j]]. [B, n, V], [B, K], [B, K] -> [B, K]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], nodes, tokens]


def _normalized(x: Tensor) -> Tensor:
    """Rows that sum to 1, or to 0 where nothing was left. [B, V] -> [B, V]."""
    total = x.sum(-1, keepdim=True)
    return torch.where(total > 0, x / total, x)


def _or_else(weights: Tensor, fallback: Tensor) -> Tensor:
    """`weights` where they sum to something. A residual without mass means that p equals q to rounding."""
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, fallback)
