"""Published figures held against the formulas: acceptance curves, throughput tables, and a speedup article.

They are other people's measurements; what is computed here is what the models of this package say about them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spectune.errors import UsageError
from spectune.speedup.constant import ConstantRate, Geometric, fit_constant_rate, fit_geometric
from spectune.speedup.curve import AcceptanceCurve, CurvePoint, fit_curve, fit_decay
from spectune.speedup.models import card_speedup
from spectune.speedup.throughput import Throughput, ThroughputModel, fit_throughput


@dataclass(frozen=True, slots=True)
class Table:
    source: str  # the file's first line
    rows: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class CurveStudy:
    """One published acceptance curve. `bound` is the error of the best curve that any drafter could have."""

    name: str
    usual: AcceptanceCurve  # p = 1
    chosen: AcceptanceCurve
    constant: ConstantRate
    geometric: Geometric
    bound: float  # tokens


@dataclass(frozen=True, slots=True)
class ChosenK:
    """`regret` is the share of the row's best measured rate that the choice gives away."""

    batch: int
    k: int
    regret: float
    error: float  # largest |predicted / measured − 1| of the column
    fitted: bool  # whether the column was part of the fit


@dataclass(frozen=True, slots=True)
class Line:
    """Least squares of y = fixed + slope·x on relative errors."""

    fixed: float
    slope: float
    worst: float  # largest |predicted / measured − 1|


def read_table(path: Path) -> Table:
    """Read one file. Raises UsageError where it cannot be read or its first line does not name the source."""
    try:
        first, *lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not first.startswith("# source:"):
        raise UsageError(f"{path} does not name its source", "its first line must begin with `# source:`")
    return Table(first.removeprefix("# source:").strip(), tuple(csv.DictReader(lines)))


def study_curves(table: Table) -> list[CurveStudy]:
    """Fit every row of a table of acceptance lengths with the columns K1, K2, …"""
    found = []
    for row in table.rows:
        lengths = [float(value) for name, value in row.items() if name.startswith("K")]
        points = [CurvePoint.at(k, length) for k, length in enumerate(lengths, 1)]
        chosen = fit_curve(points)
        constant, geometric = fit_constant_rate(points, chosen), fit_geometric(points)
        if chosen is None or constant is None or geometric is None:
            raise UsageError(f"{row} holds fewer than two acceptance lengths")
        name = f"{row['model']}, {row['mode']}"
        found.append(CurveStudy(name, fit_decay(points, 1), chosen, constant, geometric, best_possible(lengths)))
    return found


def best_possible(lengths: Sequence[float]) -> float:
    """The least RMSE of any true acceptance curve: one that grows with K, by less and less.

    Position i is kept no more often than position i − 1, so AL(K) − 1 is a sum of falling shares. Each such curve is
    a sum of ramps min(K, i) with weights of at least 0.
    """
    from scipy.optimize import nnls

    k = np.arange(1, len(lengths) + 1)
    return float(nnls(np.minimum(k[:, None], k[None, :]).astype(float), np.array(lengths) - 1)[1]) / math.sqrt(len(k))


def throughput_points(table: Table) -> list[Throughput]:
    """The cells of a table with the columns steps, bs1, bs2, …"""
    return [
        Throughput(int(row["steps"]), int(name.removeprefix("bs")), float(value))
        for row in table.rows
        for name, value in row.items()
        if name.startswith("bs")
    ]


def choose_k(points: Sequence[Throughput], batches: Sequence[int], expert_share: float | None) -> list[ChosenK]:
    """The K that a model fitted to the columns `batches` chooses for every column."""
    model = fit_throughput([p for p in points if p.batch in batches], expert_share=expert_share)
    if model is None:
        raise UsageError("too few columns to choose a K from")
    return [
        _chosen(model, [p for p in points if p.batch == b], b in batches)
        for b in dict.fromkeys(p.batch for p in points)
    ]


def _chosen(model: ThroughputModel, column: Sequence[Throughput], fitted: bool) -> ChosenK:
    batch = column[0].batch
    measured = {p.k: p.tokens_per_second for p in column}
    k = model.best_k(sorted(measured), batch)
    errors = [abs(model.tokens_per_second(k, batch) / rate - 1) for k, rate in measured.items()]
    return ChosenK(batch, k, 1 - measured[k] / max(measured.values()), max(errors), fitted)


def missing_steps(beta: float, speedup: float, cost_ratio: float, k: int) -> float:
    """Plain steps that a round must cost beyond 1 + K·T_d/T_t for formula (1) to give `speedup`."""
    return (1 + beta * k) / speedup - 1 - k * cost_ratio


def fastest_card(beta: float, cost_ratio: float, ks: Sequence[int]) -> tuple[float, float]:
    """The least and the largest speedup that formula (1) gives over `ks`, if β were the same at each."""
    found = [card_speedup(beta, k, cost_ratio) for k in ks]
    return min(found), max(found)


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Raises ValueError for fewer than two different x."""
    if len(set(x)) < 2:
        raise ValueError("a line needs two different places")
    at, values = np.array(x, dtype=float), np.array(y, dtype=float)
    columns = np.stack([np.ones_like(at), at], axis=1) / values[:, None]
    fixed, slope = np.linalg.lstsq(columns, np.ones_like(at))[0]
    return Line(float(fixed), float(slope), float(np.abs((fixed + slope * at) / values - 1).max()))
