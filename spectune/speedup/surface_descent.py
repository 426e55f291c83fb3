"""Robust least squares of log times over coefficients that are at least 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spectune.speedup.surface_forms import Array

_START_SCALE, _LEAST_SCALE = 0.1, 1e-4  # relative residuals at which the loss turns from square to linear
_RIDGE = 1e-10  # directions that the points say nothing about get a huge variance, not none

Model = Callable[[Array], tuple[Array, Array]]  # parameters [n] -> times [points], slopes [points, n]


@dataclass(frozen=True, slots=True)
class Solution:
    """`cost` is half the robust sum of squares of the relative residuals; `scale` belongs to its loss."""

    parameters: Array  # [n]
    covariance: Array  # [n, n]
    scatter: float  # standard deviation of the relative residuals
    cost: float
    scale: float


class Descent:
    """Fits `model` to `seconds` [points]. `unit` [n] brings the parameters to the order of 1."""

    def __init__(self, model: Model, seconds: Array, unit: Array) -> None:
        self.model = model
        self.target = np.log(seconds)
        self.unit = unit

    def best_of(self, starts: Sequence[Array]) -> Solution:
        """From several starts, in shares of `unit`: a rounded corner has more than one valley."""
        rough = [self._solve(start, _START_SCALE)[0] for start in starts]
        return self.from_(min(rough, key=lambda x: float(np.abs(self._residuals(x)).sum())))

    def from_(self, start: Array) -> Solution:
        """From one start, in shares of `unit`."""
        scale = max(_LEAST_SCALE, 2 * 1.4826 * float(np.median(np.abs(self._residuals(start)))))
        shares, cost = self._solve(start, scale)
        # Huber (1981), section 7.6: the covariance of an M-estimate, with ψ of the soft L1 loss.
        left = self._residuals(shares)
        z = (left / scale) ** 2
        psi, flat = left / np.sqrt(1 + z), float(np.mean((1 + z) ** -1.5))
        scatter = math.sqrt(float(psi @ psi) / max(1, len(left) - len(shares))) / flat
        slopes = self._jacobian(shares)
        normal = slopes.T @ slopes
        inverse = np.linalg.inv(normal + _RIDGE * max(float(np.diag(normal).max()), 1e-300) * np.eye(len(shares)))
        covariance = inverse * scatter**2 * np.outer(self.unit, self.unit)
        return Solution(shares * self.unit, covariance, scatter, cost, scale)

    def can_drop(self, found: Solution, index: int, largest: float) -> bool:
        """Whether the points are described as well with parameter `index` at 0.

        A likelihood ratio: the cost may rise by what chance explains, `largest` being the quantile of Student's t.
        """
        upper = np.full(len(self.unit), np.inf)
        upper[index] = 1e-9
        start = found.parameters / self.unit
        lost, start[index] = start[index], 0.0
        costs = [
            self._solve(np.minimum(start + lost * np.eye(len(start))[i], upper), found.scale, upper)[1]
            for i in range(len(start))
            if i != index
        ]
        return 2 * (min(costs) - found.cost) < (largest * found.scatter) ** 2

    def _residuals(self, shares: Array) -> Array:
        return np.asarray(np.log(np.maximum(self.model(shares * self.unit)[0], 1e-300)) - self.target)

    def _jacobian(self, shares: Array) -> Array:
        times, slopes = self.model(shares * self.unit)
        return np.asarray(slopes * self.unit / np.maximum(times, 1e-300)[:, None])

    def _solve(self, start: Array, scale: float, upper: Array | float = np.inf) -> tuple[Array, float]:
        from scipy.optimize import least_squares

        inside = np.minimum(np.maximum(start, 1e-6), np.asarray(upper) / 2)
        found = least_squares(
            self._residuals,
            inside,
            self._jacobian,
            bounds=(0, upper),
            loss="soft_l1",
            f_scale=scale,
            max_nfev=200,
        )
        return np.asarray(found.x), float(found.cost)
