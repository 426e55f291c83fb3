"""Choosing K from throughput alone: a table of tokens/s by K and batch, as other tools publish it.

    B / throughput = (fixed + draft·K + token·B·(K + 1) + experts·(1 − (1 − ρ)^{B·(K+1)})) / AL(K)

AL is the acceptance curve. Nothing but the quotient was measured, so a slower round and a shorter acceptance length can
stand for each other: the quotient, and with it the K to choose, is what the fit is good for, not its coefficients. The
last term is for mixtures of experts with a share ρ of them active per token: more tokens touch more of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from spectune.speedup.curve import Array, lengths

_SPARE = 2  # points beyond the parameters
_LOSS_SCALE = 0.02  # relative error at which the loss turns from square to linear: repeats scatter by about that
_STARTS = tuple(product((0.6, 0.8, 0.95), (0.7, 0.9, 1.0)))  # a, g
_LARGEST_G = 1.2


@dataclass(frozen=True, slots=True)
class Throughput:
    """A measured rate of the whole batch."""

    k: int
    batch: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class ThroughputModel:
    """`residuals[i]` is predicted / measured − 1 of point i."""

    parameters: tuple[float, ...]  # a, g, fixed, draft, token, experts; the times in seconds
    expert_share: float | None
    residuals: tuple[float, ...]

    def tokens_per_second(self, k: int, batch: int) -> float:
        place = np.array([[k, batch]], dtype=float)
        return float(batch / _seconds_per_token(np.array(self.parameters), self.expert_share, place)[0])

    def best_k(self, ks: Sequence[int], batch: int) -> int:
        """The K of the largest predicted rate."""
        return max(ks, key=lambda k: self.tokens_per_second(k, batch))


def fit_throughput(points: Sequence[Throughput], *, expert_share: float | None = None) -> ThroughputModel | None:
    """Robust least squares of the log rates; None where the points are too few to determine the model.

    Args:
        expert_share: active / total experts of a mixture of experts; None for a dense model.
    """
    from scipy.optimize import least_squares

    count = 5 + (expert_share is not None)
    if len(points) < count + _SPARE or len({p.k for p in points}) < 3 or len({p.batch for p in points}) < 2:
        return None
    places = np.array([[p.k, p.batch] for p in points], dtype=float)
    target = np.array([np.log(p.batch / p.tokens_per_second) for p in points])
    typical = float(np.median(np.exp(target)))
    unit = np.array([1.0, 1.0, typical, typical / 10, typical / float(np.median(places.prod(axis=1))), typical])[:count]

    def residuals(scaled: Array) -> Array:
        return np.asarray(np.log(_seconds_per_token(scaled * unit, expert_share, places)) - target)

    upper = np.array([1.0, _LARGEST_G, *[np.inf] * (count - 2)])
    fits = [
        least_squares(
            residuals,
            np.array([a, g, 0.5, 0.5, 0.3, 0.5][:count]),
            bounds=(np.zeros(count), upper),
            loss="soft_l1",
            f_scale=_LOSS_SCALE,
        )
        for a, g in _STARTS
    ]
    best = min(fits, key=lambda found: found.cost).x
    # The rate is the inverse of the time.
    return ThroughputModel(tuple((best * unit).tolist()), expert_share, tuple(np.expm1(-residuals(best)).tolist()))


def _seconds_per_token(parameters: Array, expert_share: float | None, places: Array) -> Array:
    """[points] seconds per token of one row, at places [points, (K, B)]."""
    k, batch = places.T
    nodes = batch * (k + 1)
    seconds = parameters[2] + parameters[3] * k + parameters[4] * nodes
    if expert_share is not None:
        seconds = seconds + parameters[5] * (1 - (1 - expert_share) ** nodes)
    offered = np.arange(int(k.max())) < k[:, None]  # [points, largest K]
    return np.asarray(seconds / lengths(parameters[None, :2], offered.astype(float), 1)[0])
