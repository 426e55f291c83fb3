"""How sure a speedup is: a 95 % interval by bootstrap, and the verdict that follows from it.

Prompts are the clusters: tokens of one prompt are not independent of each other, prompts are. Each resample
draws prompts with replacement, and repeats too where there are several, and recomputes the ratio of the
pooled rates; plain and speculative passes of a repeat stay together. A suite is resampled alike in every
cell, so cells on the same prompts are compared on the same draws (Efron and Tibshirani 1993, chapters 8
and 13).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spectune.speedup.timing import has_full_rounds
from spectune.sweeping.cell import CellResult, RequestResult
from spectune.sweeping.figures import tokens_and_seconds

RESAMPLES = 1000
LEVEL = 0.95
FLAT = 0.01  # within this of the best, a speedup is as good as it
USABLE = 0.95  # share of resamples that must give a number
_NO_SPREAD = 1e-9  # resamples that differ by less differ by rounding alone

Verdict = Literal["FASTER", "SLOWER", "CAN'T TELL"]
Draws = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rates:
    """Plain and speculative tokens per second of one workload, with a resample of both in `*_draws`.

    `reason` says why there are no draws, `doubt` why a speedup above 1 cannot be believed.
    """

    plain: float | None
    speculative: float | None
    plain_draws: Draws | None
    speculative_draws: Draws | None
    prompts: int
    repeats: int
    reason: str | None = None
    doubt: str | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A speedup with its 95 % interval.

    `reason` says why `low` and `high` are None, or why the verdict is CAN'T TELL though the interval lies above 1.
    """

    value: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    prompts: int
    repeats: int
    reason: str | None = None


def cell_rates(
    cell: CellResult,
    *,
    resamples: int = RESAMPLES,
    counts: Callable[[RequestResult], bool] | None = None,
    repeat_seed: str = "",
) -> Rates:
    """Resample the prompts and repeats of a cell. The same cell gives the same draws every time.

    With `counts` only the tokens of requests that it accepts count, over the time of all of them. Another `repeat_seed`
    draws other repeats: equal cells of two runs have the same key and nothing else in common.
    """
    full = has_full_rounds(cell)
    prompts = sorted({r.prompt_id for p in cell.passes for r in p.requests})
    times = cell.spec.repeats  # that each prompt was measured in each mode
    # [quantity, prompt, time]; quantities: plain tokens, plain seconds, speculative tokens, its seconds
    sums = np.zeros((4, len(prompts), times))
    row = {name: i for i, name in enumerate(prompts)}
    for p in cell.passes:
        first = 0 if p.mode == "plain" else 2
        for request, (tokens, seconds) in zip(p.requests, tokens_and_seconds(p, full=full), strict=True):
            at = row[request.prompt_id], p.repeat % times
            sums[first, *at] += tokens if counts is None or counts(request) else 0
            sums[first + 1, *at] += seconds
    totals = [math.fsum(sums[i].ravel()) for i in range(4)]
    batch = cell.spec.batch
    plain = batch * totals[0] / totals[1] if totals[1] > 0 else None
    speculative = batch * totals[2] / totals[3] if totals[3] > 0 else None
    timed = bool(totals[1] and totals[3]) if counts is not None else bool(plain and speculative)
    reason = _no_interval(timed, len(prompts))
    if reason:
        return Rates(plain, speculative, None, None, len(prompts), times, reason)
    by_prompt = draw_counts(zlib.crc32(cell.spec.suite.encode()), len(prompts), resamples)
    by_repeat = draw_counts(zlib.crc32((cell.key + repeat_seed).encode()), times, resamples)
    drawn = ((by_prompt @ sums) * by_repeat).sum(axis=2)  # [quantity, resample]
    with np.errstate(divide="ignore", invalid="ignore"):
        plain_draws, speculative_draws = batch * drawn[0] / drawn[1], batch * drawn[2] / drawn[3]
    return Rates(plain, speculative, plain_draws, speculative_draws, len(prompts), times)


def estimate(rates: Rates) -> Estimate:
    """The speedup of one workload."""
    if not rates.plain or rates.speculative is None:
        return Estimate(
            None, None, None, "CAN'T TELL", rates.prompts, rates.repeats, rates.reason or "nothing was timed"
        )
    value = rates.speculative / rates.plain
    draws, reason = ratio_draws(rates), rates.reason
    if draws is not None and np.ptp(draws) <= _NO_SPREAD * value:
        # In one batch all prompts have their rounds in common.
        draws, reason = None, "all prompts took the same rounds, so nothing varies: use more prompts or --repeats 3"
    return doubted(interval(value, draws, rates.prompts, rates.repeats, reason), rates.doubt)


def doubted(found: Estimate, doubt: str | None) -> Estimate:
    """FASTER becomes CAN'T TELL where there is a reason not to believe it."""
    if doubt is None or found.verdict != "FASTER":
        return found
    return replace(found, verdict="CAN'T TELL", reason=doubt)


def ratio_draws(rates: Rates) -> Draws | None:
    """Resamples of the speedup."""
    if rates.plain_draws is None or rates.speculative_draws is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(rates.speculative_draws / rates.plain_draws)


def interval(value: float, draws: Draws | None, prompts: int, repeats: int, reason: str | None = None) -> Estimate:
    """The percentile interval of `draws` around `value`."""
    if draws is not None:
        usable = draws[np.isfinite(draws) & (draws > 0)]
        if len(usable) >= USABLE * len(draws):
            low, high = map(float, ends(usable))
            return Estimate(value, low, high, verdict(low, high), prompts, repeats)
        reason = "most prompts decoded nothing with every slot busy"
    return Estimate(value, None, None, "CAN'T TELL", prompts, repeats, reason)


def ends(draws: Draws) -> Draws:
    """[draws, ...] -> [2, ...]: the ends of the percentile interval."""
    tail = 100 * (1 - LEVEL) / 2
    return np.asarray(np.percentile(draws, [tail, 100 - tail], axis=0))


def verdict(low: float | None, high: float | None) -> Verdict:
    """FASTER or SLOWER where the whole interval lies on one side of 1."""
    if low is not None and low > 1:
        return "FASTER"
    if high is not None and high < 1:
        return "SLOWER"
    return "CAN'T TELL"


def scaled(rates: Rates, factor: float) -> Rates:
    """All rates and their resamples times a factor."""

    def times(value: float | None) -> float | None:
        return None if value is None else factor * value

    return replace(
        rates,
        plain=times(rates.plain),
        speculative=times(rates.speculative),
        plain_draws=None if rates.plain_draws is None else factor * rates.plain_draws,
        speculative_draws=None if rates.speculative_draws is None else factor * rates.speculative_draws,
    )


def over_suites(parts: Sequence[Rates], weights: Sequence[float] | None = None) -> Rates:
    """Several suites at one batch as one workload: the same number of tokens of each, or `weights` as shares of them.

    The time for them adds up, so the rates are harmonic means: Σ w / Σ w/rate. A mean of speedups would let a
    suite that decodes fast anyway outvote the one that takes the time.
    """
    return Rates(
        _harmonic([p.plain for p in parts], weights),
        _harmonic([p.speculative for p in parts], weights),
        _harmonic_draws([p.plain_draws for p in parts], weights),
        _harmonic_draws([p.speculative_draws for p in parts], weights),
        sum(p.prompts for p in parts),
        min(p.repeats for p in parts),
        next((p.reason for p in parts if p.reason), None),
        next((p.doubt for p in parts if p.doubt), None),
    )


def over_batches(parts: Sequence[Rates]) -> Rates:
    """Several batch sizes as one workload: each is busy for the same time under plain decoding.

    Then batch b needs 1/S_b of its time with speculation, and S = n / Σ 1/S_b. Equal tokens instead would let
    batch 1, the slowest per token, decide alone. Rates are relative to plain decoding, which is 1.
    """
    ratios = [None if not p.plain or p.speculative is None else p.speculative / p.plain for p in parts]
    combined = _harmonic_draws([ratio_draws(p) for p in parts])
    return Rates(
        1.0,
        _harmonic(ratios),
        None if combined is None else np.ones_like(combined),
        combined,
        min(p.prompts for p in parts),  # the batches decode the same prompts
        min(p.repeats for p in parts),
        next((p.reason for p in parts if p.reason), None),
        next((p.doubt for p in parts if p.doubt), None),
    )


def _no_interval(timed: bool, prompts: int) -> str | None:
    if not timed:
        return "no token was decoded in a measurable time"
    if prompts < 2:
        return "one prompt only: its spread cannot be known"
    return None


@lru_cache(maxsize=256)
def draw_counts(seed: int, n: int, resamples: int) -> Draws:
    """How often each of `n` units is drawn in each resample: [resamples, n]."""
    drawn = np.random.default_rng(seed).multinomial(n, [1 / n] * n, size=resamples)
    return drawn.astype(np.float64)


def _harmonic(rates: Sequence[float | None], weights: Sequence[float] | None = None) -> float | None:
    weights = weights or [1.0] * len(rates)
    known = [(rate, w) for rate, w in zip(rates, weights, strict=True) if rate]
    if len(known) < len(rates):
        return None
    return math.fsum(weights) / math.fsum(w / rate for rate, w in known)


def _harmonic_draws(draws: Sequence[Draws | None], weights: Sequence[float] | None = None) -> Draws | None:
    weights = weights or [1.0] * len(draws)
    known = [(d, w) for d, w in zip(draws, weights, strict=True) if d is not None]
    if not known or len(known) < len(draws):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(math.fsum(weights) / np.sum([w / d for d, w in known], axis=0), dtype=np.float64)
