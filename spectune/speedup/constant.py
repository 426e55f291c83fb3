"""The one-parameter acceptance models, to be held against the curve.

constant rate   AL = 1 + β·K                                  the same β at every K
geometric       AL = (1 − α^{K+1}) / (1 − α)                  Leviathan et al. (2023), equation 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectune.speedup.curve import AcceptanceCurve, CurvePoint, lengths, table, usable

_CERTAINTY = 0.99
_NOISE = 0.02  # tokens; a curve that fits better than this must not make everything else look rejected
_ROUNDS, _GRID = 4, 101  # of refinement


@dataclass(frozen=True, slots=True)
class ConstantRate:
    """The best constant β over several K. `rejected` is None, with a reason, where too few K can tell."""

    rate: float
    rmse: float  # tokens
    rejected: bool | None
    reason: str


@dataclass(frozen=True, slots=True)
class Geometric:
    alpha: float
    rmse: float  # tokens

    def length(self, offered: Sequence[float]) -> float:
        """The acceptance length if position i is drafted in the share `offered[i-1]` of rounds."""
        return AcceptanceCurve(self.alpha, 1.0, self.rmse).length(offered)


def fit_constant_rate(points: Sequence[CurvePoint], curve: AcceptanceCurve | None) -> ConstantRate | None:
    """Least squares of AL = 1 + β·(drafted per round), weighted by rounds; None where nothing was drafted.

    It is rejected where its error exceeds what the scatter around `curve` explains: an F test of the two residual
    variances, 99 % one-sided.
    """
    points = usable(points)
    if not points:
        return None
    offered, measured, share = table(points)
    drafted = offered.sum(axis=1)
    rate = float((share * drafted) @ (measured - 1) / ((share * drafted) @ drafted))
    rmse = math.sqrt(float(share @ (1 + rate * drafted - measured) ** 2))
    n = len(points)
    if curve is None or n < 4:
        return ConstantRate(rate, rmse, None, "cannot be judged: it needs four numbers of drafted tokens")
    from scipy.special import fdtri

    scatter = max(curve.rmse, _NOISE)
    variance_ratio = (rmse**2 / (n - 1)) / (scatter**2 / (n - 2))
    limit = float(fdtri(n - 1, n - 2, _CERTAINTY))
    text = f"its residual variance is {variance_ratio:.1f} times the curve's; {limit:.1f} is the 99 % limit"
    return ConstantRate(rate, rmse, variance_ratio > limit, text)


def fit_geometric(points: Sequence[CurvePoint]) -> Geometric | None:
    """Least squares of the acceptance lengths over α, weighted by rounds; one K is enough. None: nothing drafted."""
    points = usable(points)
    if not points:
        return None
    offered, measured, share = table(points)
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        alphas = np.linspace(low, high, _GRID)
        errors = (lengths(np.stack([alphas, np.ones_like(alphas)], axis=1), offered, 1) - measured) ** 2 @ share
        best, step = int(np.argmin(errors)), (high - low) / (_GRID - 1)
        low, high = max(0.0, alphas[best] - step), min(1.0, alphas[best] + step)
    return Geometric(float(alphas[best]), math.sqrt(float(errors[best])))
