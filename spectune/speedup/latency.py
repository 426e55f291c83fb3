"""The latency surfaces of a run, and the K that they and the acceptance curves predict.

Every pass of a run timed the target at some (B, q, ctx): plain passes at q = 1, speculative ones at q = nodes + 1.
Draft models were timed at q = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from spectune.speedup.context import RoundCost
from spectune.speedup.models import Curve
from spectune.speedup.positions import Measured, acceptance_length
from spectune.speedup.prediction import Optimum, RoundModel
from spectune.speedup.profile import Profile
from spectune.speedup.surface import REACH, Point, Surface, SurfaceFit, fit_surface
from spectune.sweeping.cell import PassResult
from spectune.sweeping.drafter_names import drafts_at_once, drafts_trees

_LARGEST_K = 16


@dataclass(frozen=True, slots=True)
class Surfaces:
    """One fit for the target and one per drafter that runs forwards, by name."""

    target: SurfaceFit
    drafts: dict[str, SurfaceFit]


@dataclass(frozen=True, slots=True)
class PlannedK:
    """The optimum of model (2) for one curve, K from 1 to twice the largest measured; None with a reason."""

    suite: str
    batch: int
    drafter: str
    rule: str
    optimum: Optimum | None
    reason: str | None


def run_surfaces(profiles: Sequence[Profile]) -> Surfaces:
    """Fit the surfaces to all passes of the run's usable cells."""
    usable = [p for p in profiles if p.excluded is None]
    drafters = dict.fromkeys(p.spec.drafter for p in usable if _runs_forwards(p))
    target = [point for p in usable for done in p.cell.passes if (point := _target_point(p, done))]
    drafts = {
        name: [pt for p in usable if p.spec.drafter == name for d in p.cell.passes if (pt := _draft_point(p, d))]
        for name in drafters
    }
    return Surfaces(fit_surface(target), {name: fit_surface(points) for name, points in drafts.items()})


def planned_k(curve: Curve, surfaces: Surfaces, profiles: Sequence[Profile]) -> PlannedK:
    """The K that the curve and the surfaces predict to be best where the curve was measured."""
    place = (curve.suite, curve.batch, curve.drafter, curve.rule)
    members = [p for p in profiles if (p.spec.suite, p.spec.batch, p.spec.drafter, p.spec.rule) == place]
    model, reason = _round_model(curve, surfaces, members)
    if model is None:
        return PlannedK(*place, None, reason)
    context = fmean(p.timing.mean_context or 0.0 for p in members)
    # The last round of an output is shorter than K, so the forwards that were timed are a little narrower than K + 1.
    largest = min(_LARGEST_K, int(REACH * model.target.ranges[1][1]) - 1)
    return PlannedK(*place, model.optimum(range(1, largest + 1), curve.batch, context), None)


def round_cost(members: Sequence[Profile], surfaces: Surfaces) -> tuple[RoundCost | None, str | None]:
    """The cost of a round of one configuration at one batch on one or more suites, or why it is unknown."""
    first = members[0].spec
    parts, reason = _parts(members, surfaces)
    if parts is None:
        return None, reason
    lengths = [found for p in members if (found := acceptance_length(p.cell)) is not None]
    if not lengths:
        return None, "the acceptance is unknown"
    return RoundCost(first.k, first.batch, _typical(lengths), *parts), None


def _typical(lengths: Sequence[Measured]) -> Measured:
    """The mean over suites of value and ends: an interval that is rather too wide."""
    low = [m.low for m in lengths if m.low is not None]
    high = [m.high for m in lengths if m.high is not None]
    whole = len(low) == len(high) == len(lengths)
    return Measured(fmean(m.value for m in lengths), fmean(low) if whole else None, fmean(high) if whole else None)


def _round_model(curve: Curve, surfaces: Surfaces, members: Sequence[Profile]) -> tuple[RoundModel | None, str | None]:
    if curve.curve is None:
        return None, curve.reason
    parts, reason = _parts(members, surfaces)
    return (None, reason) if parts is None else (RoundModel(curve.curve, *parts), None)


# Target, draft, seconds of a draft step, of drafting all at once, of overhead, and of a plain step's overhead.
_Parts = tuple[Surface, Surface | None, float, float, float, float]


def _parts(members: Sequence[Profile], surfaces: Surfaces) -> tuple[_Parts | None, str | None]:
    """What a round of one configuration is made of, or why that is unknown."""
    target, draft = surfaces.target, surfaces.drafts.get(members[0].spec.drafter)
    if target.best is None:
        return None, f"the target's latency is {target.reason}"
    overhead = _median(members, lambda p: p.timing.overhead_seconds)
    drafting = _median(members, lambda p: p.timing.draft_seconds)
    if overhead is None or drafting is None:
        return None, "a time of the round is unknown"
    plain = _median(members, lambda p: p.timing.plain_overhead_seconds) or 0.0
    if draft is None:
        return (target.best, None, 0.0, drafting, overhead, plain), None
    step = _median(members, lambda p: p.timing.draft_step_seconds) or 0.0
    if draft.best is None and not step:
        return None, f"the draft's latency is {draft.reason}"
    return (target.best, draft.best, step, 0.0, overhead, plain), None


def _runs_forwards(p: Profile) -> bool:
    return not drafts_at_once(p.spec.drafter) and not drafts_trees(p.spec.drafter) and bool(p.timing.draft_steps)


def _target_point(p: Profile, done: PassResult) -> Point | None:
    times = done.times
    nodes = 0.0 if done.mode == "plain" else times.verified_nodes_mean
    if nodes is None:  # older files: as many as were drafted
        nodes = p.acceptance.drafted_per_round
    if nodes is None or times.verify_mean is None or times.mean_context is None:
        return None
    return Point(p.spec.batch, nodes + 1, times.mean_context, times.verify_mean)


def _draft_point(p: Profile, done: PassResult) -> Point | None:
    times = done.times
    if done.mode == "plain" or not times.draft_steps_mean or not times.draft_mean or times.mean_context is None:
        return None
    return Point(p.spec.batch, 1, times.mean_context, times.draft_mean / times.draft_steps_mean)


def _median(members: Sequence[Profile], value: Callable[[Profile], float | None]) -> float | None:
    known = [v for p in members if (v := value(p)) is not None]
    return median(known) if known else None
