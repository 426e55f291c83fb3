"""Two models of the speedup, each held against the measured one.

    card   S = (1 + β·K) / (1 + K·T_d/T_t)                                 β measured at that same K
    full   S = AL(K)·T_t / (K·T_d + t_verify + t_overhead)                 AL from the acceptance curve

The card is exact only if verifying a draft costs one plain step and nothing else takes time. The full model
takes those times from the cell and only the acceptance from the fit. T_t is the forward alone: what plain
decoding spends around it is in the measured speedup and in neither model. K is the number of tokens really
drafted per round; a drafter without forwards (n-gram) has one step per round whatever its K.

Recommendations follow measured speeds. The models explain them, and their residuals say how far to trust a
prediction for a K that was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spectune.speedup.curve import AcceptanceCurve, CurvePoint, fit_curve
from spectune.speedup.profile import Profile
from spectune.speedup.timing import Timing, ratio
from spectune.sweeping.drafter_names import drafts_at_once, drafts_trees

POOR = 0.10  # root mean square of the relative error

Model = Literal["card", "full"]


@dataclass(frozen=True, slots=True)
class Curve:
    """The acceptance curve of one drafter and rule on one suite at one batch; None with a reason."""

    suite: str
    batch: int
    drafter: str
    rule: str
    ks: tuple[int, ...]
    curve: AcceptanceCurve | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What both models say about a cell. A value is None with the reason beside it.

    `held_out` is the full model with the acceptance curve fitted without this cell; its times are the cell's.
    `extra_steps` is the cost of a round, in plain steps, that the card does not know: acceptance length
    / measured speedup − 1 − K·T_d/T_t.
    """

    key: str
    measured: float | None
    card: float | None
    card_reason: str | None
    full: float | None
    full_reason: str | None
    held_out: float | None
    extra_steps: float | None
    overhead_steps: float | None  # t_overhead / T_t, as measured


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
    full: Quality
    held_out: Quality
    better: Model | None  # by root mean square error on the cells that both predict


def fit(profiles: Sequence[Profile]) -> Fit:
    """Fit the acceptance curves and predict every cell with both models."""
    groups: dict[tuple[str, int, str, str], list[Profile]] = {}
    for p in profiles:
        groups.setdefault((p.spec.suite, p.spec.batch, p.spec.drafter, p.spec.rule), []).append(p)
    curves = {name: _curve(name, members) for name, members in groups.items()}
    predictions = []
    for p in profiles:
        name = (p.spec.suite, p.spec.batch, p.spec.drafter, p.spec.rule)
        others = _fit([q for q in groups[name] if q is not p])
        predictions.append(_predict(p, curves[name], others))
    found = tuple(predictions)
    both = [p for p in found if p.card is not None and p.full is not None]
    rmse = {m: _quality([(getattr(p, m), p.measured) for p in both]).rmse for m in ("card", "full")}
    better: Model | None = None
    if rmse["card"] is not None and rmse["full"] is not None:
        better = "card" if rmse["card"] < rmse["full"] else "full"
    return Fit(
        tuple(curves.values()),
        found,
        card=_quality([(p.card, p.measured) for p in found]),
        full=_quality([(p.full, p.measured) for p in found]),
        held_out=_quality([(p.held_out, p.measured) for p in found]),
        better=better,
    )


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
    return Curve(*name, ks, curve, reason)


def _fit(members: Sequence[Profile]) -> AcceptanceCurve | None:
    if any(drafts_trees(p.spec.drafter) for p in members):
        return None
    points = [
        CurvePoint(_offered(p), p.acceptance.acceptance_length, p.acceptance.rounds)
        for p in members
        if p.acceptance.acceptance_length is not None and p.excluded is None
    ]
    return fit_curve(points)


def _offered(p: Profile) -> tuple[float, ...]:
    return tuple(share or 0.0 for share in p.acceptance.offered)


def _predict(p: Profile, curve: Curve, others: AcceptanceCurve | None) -> Prediction:
    counted, timed = p.acceptance, p.timing
    card, card_reason = _card(p)
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
        full=full,
        full_reason=full_reason,
        held_out=held_out,
        extra_steps=extra,
        overhead_steps=ratio(timed.overhead_seconds, timed.target_step_seconds),
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
