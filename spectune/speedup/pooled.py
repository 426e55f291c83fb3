"""What a grid's cells would show if the machine were steady: round costs pooled over the cells that share them.

A cell's counts are exact, its times are not: they drift with the machine. A cell's plain steps are measured beside its
rounds and drift with them, so costs are taken in plain steps of the same cell. In a full grid they vary smoothly with
K, and drafting costs about the same on every suite. So per batch

    round / plain step = a_d + b_d K + c_d K²  (drafting and verifying with drafter d)  +  e_s + f_s K  (suite s)

is fitted by least squares of the relative errors, and a cell's speedup is its own acceptance length over its fitted
cost. Rounds are timed with every slot busy, but acceptance is counted over all: where prompts are few, the former end
when the quickest row does, and would flatter it.
"""

from __future__ import annotations

import math
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
    """`speedups` by key. `noise` is a single cell's: the standard deviation of its speedup, as a share of it."""

    speedups: dict[str, float]
    noise: float


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one cell: the acceptance length, and what a round costs in plain steps while every slot is busy."""

    cell: CellResult
    acceptance_length: float
    plain_steps: float


def pooled(cells: Sequence[CellResult]) -> Pooled | None:
    """Cells without times are left out. None where the others are too few to tell the noise."""
    known = [c for c in map(_cost, cells) if c is not None]
    speedups: dict[str, float] = {}
    squares = 0.0
    freedom = 0
    for batch in dict.fromkeys(c.cell.spec.batch for c in known):
        own = [c for c in known if c.cell.spec.batch == batch]
        design = _design([c.cell for c in own])
        costs = np.array([c.plain_steps for c in own])
        fitted = _relative_fit(design, costs)
        squares += float(np.sum(np.log(costs / fitted) ** 2))
        freedom += len(own) - int(np.linalg.matrix_rank(design))
        for c, fit in zip(own, fitted, strict=True):
            speedups[c.cell.key] = c.acceptance_length / float(fit)
    if freedom < _LEAST_RESIDUALS:
        return None
    return Pooled(speedups, math.sqrt(squares / freedom))


def _relative_fit(design: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fitted values of y > 0, whose errors are shares of it."""
    scale = y
    for _ in range(_REWEIGHTED):
        solution = np.linalg.lstsq(design / scale[:, None], y / scale, rcond=None)[0]
        scale = np.maximum(design @ solution, 0.1 * y)  # a fit through noise must not become a negative cost
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


def _cost(cell: CellResult) -> _Cost | None:
    batch = cell.spec.batch
    speculative = [p for p in cell.passes if p.mode == "speculative"]
    rounds = sum(p.times.rounds for p in speculative)
    seconds = sum(r.full_seconds for p in speculative for r in p.requests)
    plain = decode_rate([p for p in cell.passes if p.mode == "plain"], batch)
    tokens = figures(cell).acceptance_length
    if not plain or not tokens or not rounds or seconds <= 0:
        return None
    # Each of the batch's rows counts the same seconds: a round takes seconds / (batch * rounds), a step batch / plain.
    return _Cost(cell, tokens, seconds * plain / (batch * batch * rounds))
