"""The cross-check of sampled acceptance: the counted rate against 1 − TV(p, q) of the distributions themselves.

Given p and q, each kept token is a coin with chance 1 − TV, so the count has a known mean and variance. Where the two
part by more than chance explains, tokens are not accepted as the rule says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spectune.sweeping.cell import CellResult

DOUBTFUL = 4.0  # standard deviations; 1 in 16 000 by chance
_ENOUGH = 5.0  # variance from which a count is near enough to normal


@dataclass(frozen=True, slots=True)
class OverlapCheck:
    """Means over the `tokens` that came up for acceptance.

    `deviations` is the difference of count and expectation in standard deviations: the largest of all positions
    together and of each position with enough chance in it, since a fault at one position shifts the next the other way.
    It is None, and `agrees` with it, where too little was left to chance.
    """

    tokens: int
    counted: float
    overlap: float  # mean 1 − TV
    by_position: tuple[float, ...]  # mean 1 − TV at position 1, 2, …
    deviations: float | None
    agrees: bool | None


def overlap_check(cell: CellResult) -> OverlapCheck | None:
    """None where the cell has no overlaps: temperature 0, trees, other rules, or an engine that does not see them."""
    tokens = sum(c.reached for c in cell.overlap)
    if not tokens:
        return None
    kept, expected = sum(c.accepted for c in cell.overlap), math.fsum(c.overlap for c in cell.overlap)
    parts = [(c.accepted - c.overlap, c.variance) for c in cell.overlap]
    parts.append((kept - expected, math.fsum(c.variance for c in cell.overlap)))
    found = [difference / math.sqrt(variance) for difference, variance in parts if variance >= _ENOUGH]
    deviations = max(found, key=abs, default=None)
    return OverlapCheck(
        tokens=tokens,
        counted=kept / tokens,
        overlap=expected / tokens,
        by_position=tuple(c.overlap / c.reached for c in cell.overlap),
        deviations=deviations,
        agrees=None if deviations is None else abs(deviations) <= DOUBTFUL,
    )
