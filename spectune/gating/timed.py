"""Timed checks: a run against the baseline, judged with the scatter of both.

The unit is a repeat: one plain and one speculative pass, next to each other. Requests of a pass share the machine's
mood, so treating them as independent would see differences that are none. The logarithms of both sides' repeats are
compared by Welch's t-test, one-sided, at ALPHA over all checks of a metric (Holm 1979). REGRESSION needs a loss
that is both larger than the threshold and significant. `python -m spectune.gating.calibration` holds this against
measured noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

import numpy as np

from spectune.gating.baseline import Cell, PassTimes
from spectune.gating.check import Check, Verdict
from spectune.gating.exact import share
from spectune.gating.metric import METRICS, Metric, exceeds
from spectune.gating.policy import Limit, Policy

ALPHA = 0.01  # chance that a gate without any change finds a significant loss in a metric
POWER = 0.8  # a loss is called detectable if it is found in this share of gates
BLIND = 3.0  # a gate that cannot see a loss of this many thresholds cannot say PASS
COMPARED = tuple(m for m in METRICS.values() if m.kind == "timed")


@dataclass(frozen=True, slots=True)
class Effect:
    """The change of a metric in logarithms, oriented so that negative is worse. `error` is its standard error."""

    change: float
    error: float
    freedom: float  # degrees of freedom

    @property
    def p_worse(self) -> float:
        """Of Welch's test for no loss."""
        from scipy.special import stdtr

        if self.error == 0:
            return 0.0 if self.change < 0 else 1.0
        return float(stdtr(self.freedom, self.change / self.error))

    def quantile(self, p: float) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, p))

    def interval(self) -> tuple[float, float]:
        """95 %, two-sided, in logarithms."""
        half = self.quantile(0.975) * self.error if self.error else 0.0
        return self.change - half, self.change + half

    def detectable(self, alpha: float) -> float:
        """The smallest loss, as a share, that is found with POWER."""
        if self.error == 0:
            return 0.0
        return -math.expm1(-(self.quantile(1 - alpha) + self.quantile(POWER)) * self.error)


def effect(m: Metric, before: Sequence[float], now: Sequence[float]) -> Effect | None:
    """Of the repeats of two runs; None with fewer than two on a side, or where a value is not positive and finite."""
    sides = [before, now]
    if any(len(s) < 2 or not all(math.isfinite(v) and v > 0 for v in s) for s in sides):
        return None
    logs = [[math.log(v) for v in s] for s in sides]
    parts = [variance(s) / len(s) for s in logs]
    change = fmean(logs[1]) - fmean(logs[0])
    # Equal values have rounding left in their variance.
    error = math.sqrt(sum(parts)) if sum(parts) > 1e-24 else 0.0
    freedom = len(before) + len(now) - 2.0
    if error:
        freedom = sum(parts) ** 2 / sum(p**2 / (len(s) - 1) for p, s in zip(parts, logs, strict=True))
    return Effect(change if m.better == "higher" else -change, error, freedom)


def comparisons(m: Metric, pairs: Sequence[tuple[Cell, Cell]], policy: Policy, *, machine: str | None) -> list[Check]:
    """One metric of all cells. `machine` says how the machines differ; times are then not comparable."""
    found: list[tuple[Cell, str | None, Effect | None]] = []
    values = []
    for base, now in pairs:
        before, after = repeat_values(m, base), repeat_values(m, now)
        trouble = _trouble(base, now, before, after, machine)
        found.append((now, trouble, None if trouble else effect(m, before, after)))
        values.append((_mean(before), _mean(after)))
    significant, alphas = _holm([e.p_worse for _, _, e in found if e is not None])
    level = iter(zip(significant, alphas, strict=True))
    checks = []
    for (now, trouble, e), (was, is_) in zip(found, values, strict=True):
        limit = policy.limit(m, now.place)
        if e is None:
            text = trouble or f"a value of {m.name} is not a positive number; sweep again"
            checks.append(Check(m.name, "timed", now.place, "CANNOT JUDGE", text, limit.level, was, is_))
            continue
        is_significant, alpha = next(level)
        judged = _judge(m, now, e, limit, is_significant=is_significant, alpha=alpha)
        checks.append(replace(judged, before=was, now=is_))
    return checks


def _judge(m: Metric, now: Cell, e: Effect, limit: Limit, *, is_significant: bool, alpha: float) -> Check:
    sign = 1 if m.better == "higher" else -1
    low, high = sorted(math.expm1(sign * x) for x in e.interval())
    change, detectable = math.expm1(sign * e.change), e.detectable(alpha)
    loss = -math.expm1(e.change) if m.better == "higher" else math.expm1(-e.change)
    seen = f"{100 * change:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f})"
    verdict: Verdict = "PASS"
    message = f"{seen}; a loss of {share(detectable)} would have been seen"
    if exceeds(loss, limit.tolerance) and is_significant:
        verdict = "REGRESSION"
        message = f"{seen}, worse by more than {share(limit.tolerance)}"
    elif exceeds(loss, limit.tolerance):
        verdict = "CANNOT JUDGE"
        message = f"{seen} may be noise; only {share(detectable)} would have been seen: sweep with more --repeats"
    elif detectable > BLIND * limit.tolerance:
        verdict = "CANNOT JUDGE"
        message = f"{seen}, but only a loss of {share(detectable)} would have been seen: sweep with more --repeats"
    return Check(
        m.name,
        "timed",
        now.place,
        verdict,
        message,
        limit.level,
        change=change,
        low=low,
        high=high,
        detectable=detectable,
        limit=limit.tolerance,
    )


def _trouble(base: Cell, now: Cell, before: Sequence[float], after: Sequence[float], machine: str | None) -> str | None:
    if machine is not None:
        return f"measured on another machine ({machine}); write a baseline there, or gate with --only exact"
    for side, cell in (("the run", now), ("the baseline", base)):
        if cell.no_speed:
            return f"{side} has no speed: {cell.no_speed}"
    if base.times is None:
        return "the baseline holds no times; write it without --exact-only, or gate with --only exact"
    for side, cell, values in (("the baseline", base, before), ("the run", now, after)):
        repeats = len(cell.times.plain) if cell.times else 0
        if len(values) < repeats:
            return f"{repeats - len(values)} of the {repeats} repeats of {side} have no value; sweep again"
        if repeats < 2:
            return f"{side} has one repeat, which has no scatter; sweep with --repeats 8"
    return None


def _holm(ps: Sequence[float]) -> tuple[list[bool], list[float]]:
    """Which p are significant together at ALPHA, and the level that a single check had to reach."""
    significant = [False] * len(ps)
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if ps[i] > ALPHA / (len(ps) - rank):
            break
        significant[i] = True
    return significant, [ALPHA / max(len(ps), 1)] * len(ps)


def repeat_values(m: Metric, cell: Cell, statistic: str = "median") -> list[float]:
    """The metric in each repeat where it can be computed."""
    if cell.times is None:
        return []
    found = []
    for plain, speculative in zip(cell.times.plain, cell.times.speculative, strict=True):
        value = _value(m, cell, plain, speculative, statistic)
        if value is not None:
            found.append(value)
    return found


def _value(m: Metric, cell: Cell, plain: PassTimes, speculative: PassTimes, statistic: str) -> float | None:
    if m.by_request:
        values = request_values(m, speculative)
        return summarise(np.array(values), statistic) if values else None
    rates = {name: _rate(p, cell.spec.batch) for name, p in (("plain", plain), ("speculative", speculative))}
    if m.name == "plain_tokens_per_second":
        return rates["plain"]
    if m.name == "tokens_per_second":
        return rates["speculative"]
    if rates["plain"] is None or rates["speculative"] is None:
        return None
    return rates["speculative"] / rates["plain"]


def request_values(m: Metric, done: PassTimes) -> list[float]:
    """Milliseconds of every request that has one."""
    seconds = done.tpot_seconds if m.name == "tpot_ms" else done.ttft_seconds
    return [1e3 * s for s in seconds if s is not None]


def summarise(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], statistic: str) -> float:
    match statistic:
        case "mean":
            return float(values.mean())
        case "min" | "max":
            return float(values.min() if statistic == "min" else values.max())
        case "median":
            return float(np.median(values))
        case _:
            return float(np.percentile(values, float(statistic.removeprefix("p"))))


def _rate(done: PassTimes, batch: int) -> float | None:
    tokens, seconds = sum(done.tokens), math.fsum(done.seconds)
    return batch * tokens / seconds if tokens and seconds > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    """The geometric one, which the comparison is about."""
    return math.exp(fmean(math.log(v) for v in values)) if values and min(values) > 0 else None
