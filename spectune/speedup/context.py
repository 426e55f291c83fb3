"""The context where speculation stops paying, from the latency surfaces.

Longer caches make plain steps and verification dearer alike, and the draft's steps with them; what the acceptance does
over longer contexts is not in it. The surfaces' coefficients and the acceptance length are drawn from their
uncertainties, so the interval holds both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spectune.speedup.crossing import Crossing, crossing
from spectune.speedup.curve import Array
from spectune.speedup.positions import Measured
from spectune.speedup.surface import REACH, Surface
from spectune.speedup.surface_forms import times

DRAWS = 200
_PLACES = 25  # contexts looked at
_NORMAL = 1.96
VARIED = 1.5  # the largest measured context / the smallest, from which the cache's cost can be told


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What a round of one drafter costs at one K and batch. `step_seconds` stands in for a draft without a surface."""

    k: int
    batch: int
    length: Measured  # acceptance length
    target: Surface
    draft: Surface | None
    step_seconds: float
    drafting_seconds: float  # of a drafter that proposes all at once
    overhead_seconds: float
    plain_overhead_seconds: float


def context_crossing(cost: RoundCost) -> Crossing:
    """Between half the smallest and twice the largest context that the target was timed at."""
    low, high = cost.target.ranges[2]
    contexts = np.geomspace(max(1.0, low / REACH), high * REACH, _PLACES)
    random = np.random.default_rng(0)
    drawn = [_speedups(cost, contexts, random) for _ in range(DRAWS)]
    return crossing(contexts.tolist(), _speedups(cost, contexts, None).tolist(), np.stack(drawn))


def _speedups(cost: RoundCost, contexts: Array, random: np.random.Generator | None) -> Array:
    """At each context [contexts], from the fitted values or from one draw of them."""
    length = cost.length.value
    if random is not None and cost.length.low is not None and cost.length.high is not None:
        length = max(1.0, random.normal(length, (cost.length.high - cost.length.low) / (2 * _NORMAL)))
    parameters = _parameters(cost.target, random)
    plain = _seconds(cost.target, parameters, cost.batch, 1, contexts) + cost.plain_overhead_seconds
    verify = _seconds(cost.target, parameters, cost.batch, cost.k + 1, contexts)
    step = np.full_like(contexts, cost.step_seconds)
    if cost.draft is not None:
        step = _seconds(cost.draft, _parameters(cost.draft, random), cost.batch, 1, contexts)
    return np.asarray(length * plain / (cost.drafting_seconds + cost.k * step + verify + cost.overhead_seconds))


def _parameters(surface: Surface, random: np.random.Generator | None) -> Array:
    values = np.array(surface.parameters)
    if random is None:
        return values
    drawn = random.multivariate_normal(values, np.array(surface.covariance), method="eigh")
    return np.asarray(np.maximum(drawn, 0.0))


def _seconds(surface: Surface, parameters: Array, rows: int, query: int, contexts: Array) -> Array:
    places = np.stack([np.full_like(contexts, rows), np.full_like(contexts, query), contexts], axis=1)
    return np.maximum(times(surface.form, surface.expert_share, parameters, places)[0], 1e-9)
