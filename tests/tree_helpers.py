"""What tests of drafted trees share."""

from __future__ import annotations

import math

import torch


def g_test(seen: torch.Tensor, law: torch.Tensor) -> float:
    """Standard deviations by which the G statistic exceeds its mean under the law; rare outcomes are pooled."""
    expected = law.flatten() * seen.sum()
    counts = seen.flatten().double()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    g = 2 * torch.where(counts > 0, counts * (counts / expected).log(), 0.0).sum()
    freedom = len(counts) - 1
    return float((g - freedom) / math.sqrt(2 * freedom))
