"""The acceptance curve: how the acceptance length grows with K.

    AL(K) = 1 + Σ_{i=1..K} Π_{j<=i} a_j        a_j = a·g^((j-1)^p), at most 1

Two parameters: `a`, the chance that the first drafted token is kept, and `g`, how that chance changes from
one position to the next. p = 1 is the usual decay, and with g = 1 the geometric case of Leviathan et al. (2023);
p = 2 stands for drafts that hold for a few positions and then fall off, and is taken only where it fits clearly
better. A constant acceptance *rate* (AL = 1 + βK) misses measured curves by about half a token; these stay
within a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

LARGEST_G = 1.5
_GRID = 25  # points per parameter
_STEPS, _FEW_STEPS = 60, 15  # of a descent from the grid, and from a point nearby
_DELTA = 1e-6
_SAME = 0.05  # drafted tokens per round
_POINTS_FOR_LATE = 4  # different numbers of drafted tokens that a choice of p needs
_CLEARLY = 0.95  # p = 2 must bring the error below this share of that of p = 1
_SMALL = 0.02  # tokens; a smaller error of p = 1 leaves nothing to improve

Array = NDArray[np.float64]


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
    p: int = 1

    def length(self, offered: Sequence[float]) -> float:
        """The acceptance length if position i is drafted in the share `offered[i-1]` of rounds."""
        return float(lengths(np.array([[self.a, self.g]]), np.array([offered]), self.p)[0, 0])

    def length_at(self, k: int) -> float:
        """The acceptance length if every round drafts `k` tokens."""
        return self.length((1.0,) * k)

    def rate_at(self, k: int) -> float:
        """β at `k`: the share of `k` drafted tokens that is kept."""
        return (self.length_at(k) - 1) / k


def fit_curve(points: Sequence[CurvePoint]) -> AcceptanceCurve | None:
    """Least squares of the acceptance lengths, weighted by rounds. None where two parameters cannot be told.

    That is so with fewer than two different numbers of drafted tokens per round. Equal points give equal curves.
    """
    points = usable(points)
    drafted = sorted(sum(p.offered) for p in points)
    if not points or drafted[-1] - drafted[0] < _SAME:
        return None
    usual = fit_decay(points, 1)
    different = 1 + sum(b - a >= _SAME for a, b in pairwise(drafted))
    if different < _POINTS_FOR_LATE or usual.rmse < _SMALL:
        return usual
    late = fit_decay(points, 2)
    return late if late.rmse < _CLEARLY * usual.rmse else usual


def refit(curve: AcceptanceCurve, offered: Array, measured: Array) -> Array:
    """The curve fitted to other measurements: offered [points, K], measured [draws, points] -> [draws, (a, g)]."""
    share = math.sqrt(1 / measured.shape[1])

    def residuals(parameters: Array) -> Array:
        return np.asarray((lengths(parameters, offered, curve.p) - measured) * share)

    return descend(residuals, np.tile([curve.a, curve.g], (len(measured), 1)), _FEW_STEPS)[0]


def usable(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Those that drafted anything."""
    return [p for p in points if sum(p.offered) > 0 and p.rounds > 0]


def table(points: Sequence[CurvePoint]) -> tuple[Array, Array, Array]:
    """offered [points, K], lengths [points] and the share of rounds [points] of each point."""
    width = max(len(p.offered) for p in points)
    offered = np.array([[*p.offered, *[0.0] * (width - len(p.offered))] for p in points])
    weights = np.array([p.rounds for p in points], dtype=float)
    return offered, np.array([p.acceptance_length for p in points]), weights / weights.sum()


def lengths(parameters: Array, offered: Array, p: int) -> Array:
    """[draws, points]: the acceptance length of each point under each (a, g) of [draws, 2]."""
    places = np.arange(offered.shape[1]) ** p
    each = np.minimum(1.0, parameters[:, :1] * parameters[:, 1:] ** places)  # [draws, K]
    return np.asarray(1 + np.cumprod(each, axis=1) @ offered.T)


def fit_decay(points: Sequence[CurvePoint], p: int) -> AcceptanceCurve:
    """The least squares of one p. A coarse grid gives the start, Levenberg and Marquardt's method the rest."""
    offered, measured, share = table(points)

    def residuals(parameters: Array) -> Array:
        # Scaled so that the sum of squares is the mean square error.
        return np.asarray((lengths(parameters, offered, p) - measured) * np.sqrt(share))

    axes = np.linspace(0, 1, _GRID), np.linspace(0, LARGEST_G, _GRID)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    start = grid[int(np.argmin((residuals(grid) ** 2).sum(axis=1)))]
    found, error = descend(residuals, start[None], _STEPS)
    return AcceptanceCurve(float(found[0, 0]), float(found[0, 1]), math.sqrt(float(error[0])), p)


def descend(residuals: Callable[[Array], Array], start: Array, steps: int) -> tuple[Array, Array]:
    """Damped Gauss-Newton steps inside the bounds, for many problems at once.

    `residuals` maps (a, g) [draws, 2] to [draws, points]; returns the best (a, g) and their sums of squares [draws].
    """
    best, at = start.astype(float), residuals(start)
    error = (at**2).sum(axis=1)
    damping = np.full(len(start), 1e-3)
    for _ in range(steps):
        # Step away from the upper bounds, where lengths do not change any more.
        sides = np.where(best > 0.5, -_DELTA, _DELTA)  # [draws, 2]
        moved = [residuals(best + sides * np.eye(2)[i]) for i in range(2)]
        jacobian = np.stack(
            [(m - at) / sides[:, i : i + 1] for i, m in enumerate(moved)], axis=-1
        )  # [draws, points, 2]
        normal = np.einsum("rpi,rpj->rij", jacobian, jacobian)
        slope = np.einsum("rpi,rp->ri", jacobian, at)
        diagonal = np.einsum("rii->ri", normal) + 1e-12
        step = np.linalg.solve(normal + np.eye(2) * (damping[:, None] * diagonal)[:, None], slope[..., None])[..., 0]
        tried = np.clip(best - step, 0.0, (1.0, LARGEST_G))
        there = residuals(tried)
        error_there = (there**2).sum(axis=1)
        better = error_there < error
        gain = np.where(better, error - error_there, 0.0)
        best, at = np.where(better[:, None], tried, best), np.where(better[:, None], there, at)
        error = np.where(better, error_there, error)
        settled = np.where(better, gain < 1e-14, damping > 1e9)
        damping = np.where(better, np.maximum(damping / 10, 1e-9), np.minimum(damping * 10, 1e10))
        if settled.all():
            break
    return best, error
