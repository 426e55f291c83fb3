"""What drafted tokens are worth, measured on text the target wrote itself.

The target's states are known along the text only. A draft's place is therefore judged where the text so far is what
greedy decoding would have written: there the target's choice behind the drafted tokens is known too.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PlaceCounts:
    """Sums over many batches, per place of the draft.

    Args:
        places: n places of a draft.
    """

    def __init__(self, places: int) -> None:
        self.reached = torch.zeros(places, dtype=torch.float64)  # places where all earlier drafted tokens were right
        self.right = torch.zeros(places, dtype=torch.float64)
        self.judged = torch.zeros(places, dtype=torch.float64)  # places on a greedy text, whatever was drafted before
        self.ranks: Tensor | None = None  # [n, R] how often the r-th guess was right, of `judged`
        self.valid = torch.zeros(places, dtype=torch.float64)
        self.overlap = torch.zeros(places, dtype=torch.float64)  # sum of Σ_v min(p(v), q(v)) over `valid`

    def add(self, guesses: Tensor, truth: Tensor, greedy: Tensor, valid: Tensor, overlap: Tensor) -> None:
        """Count M drafts.

        Args:
            guesses: [M, n, R] the drafter's most likely tokens at each place, best first.
            truth: [M, n] the target's choice there.
            greedy: [M, n] whether the text up to the place is greedy.
            valid: [M, n] whether the place is inside the text.
            overlap: [M, n] Σ_v min(p(v), q(v)).
        """
        hits = guesses == truth[..., None]
        judged = greedy & valid
        before = torch.ones_like(judged)
        before[:, 1:] = hits[:, :-1, 0].long().cumprod(1).bool()
        reached = judged & before
        self.reached += reached.sum(0).cpu()
        self.right += (reached & hits[..., 0]).sum(0).cpu()
        self.judged += judged.sum(0).cpu()
        ranks = (hits & judged[..., None]).sum(0).cpu().double()
        self.ranks = ranks if self.ranks is None else self.ranks + ranks
        self.valid += valid.sum(0).cpu()
        self.overlap += (overlap * valid).sum(0).double().cpu()

    def acceptance(self) -> list[float]:
        """Per place: how often greedy decoding keeps the drafted token, given that it kept all before."""
        return (self.right / self.reached.clamp(min=1)).tolist()

    def mean_overlap(self) -> list[float]:
        """Per place: the chance that speculative sampling at temperature 1 keeps the token, 1 - TV(p, q)."""
        return (self.overlap / self.valid.clamp(min=1)).tolist()

    def rank_accuracy(self) -> tuple[tuple[float, ...], ...]:
        """[n][R] how often the r-th guess at a place is the target's choice, right or wrong before."""
        assert self.ranks is not None, "nothing was counted"
        rows = (self.ranks / self.judged.clamp(min=1)[:, None]).tolist()
        return tuple(tuple(round(x, 5) for x in row) for row in rows)


def overlap(p: Tensor, q: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Σ_v min(p(v), q(v)). p [..., V] of the target, q [..., D] of a draft over `draft_ids` -> [...]."""
    inside = p if draft_ids is None else p[..., draft_ids]
    return torch.minimum(inside[..., : q.shape[-1]], q).sum(-1)
