"""The acceptance curve: how the acceptance length grows with K.

    AL(K) = 1 + Σ_{i=1..K} Π_{j<=i} a_j        a_j = a·g^(j-1), at most 1

Two parameters: `a`, the chance that the first drafted token is kept, and `g`, how that chance changes from
one position to the next. g = 1 is the geometric case of Leviathan et al. (2023). A constant acceptance *rate*
(AL = 1 + βK) misses measured curves by about half a token; this one stays within a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_G = 1.5
_GRID = 25  # points per parameter
_STEPS = 60
_DELTA = 1e-6
_SAME = 0.05  # drafted tokens per round


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A measured acceptance length. `offered[i-1]` is the share of rounds that drafted i tokens or more."""

    offered: tuple[float, ...]
    acceptance_length: float
    rounds: int = 1  # its weight in the fit

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

    That is so with fewer than two different numbers of drafted tokens per round. A coarse grid gives the
    start, Levenberg and Marquardt's method the rest; equal points give equal curves.
    """
    points = [p for p in points if sum(p.offered) > 0 and p.rounds > 0]
    drafted = [sum(p.offered) for p in points]
    if not points or max(drafted) - min(drafted) < _SAME:
        return None
    width = max(len(p.offered) for p in points)
    offered = np.array([[*p.offered, *[0.0] * (width - len(p.offered))] for p in points])
    measured = np.array([p.acceptance_length for p in points])
    weights = np.array([p.rounds for p in points], dtype=float)
    scale = np.sqrt(weights / weights.sum())

    def residuals(parameters: NDArray[np.float64]) -> NDArray[np.float64]:
        """[parameters, points], so that the mean square error is the sum of squares."""
        lengths = _lengths(parameters[:, 0], parameters[:, 1], offered)
        return np.asarray((lengths - measured) * scale)

    axes = np.linspace(0, 1, _GRID), np.linspace(0, LARGEST_G, _GRID)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    start = grid[int(np.argmin((residuals(grid) ** 2).sum(axis=1)))]
    (a, g), rmse = _descend(residuals, start)
    return AcceptanceCurve(a, g, rmse)


def _descend(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]], start: NDArray[np.float64]
) -> tuple[tuple[float, float], float]:
    """Damped Gauss-Newton steps inside the bounds, with derivatives by finite differences."""
    best, at = start, residuals(start[None])[0]
    damping = 1e-3
    for _ in range(_STEPS):
        # Step away from the upper bounds, where lengths do not change any more.
        sides = np.where(best > 0.5, -_DELTA, _DELTA)
        jacobian = (residuals(best + np.diag(sides)) - at).T / sides
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-12 * np.eye(2)), jacobian.T @ at)
        tried = np.clip(best - step, 0.0, (1.0, LARGEST_G))
        there = residuals(tried[None])[0]
        if there @ there < at @ at:
            gain = at @ at - there @ there
            best, at, damping = tried, there, max(damping / 10, 1e-9)
            if gain < 1e-14:
                break
        elif damping > 1e9:
            break
        else:
            damping *= 10
    return (float(best[0]), float(best[1])), math.sqrt(float(at @ at))


def _lengths(a: NDArray[np.float64], g: NDArray[np.float64], offered: NDArray[np.float64]) -> NDArray[np.float64]:
    """[parameters, points]: the acceptance length of each point under each (a, g)."""
    positions = np.arange(offered.shape[1])
    each = np.minimum(1.0, a[:, None] * g[:, None] ** positions)  # [parameters, K]
    return np.asarray(1 + np.cumprod(each, axis=1) @ offered.T)
