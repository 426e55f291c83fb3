"""The acceptance curve: how the acceptance length grows with K.

    AL(K) = 1 + Σ_{i=1..K} Π_{j<=i} a_j        a_j = a·g^(j-1), at most 1

Two parameters: `a`, the chance that the first drafted token is kept, and `g`, how that chance changes from
one position to the next. g = 1 is the geometric case of Leviathan et al. (2023). A constant acceptance *rate*
(AL = 1 + βK) misses measured curves by about half a token; this one stays within a tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_G = 1.5
_GRID = 25  # points per parameter and zoom
_ZOOMS = 9  # each narrows both ranges to a quarter
_SAME = 0.05  # drafted tokens per round


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A measured acceptance length. `offered[i-1]` is the share of rounds that drafted i tokens or more."""

    offered: tuple[float, ...]
    acceptance_length: float
    rounds: int  # its weight in the fit

    @classmethod
    def at(cls, k: int, acceptance_length: float, rounds: int = 1) -> CurvePoint:
        """A point whose rounds all drafted `k` tokens."""
        return cls((1.0,) * k, acceptance_length, rounds)


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    a: float
    g: float
    rmse: float  # tokens, over the points of the fit

    def length(self, offered: Sequence[float]) -> float:
        """The acceptance length if position i is drafted in the share `offered[i-1]` of rounds."""
        return float(_lengths(np.array([self.a]), np.array([self.g]), np.array([offered]))[0, 0])

    def length_at(self, k: int) -> float:
        """The acceptance length if every round drafts `k` tokens."""
        return self.length((1.0,) * k)


def fit_curve(points: Sequence[CurvePoint]) -> AcceptanceCurve | None:
    """Least squares over the points, weighted by rounds. None where two parameters cannot be told from them.

    That is so with fewer than two different numbers of drafted tokens per round. The search is a grid that
    zooms in on its best point: bounded, without starting values, and the same every time.
    """
    points = [p for p in points if sum(p.offered) > 0 and p.rounds > 0]
    drafted = [sum(p.offered) for p in points]
    if not points or max(drafted) - min(drafted) < _SAME:
        return None
    width = max(len(p.offered) for p in points)
    offered = np.array([[*p.offered, *[0.0] * (width - len(p.offered))] for p in points])
    measured = np.array([p.acceptance_length for p in points])
    weights = np.array([p.rounds for p in points], dtype=float)
    low, high = np.array([0.0, 0.0]), np.array([1.0, LARGEST_G])
    bounds = low, high
    best = low
    for _ in range(_ZOOMS):
        grid = np.stack(np.meshgrid(*np.linspace(low, high, _GRID).T, indexing="ij"), axis=-1).reshape(-1, 2)
        errors = ((_lengths(grid[:, 0], grid[:, 1], offered) - measured) ** 2) @ weights
        best = grid[int(np.argmin(errors))]
        reach = (high - low) / 8
        low, high = np.maximum(best - reach, bounds[0]), np.minimum(best + reach, bounds[1])
    residuals = _lengths(best[:1], best[1:], offered)[0] - measured
    rmse = float(np.sqrt(np.average(residuals**2, weights=weights)))
    return AcceptanceCurve(float(best[0]), float(best[1]), rmse)


def _lengths(
    a: NDArray[np.float64], g: NDArray[np.float64], offered: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[parameters, points]: the acceptance length of each point under each (a, g)."""
    positions = np.arange(offered.shape[1])
    each = np.minimum(1.0, a[:, None] * g[:, None] ** positions)  # [parameters, K]
    return np.asarray(1 + np.cumprod(each, axis=1) @ offered.T)
