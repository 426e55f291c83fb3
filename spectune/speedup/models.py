"""Three models of the speedup, each held against the measured one.

    card   S = (1 + β·K) / (1 + K·T_d/T_t)                                 β measured at that same K
    iid    S = (1 − α^{K+1}) / ((1 − α)·(1 + K·T_d/T_t))                   one α for all K
    full   S = AL(K)·T_t / (K·T_d + t_verify + t_overhead)                 AL from the acceptance curve

The first two are exact only if verifying a draft costs one plain step and nothing else takes time; what they miss,
in plain steps a round, is shown as the overhead that would make them right. The full model takes those times from the
cell and only the acceptance from the fit. T_t is the forward alone: what plain decoding spends around it is in the
measured speedup and in no model. K is the number of tokens really drafted per round; a drafter without forwards
(n-gram) has one step per round whatever its K.

Recommendations follow measured speeds. The models explain them, and their residuals say how far to trust a
prediction for a K that was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from spectune.speedup.constant import ConstantRate, Geometric, fit_constant_rate, fit_geometric
from spectune.speedup.curve import AcceptanceCurve, CurvePoint, fit_curve
from spectune.speedup.profile import Profile
from spectune.speedup.timing import Timing, ratio
from spectune.speedup.waterfall import Waterfall, waterfall
from spectune.sweeping.drafter_names import drafts_at_once, drafts_trees

POOR = 0.10  # root mean square of the relative error

Model = Literal["card", "iid", "full"]
_MODELS: tuple[Model, ...] = ("card", "iid", "full")


@dataclass(frozen=True, slots=True)
class Curve:
    """The acceptance curve of one drafter and rule on one suite at one batch; None with a reason.

    `constant` and `geometric` are the one-parameter models of the same counts, None where nothing was drafted in
    chains. `extra_steps` is the median over the cells of what the card does not know.
    """

    suite: str
    batch: int
    drafter: str
    rule: str
    ks: tuple[int, ...]
    curve: AcceptanceCurve | None
    reason: str | None
    constant: ConstantRate | None = None
    geometric: Geometric | None = None
    extra_steps: float | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the models say about a cell. A value is None with the reason beside it.

    `counted_rate` is β as counted and `fitted_rate` what the curve makes of it, both at `drafted_per_round` tokens: β
    means nothing without its K. `iid` is None wherever the card is, and where no α could be fitted.

    `held_out` is the full model with the acceptance curve fitted without this cell; its times are the cell's.
    `extra_steps` is the cost of a round, in plain steps, that the card does not know: acceptance length
    / measured speedup − 1 − K·T_d/T_t.
    """

    key: str
    measured: float | None
    card: float | None
    card_reason: str | None
    iid: float | None
    full: float | None
    full_reason: str | None
    held_out: float | None
    extra_steps: float | None
    overhead_steps: float | None  # t_overhead / T_t, as measured
    drafted_per_round: float | None
    counted_rate: float | None
    fitted_rate: float | None
    waterfall: Waterfall


@dataclass(frozen=True, slots=True)
class Quality:
    """Errors of a model over the cells it could predict. None where there is none."""

    cells: int
    rmse: float | None  # predicted − measured speedup
    median_error: float | None  # |predicted / measured − 1|
    p90_error: float | None
    poor: bool | None  # the relative root mean square error exceeds POOR


@dataclass(frozen=True, slots=True)
class Fit:
    curves: tuple[Curve, ...]
    predictions: tuple[Prediction, ...]  # one per profile, in its order
    card: Quality
    iid: Quality
    full: Quality
    held_out: Quality
    better: Model | None  # by root mean square error on the cells that all of them predict


def fit(profiles: Sequence[Profile]) -> Fit:
    """Fit the acceptance curves and predict every cell with all models."""
    groups: dict[tuple[str, int, str, str], list[Profile]] = {}
    for p in profiles:
        groups.setdefault((p.spec.suite, p.spec.batch, p.spec.drafter, p.spec.rule), []).append(p)
    curves = {name: _curve(name, members) for name, members in groups.items()}
    single = {(p.spec.suite, p.config): p for p in profiles if p.spec.batch == 1}
    predictions = []
    for p in profiles:
        name = (p.spec.suite, p.spec.batch, p.spec.drafter, p.spec.rule)
        others = _fit([q for q in groups[name] if q is not p])
        predictions.append(_predict(p, curves[name], others, single.get((p.spec.suite, p.config))))
    found = tuple(predictions)
    extra = {p.key: p.extra_steps for p in found}
    for group, members in groups.items():
        known = [e for p in members if (e := extra[p.cell.key]) is not None]
        curves[group] = replace(curves[group], extra_steps=float(np.median(known)) if known else None)
    return Fit(
        tuple(curves.values()),
        found,
        card=_quality([(p.card, p.measured) for p in found]),
        iid=_quality([(p.iid, p.measured) for p in found]),
        full=_quality([(p.full, p.measured) for p in found]),
        held_out=_quality([(p.held_out, p.measured) for p in found]),
        better=_better(found),
    )


def _better(found: Sequence[Prediction]) -> Model | None:
    shared = [p for p in found if p.card is not None and p.full is not None]
    # Trees have no α; a model that is silent on some of the cells cannot be compared on them.
    models = [m for m in _MODELS if all(getattr(p, m) is not None for p in shared)]
    rmse = {m: _quality([(getattr(p, m), p.measured) for p in shared]).rmse for m in models}
    # In a tie the model that assumes less wins.
    known = [(r, -i, m) for i, (m, r) in enumerate(rmse.items()) if r is not None]
    return min(known)[2] if known else None


def card_speedup(beta: float, k: float, cost_ratio: float, *, steps: float | None = None) -> float:
    """(1 + β·K) / (1 + K·T_d/T_t), with `beta` the acceptance rate at this K and `cost_ratio` T_d/T_t.

    `steps` replaces the K of the denominator for a drafter with another number of steps per round.
    """
    return (1 + beta * k) / (1 + (k if steps is None else steps) * cost_ratio)


def full_speedup(length: float, timing: Timing) -> float | None:
    """AL·T_t / (K·T_d + t_verify + t_overhead), None where a time is unknown or zero."""
    return ratio(
        None if timing.target_step_seconds is None else length * timing.target_step_seconds,
        timing.round_seconds,
    )


def _curve(name: tuple[str, int, str, str], members: Sequence[Profile]) -> Curve:
    ks = tuple(sorted(p.spec.k for p in members))
    curve = _fit(members)
    if drafts_trees(name[2]):
        return Curve(*name, ks, None, "not identifiable: a tree of more nodes grows in width too, not in depth alone")
    reason = None
    if curve is None:
        drafted = any(p.acceptance.drafted for p in members)
        reason = (
            "not identifiable: fewer than two numbers of drafted tokens per round"
            if drafted
            else "not identifiable: nothing was drafted"
        )
    points = _points(members)
    return Curve(*name, ks, curve, reason, fit_constant_rate(points, curve), fit_geometric(points))


def _fit(members: Sequence[Profile]) -> AcceptanceCurve | None:
    return None if any(drafts_trees(p.spec.drafter) for p in members) else fit_curve(_points(members))


def _points(members: Sequence[Profile]) -> list[CurvePoint]:
    return [
        CurvePoint(_offered(p), p.acceptance.acceptance_length, p.acceptance.rounds)
        for p in members
        if p.acceptance.acceptance_length is not None and p.excluded is None
    ]


def _offered(p: Profile) -> tuple[float, ...]:
    return tuple(share or 0.0 for share in p.acceptance.offered)


def _predict(p: Profile, curve: Curve, others: AcceptanceCurve | None, single: Profile | None) -> Prediction:
    counted, timed = p.acceptance, p.timing
    card, card_reason = _card(p)
    iid = None
    if curve.geometric is not None and card is not None and counted.acceptance_length is not None:
        # Both models put the same cost of a round below the line.
        iid = card * curve.geometric.length(_offered(p)) / counted.acceptance_length
    fitted = None
    if curve.curve is not None and counted.drafted_per_round:
        fitted = (curve.curve.length(_offered(p)) - 1) / counted.drafted_per_round
    full, full_reason = None, curve.reason
    if curve.curve is not None:
        full = full_speedup(curve.curve.length(_offered(p)), timed)
        full_reason = "a time of the round is unknown or zero" if full is None else None
    elif drafts_trees(p.spec.drafter) and counted.acceptance_length is not None:
        # Without a curve over K the counted length itself shows whether the times add up.
        full = full_speedup(counted.acceptance_length, timed)
        full_reason = "a time of the round is unknown or zero" if full is None else None
    held_out = full_speedup(others.length(_offered(p)), timed) if others is not None else None
    measured = p.speedup.value
    extra = None
    if card is not None and measured and counted.acceptance_length is not None:
        # acceptance length / card is the card's idea of a round's cost
        extra = counted.acceptance_length / measured - counted.acceptance_length / card
    return Prediction(
        key=p.cell.key,
        measured=measured,
        card=card,
        card_reason=card_reason,
        iid=iid,
        full=full,
        full_reason=full_reason,
        held_out=held_out,
        extra_steps=extra,
        overhead_steps=ratio(timed.overhead_seconds, timed.target_step_seconds),
        drafted_per_round=counted.drafted_per_round,
        counted_rate=counted.acceptance_rate,
        fitted_rate=fitted,
        waterfall=waterfall(p, single),
    )


def _card(p: Profile) -> tuple[float | None, str | None]:
    counted, timed = p.acceptance, p.timing
    if counted.acceptance_rate is None or counted.drafted_per_round is None:
        return None, "nothing was drafted"
    if timed.cost_ratio is None:
        return None, "the time of a draft or target step is unknown or zero"
    steps = None  # one per token
    if drafts_at_once(p.spec.drafter) or drafts_trees(p.spec.drafter):
        steps = timed.draft_steps or 1.0
    return card_speedup(counted.acceptance_rate, counted.drafted_per_round, timed.cost_ratio, steps=steps), None


def _quality(pairs: Sequence[tuple[float | None, float | None]]) -> Quality:
    known = [(a, b) for a, b in pairs if a is not None and b]
    if not known:
        return Quality(0, None, None, None, None)
    predicted, measured = np.array(known, dtype=float).T
    relative = np.abs(predicted / measured - 1)
    return Quality(
        cells=len(known),
        rmse=math.sqrt(float(np.mean((predicted - measured) ** 2))),
        median_error=float(np.median(relative)),
        p90_error=float(np.percentile(relative, 90)),
        poor=math.sqrt(float(np.mean(relative**2))) > POOR,
    )
