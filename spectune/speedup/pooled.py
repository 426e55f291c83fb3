"""What a grid's cells would show if the machine were steady: round times pooled over the cells that share them.

A cell's counts are exact, its times are not: they drift with the machine. In a full grid what a round takes varies
smoothly with K, drafting is the same on every suite, and the plain step is measured anew in each cell of a place. So
per batch

    log(round seconds) = a_d + b_d u + c_d u²  (drafter d)  +  e_s + f_s u  (suite s),  u = log(1 + K),

is fitted by least squares, and a cell's speedup follows from its own tokens per round, its fitted round and the median
plain step of its suite and batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectune.sweeping.cell import CellResult, PassResult
from spectune.sweeping.figures import decode_rate

_LEAST_RESIDUALS = 10  # fewer left over after the fit tell nothing about the noise


@dataclass(frozen=True, slots=True)
class Pooled:
    """`speedups` by key. Noise is the standard deviation of one cell's times, as a share of them."""

    speedups: dict[str, float]
    round_noise: float
    plain_noise: float

    @property
    def noise(self) -> float:
        """Of one measured speedup, whose two times drift by themselves."""
        return math.hypot(self.round_noise, self.plain_noise)


@dataclass(frozen=True, slots=True)
class _Times:
    """Of one cell, at full occupancy: tokens per row and round, seconds per round and per plain step."""

    cell: CellResult
    tokens: float
    round_seconds: float
    plain_seconds: float


def pooled(cells: Sequence[CellResult]) -> Pooled | None:
    """None where the cells are too few for the fit, or where some place has no times."""
    known = [t for t in map(_times, cells) if t is not None]
    speedups: dict[str, float] = {}
    residuals: list[float] = []
    freedom = 0
    off_plain: list[float] = []
    for batch in dict.fromkeys(t.cell.spec.batch for t in known):
        own = [t for t in known if t.cell.spec.batch == batch]
        design = _design([t.cell for t in own])
        logs = np.log([t.round_seconds for t in own])
        solution, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
        fitted = design @ solution
        residuals += list(logs - fitted)
        freedom += len(own) - int(rank)
        plain = {
            suite: statistics.median(t.plain_seconds for t in own if t.cell.spec.suite == suite)
            for suite in dict.fromkeys(t.cell.spec.suite for t in own)
        }
        for t, seconds in zip(own, np.exp(fitted), strict=True):
            speedups[t.cell.key] = t.tokens * plain[t.cell.spec.suite] / float(seconds)
            off_plain.append(math.log(t.plain_seconds / plain[t.cell.spec.suite]))
    if freedom < _LEAST_RESIDUALS:
        return None
    return Pooled(
        speedups,
        math.sqrt(sum(r * r for r in residuals) / freedom),
        math.sqrt(sum(r * r for r in off_plain) / len(off_plain)),
    )


def _design(cells: Sequence[CellResult]) -> NDArray[np.float64]:
    """[cells, coefficients]: a parabola per drafter, a line per suite but the first."""
    drafters = list(dict.fromkeys(c.spec.drafter for c in cells))
    suites = list(dict.fromkeys(c.spec.suite for c in cells))[1:]
    rows = []
    for c in cells:
        u = math.log1p(c.spec.k)
        row = [value * (c.spec.drafter == d) for d in drafters for value in (1.0, u, u * u)]
        rows.append(row + [value * (c.spec.suite == s) for s in suites for value in (1.0, u)])
    return np.array(rows)


def _times(cell: CellResult) -> _Times | None:
    speculative = [p for p in cell.passes if p.mode == "speculative"]
    plain = decode_rate([p for p in cell.passes if p.mode == "plain"], cell.spec.batch)
    after = decode_rate(speculative, cell.spec.batch)
    tokens = _tokens_per_round(speculative, cell.spec.batch)
    if not plain or not after or not tokens:
        return None
    return _Times(cell, tokens, tokens * cell.spec.batch / after, cell.spec.batch / plain)


def _tokens_per_round(passes: Sequence[PassResult], batch: int) -> float | None:
    rounds = sum(p.times.rounds for p in passes)
    return sum(r.full_tokens for p in passes for r in p.requests) / (rounds * batch) if rounds else None
