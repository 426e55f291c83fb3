"""Synthetic acceptance: every forward and the accept rule run, then coins of the user's rates decide what is kept.

For measuring what a round costs when models have no weights worth agreeing on. The emitted tokens are the drafted ones
and one of the target's own; they do not have the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectune.decoding.drafter import Draft, Round
from spectune.decoding.random import Stream, pick, uniform
from spectune.decoding.sampling import is_greedy, probabilities
from spectune.decoding.tree import TokenTree
from spectune.decoding.tree_rules import TreeVerdict


class SyntheticAcceptance:
    """Overrides the verdict of a rule.

    Args:
        rates: chance that token i + 1 of a path is kept, given that all before it were; at least K of them.
    """

    def __init__(self, rates: Sequence[float], device: torch.device) -> None:
        self.rates = torch.tensor(list(rates), dtype=torch.float64, device=device)

    def __call__(self, logits: Tensor, draft: Draft, round_: Round) -> TreeVerdict:
        """Keep what the coins say of a chain, or of a tree's first longest path, and let the target close the round.

        Coins depend on the request's seed and the position alone, so a row's counts are those of its batch-1 run.

        Args:
            logits: [B, K + 1, V] of the target, at the root and every node.
        """
        tokens, counts = draft.tokens, draft.counts
        rows, width = tokens.shape
        tree = draft.tree or TokenTree.chain(rows, width, tokens.device)
        depths = torch.where(tree.real(counts), tree.depths[:, 1:], 0)  # [B, K]
        offered = depths.amax(1)
        # argmax may return any of equals; nodes are sorted by depth, so the first of the deepest is the smallest.
        deepest = torch.where(depths == offered[:, None], tree.nodes[1:], width).amin(1)
        path = tree.path_to(torch.where(offered > 0, deepest, 0))  # [B, D + 1]
        places = torch.arange(path.shape[1] - 1, device=path.device)  # [D]
        u = uniform(
            round_.seeds(path.device)[:, None], Stream.SYNTHETIC, round_.positions(path.device)[:, None], places[None]
        )
        kept = (u < self.rates[: len(places)]) & (places < offered[:, None])
        accepted = kept.long().cumprod(1).sum(1)
        path = path.masked_fill(torch.arange(path.shape[1], device=path.device) > accepted[:, None], 0)
        node = path.gather(1, accepted[:, None]).squeeze(1)
        return TreeVerdict(accepted, path, self._close(logits, node, accepted, round_))

    @staticmethod
    def _close(logits: Tensor, node: Tensor, accepted: Tensor, round_: Round) -> Tensor:
        """[B] the target's choice behind the kept tokens; no repetition penalty, since the text means nothing."""
        last = logits[torch.arange(len(node), device=node.device), node]
        if is_greedy(round_.sampling):
            return last.argmax(-1)
        seeds, positions = round_.seeds(node.device), round_.positions(node.device) + accepted
        return pick(probabilities(last, round_.sampling), uniform(seeds, Stream.TARGET, positions, accepted * 0))
