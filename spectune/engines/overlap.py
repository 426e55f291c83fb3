"""The overlap of draft and target distributions where drafted tokens come up for acceptance.

Speculative sampling keeps a drafted token with probability Σ_v min(p(v), q(v)) = 1 − TV(p, q) (Leviathan et al. 2023,
corollary 3.6), so the overlap and the counted rate must agree within chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectune.sweeping.cell import OverlapCount


class OverlapCounter:
    """Sums over rounds, by position of a draft of up to `k` tokens."""

    def __init__(self, k: int) -> None:
        self._sums = torch.zeros(4, k, dtype=torch.float64)  # reached, accepted, overlap, variance

    def add(self, p: Tensor, q: Tensor, counts: Tensor, accepted: Tensor) -> None:
        """One round: p [B, K + 1, V], q [B, K, V], drafted `counts` [B] and `accepted` [B]."""
        width = q.shape[1]
        overlap = torch.minimum(p[:, :width], q).sum(-1).double().clamp(max=1.0)  # [B, K]
        place = torch.arange(width, device=q.device)
        # A token comes up if all before it were kept.
        reached = (place < counts[:, None]) & (place <= accepted[:, None])
        kept = place < accepted[:, None]
        parts = (reached.double(), kept.double(), overlap * reached, overlap * (1 - overlap) * reached)
        self._sums[:, :width] += torch.stack([part.sum(0) for part in parts]).cpu()

    def counts(self) -> tuple[OverlapCount, ...]:
        """One record per position that was reached."""
        return tuple(
            OverlapCount(position=i, reached=round(n), accepted=round(kept), overlap=overlap, variance=variance)
            for i, (n, kept, overlap, variance) in enumerate(self._sums.T.tolist(), 1)
            if n
        )
