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
    lengths = np.full(1 + DRAWS, cost.length.value)  # as fitted in the first row, then drawn
    if cost.length.low is not None and cost.length.high is not None:
        spread = (cost.length.high - cost.length.low) / (2 * _NORMAL)
        lengths[1:] = np.maximum(1.0, random.normal(cost.length.value, spread, DRAWS))
    ones, queries = np.ones_like(contexts), (cost.k + 1) * np.ones_like(contexts)
    places = np.array([(cost.batch * ones, query, contexts) for query in (ones, queries)])  # [2, (B, q, ctx), contexts]
    plain, verify = np.split(_seconds(cost.target, random, np.concatenate(places, axis=1).T), 2, axis=1)
    step: Array | float = cost.step_seconds
    if cost.draft is not None:
        step = _seconds(cost.draft, random, places[0].T)
    whole = cost.drafting_seconds + cost.k * step + verify + cost.overhead_seconds
    speedups = lengths[:, None] * (plain + cost.plain_overhead_seconds) / whole  # [1 + DRAWS, contexts]
    return crossing(contexts.tolist(), speedups[0].tolist(), speedups[1:])


def _seconds(surface: Surface, random: np.random.Generator, places: Array) -> Array:
    """[1 + DRAWS, points]: the surface itself, then draws of it."""
    own = times(surface.form, surface.expert_share, np.array(surface.parameters), places)[0]
    return np.concatenate([np.maximum(own, 1e-9)[None], surface.draws(random, DRAWS, places)])
