"""What a grid's cells would show if the machine were steady: round times pooled over the cells that share them.

A cell's counts are exact, its times are not: they drift with the machine. In a full grid what a round takes varies
smoothly with K, drafting is the same on every suite, and the plain step is measured anew in each cell of a place. So
per batch

    round seconds = a_d + b_d K + c_d K²  (drafting and verifying with drafter d)  +  e_s + f_s K  (suite s)

is fitted by least squares of the relative errors, and a cell's speedup follows from its own acceptance length, its
fitted round and the median plain step of its suite and batch. Rounds are timed with every slot busy, but acceptance is
counted over all: where prompts are few, the former end when the quickest row does, and would flatter it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectune.sweeping.cell import CellResult
from spectune.sweeping.figures import decode_rate, figures

_LEAST_RESIDUALS = 10  # fewer left over after the fit tell nothing about the noise
_REWEIGHTED = 5  # times that the fit's own values are taken for the scale of the errors


@dataclass(frozen=True, slots=True)
class Pooled:
    """`speedups` by key. Noise is a standard deviation over the cells, as a share of the value.

    That of a speedup is smaller than its two times' together where both passes met the same slow spells.
    """

    speedups: dict[str, float]
    round_noise: float
    plain_noise: float
    speedup_noise: float


@dataclass(frozen=True, slots=True)
class _Times:
    """Of one cell: the acceptance length, and with every slot busy the seconds of a round and of a plain step."""

    cell: CellResult
    acceptance_length: float
    round_seconds: float
    plain_seconds: float


def pooled(cells: Sequence[CellResult]) -> Pooled | None:
    """Cells without times are left out. None where the others are too few to tell the noise."""
    known = [t for t in map(_times, cells) if t is not None]
    speedups: dict[str, float] = {}
    residuals: list[float] = []
    freedom = 0
    off_plain: list[float] = []
    for batch in dict.fromkeys(t.cell.spec.batch for t in known):
        own = [t for t in known if t.cell.spec.batch == batch]
        design = _design([t.cell for t in own])
        seconds = np.array([t.round_seconds for t in own])
        fitted = _relative_fit(design, seconds)
        residuals += list(np.log(seconds / fitted))
        freedom += len(own) - int(np.linalg.matrix_rank(design))
        plain = {
            suite: statistics.median(t.plain_seconds for t in own if t.cell.spec.suite == suite)
            for suite in dict.fromkeys(t.cell.spec.suite for t in own)
        }
        for t, fit in zip(own, fitted, strict=True):
            speedups[t.cell.key] = t.acceptance_length * plain[t.cell.spec.suite] / float(fit)
            off_plain.append(math.log(t.plain_seconds / plain[t.cell.spec.suite]))
    if freedom < _LEAST_RESIDUALS:
        return None
    off_round, off = np.array(residuals), np.array(off_plain)
    return Pooled(
        speedups,
        math.sqrt(np.sum(off_round**2) / freedom),
        math.sqrt(np.mean(off**2)),
        math.sqrt(np.sum((off_round - off) ** 2) / freedom),
    )


def _relative_fit(design: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fitted values of y > 0, whose errors are shares of it."""
    scale = y
    for _ in range(_REWEIGHTED):
        solution = np.linalg.lstsq(design / scale[:, None], y / scale, rcond=None)[0]
        scale = np.maximum(design @ solution, 0.1 * y)  # a fit through noise must not become a negative time
    return scale


def _design(cells: Sequence[CellResult]) -> NDArray[np.float64]:
    """[cells, coefficients]: a parabola per drafter, a line per suite but the first."""
    drafters = list(dict.fromkeys(c.spec.drafter for c in cells))
    suites = list(dict.fromkeys(c.spec.suite for c in cells))[1:]
    rows = []
    for c in cells:
        k = float(c.spec.k)
        row = [value * (c.spec.drafter == d) for d in drafters for value in (1.0, k, k * k)]
        rows.append(row + [value * (c.spec.suite == s) for s in suites for value in (1.0, k)])
    return np.array(rows)


def _times(cell: CellResult) -> _Times | None:
    batch = cell.spec.batch
    speculative = [p for p in cell.passes if p.mode == "speculative"]
    rounds = sum(p.times.rounds for p in speculative)
    seconds = sum(r.full_seconds for p in speculative for r in p.requests)
    plain = decode_rate([p for p in cell.passes if p.mode == "plain"], batch)
    tokens = figures(cell).acceptance_length
    if not plain or not tokens or not rounds or seconds <= 0:
        return None
    # Each of the batch's rows counts the same seconds.
    return _Times(cell, tokens, seconds / (batch * rounds), batch / plain)
