"""Judging requirements: numbers that a run must reach by itself.

A count is what it is. A time comes with a 95 % interval, by bootstrap over prompts and repeats as everywhere in
spectune, and a requirement that lies inside it cannot be judged.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spectune.gating.baseline import Baseline, Cell
from spectune.gating.check import Check, Verdict
from spectune.gating.exact import exact_values, number
from spectune.gating.metric import Level
from spectune.gating.requirement import Requirement
from spectune.gating.selector import place_of, require_match
from spectune.gating.timed import request_values, summarise
from spectune.speedup.uncertainty import RESAMPLES, Draws, draw_counts, interval


@dataclass(frozen=True, slots=True)
class Timed:
    value: float | None
    low: float | None
    high: float | None
    reason: str | None


def judge(required: Requirement, level: Level, run: Baseline) -> Iterator[Check]:
    """One check for every selected cell, of those that failed or were never run too.

    Raises UsageError where the plan has no such cell.
    """
    places = [c.place for c in run.cells]
    others = {place_of(f.spec): f"failed: {f.reason}: {f.message}" for f in run.failures}
    others |= {place_of(s): "was not run; sweep with --resume" for s in run.unfinished}
    require_match(required.selector, [*places, *others], f"requirement {required}")
    for cell in run.cells:
        if required.selector.matches(cell.place):
            yield (_exact if required.metric.kind == "exact" else _timed)(required, level, cell)
    for place, why in others.items():
        if required.selector.matches(place):
            text = f"the cell {why}"
            yield Check(str(required), required.metric.kind, place, "CANNOT JUDGE", text, level, required=True)


def _exact(required: Requirement, level: Level, cell: Cell) -> Check:
    value = exact_values(cell)[required.metric.name]
    if value is None:
        text = f"{required.metric.name} is null: nothing was drafted"
        return Check(str(required), "exact", cell.place, "CANNOT JUDGE", text, level, required=True)
    holds = required.holds(value)
    text = f"{number(value)}{'' if holds else f', wanted {required.op}{required.number:g}'}"
    verdict: Verdict = "PASS" if holds else "REGRESSION"
    return Check(
        str(required),
        "exact",
        cell.place,
        verdict,
        text,
        level,
        now=value,
        limit=required.number,
        required=True,
    )


def _timed(required: Requirement, level: Level, cell: Cell) -> Check:
    found = timed(required, cell)
    wanted = f"wanted {required.op}{required.number:g}"
    verdict: Verdict = "CANNOT JUDGE"
    if found.value is None or found.low is None or found.high is None:
        text = f"no interval, so this is not known: {found.reason}"
    else:
        text = f"{found.value:.4g} ({found.low:.4g} to {found.high:.4g})"
        if required.holds(found.low) and required.holds(found.high):
            verdict = "PASS"
        elif required.holds(found.low) or required.holds(found.high):
            text += f" has {required.number:g} inside, {wanted}: sweep with more --repeats or prompts"
        else:
            verdict, text = "REGRESSION", f"{text}, {wanted}"
    return Check(
        str(required),
        "timed",
        cell.place,
        verdict,
        text,
        level,
        now=found.value,
        low=found.low,
        high=found.high,
        limit=required.number,
        required=True,
    )


def timed(required: Requirement, cell: Cell) -> Timed:
    """The metric of one cell over all its repeats."""
    if cell.no_speed:
        return Timed(None, None, None, cell.no_speed)
    if cell.times is None or not cell.times.speculative:
        return Timed(None, None, None, "no times were kept")
    prompts = sorted({r.prompt for r in cell.requests})
    repeats = len(cell.times.speculative)
    value, draws = (_by_request if required.metric.by_request else _by_rate)(required, cell, prompts)
    if value is None or not math.isfinite(value):
        return Timed(None, None, None, "nothing was timed")
    if len(prompts) < 2:
        return Timed(value, None, None, "one prompt only: its spread cannot be known")
    found = interval(value, draws, len(prompts), repeats)
    return Timed(value, found.low, found.high, found.reason)


def _by_rate(required: Requirement, cell: Cell, prompts: Sequence[str]) -> tuple[float | None, Draws]:
    """Speeds and their ratio, from the same resamples as `recommend`."""
    assert cell.times is not None
    row = {name: i for i, name in enumerate(prompts)}
    repeats = len(cell.times.plain)
    # [quantity, prompt, repeat]; quantities: plain tokens, plain seconds, speculative tokens, its seconds
    sums = np.zeros((4, len(prompts), repeats))
    for first, passes in ((0, cell.times.plain), (2, cell.times.speculative)):
        for r, done in enumerate(passes):
            for request, tokens, seconds in zip(cell.requests, done.tokens, done.seconds, strict=True):
                sums[first, row[request.prompt], r] += tokens
                sums[first + 1, row[request.prompt], r] += seconds
    by_prompt = draw_counts(zlib.crc32(cell.spec.suite.encode()), len(prompts), RESAMPLES)
    by_repeat = draw_counts(zlib.crc32(cell.spec.key.encode()), repeats, RESAMPLES)
    drawn = ((by_prompt @ sums) * by_repeat).sum(axis=2)  # [quantity, resample]
    totals = np.concatenate([sums.sum(axis=(1, 2))[:, None], drawn], axis=1)  # the measured ones first
    with np.errstate(divide="ignore", invalid="ignore"):
        plain, speculative = cell.spec.batch * totals[0] / totals[1], cell.spec.batch * totals[2] / totals[3]
        rates = {"plain_tokens_per_second": plain, "tokens_per_second": speculative, "speedup": speculative / plain}
    found = rates[required.metric.name]
    return (float(found[0]) if np.isfinite(found[0]) else None), found[1:]


def _by_request(required: Requirement, cell: Cell, prompts: Sequence[str]) -> tuple[float | None, Draws]:
    """A statistic of the requests of all speculative passes."""
    assert cell.times is not None
    statistic = required.statistic or "median"
    # own[prompt][repeat]: the values of a prompt's requests there
    own: list[list[list[float]]] = [[[] for _ in cell.times.speculative] for _ in prompts]
    row = {name: i for i, name in enumerate(prompts)}
    for r, done in enumerate(cell.times.speculative):
        seconds = done.tpot_seconds if required.metric.name == "tpot_ms" else done.ttft_seconds
        for request, s in zip(cell.requests, seconds, strict=True):
            if s is not None:
                own[row[request.prompt]][r].append(1e3 * s)
    everything = [v for done in cell.times.speculative for v in request_values(required.metric, done)]
    if not everything:
        return None, np.array([])
    generator = np.random.default_rng(zlib.crc32(cell.spec.key.encode()))
    repeats = len(cell.times.speculative)
    draws = np.full(RESAMPLES, math.nan)
    for n in range(RESAMPLES):
        chosen = generator.integers(len(prompts), size=len(prompts))
        when = generator.integers(repeats, size=repeats)
        values = [v for i in chosen for r in when for v in own[i][r]]
        if values:
            draws[n] = summarise(np.array(values), statistic)
    return summarise(np.array(everything), statistic), draws
