"""The fast plan: which few cells of a grid to measure, and what the others will be.

    survey   one cell per drafter and suite, at the largest K: what is accepted, by position
    probes   a few rounds per drafter, batch and some K: what a round costs
    predict  every cell of the grid: tokens per round over seconds per round, against the plain step
    choose   the most promising cells of each suite and batch, and some others to check the predictions on

A chain of length K accepts what the first K places of a longer one do, so one survey cell tells the acceptance length
at every K. A tree has its nodes elsewhere at another K: it is surveyed at the smallest K too, and between the two the
length is taken to grow with the logarithm of K.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectune.sweeping.cell import CellResult, CellSpec, Record
from spectune.sweeping.drafter_names import drafts_trees
from spectune.sweeping.figures import speculative_rounds

SMALL_GRID = 36  # cells that are measured whole rather than planned
WORTH_A_PLAN = 0.6  # a fast plan that measures more of the grid than this is not worth its probes
CLOSE = 0.04  # cells predicted within this of the best of their suite and batch are measured too
MOST_CLOSE = 2  # but no more than so many beside the best
CHECKED = 0.02  # share of the grid that is measured for the predictions' sake
_LEAST_CHECKED = 3


class Probe(Record):
    """Seconds of one round of a drafter, or of a plain step where `drafter` is None; medians of a short pass.

    `cost_seconds` is what it took to find out.
    """

    drafter: str | None
    batch: int
    k: int
    round_seconds: float
    rounds: int
    cost_seconds: float | None = None  # None in files of older versions


class Prediction(Record):
    """What a cell of the grid is expected to show."""

    key: str
    acceptance_length: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Cells to measure: the promising ones, and those that check the predictions."""

    promising: tuple[CellSpec, ...]
    checks: tuple[CellSpec, ...]


def survey(grid: Sequence[CellSpec], prompts: int, infeasible: Container[str] = ()) -> tuple[CellSpec, ...]:
    """The cells that tell what is accepted, in the order of the grid. infeasible: keys that do not fit the device.

    Acceptance does not depend on the batch, and a large one takes the least time for it: as large as so many `prompts`
    (of the smallest suite) fill without being repeated, and as fits.
    """
    ks = {spec.k for spec in grid if spec.k}
    if not ks:
        return ()
    wanted = {(max(ks), False), (max(ks), True), (min(ks), True)}
    by_batch: dict[int, list[CellSpec]] = {}
    for spec in grid:
        if (spec.k, drafts_trees(spec.drafter)) in wanted:
            by_batch.setdefault(spec.batch, []).append(spec)
    smallest = min(by_batch)
    fitting = (b for b, own in by_batch.items() if b <= prompts and not any(s.key in infeasible for s in own))
    return tuple(by_batch[max(fitting, default=smallest)])


def probe_places(grid: Sequence[CellSpec]) -> tuple[CellSpec, ...]:
    """One cell of the grid, of its first suite, for each drafter, batch and probed K."""
    ks = sorted({spec.k for spec in grid if spec.k})
    probed = {ks[0], ks[len(ks) // 2], ks[-1]} | {spec.k for spec in grid if not spec.k}
    suite = grid[0].suite
    return tuple(spec for spec in grid if spec.suite == suite and spec.k in probed)


def is_worth_it(grid: Sequence[CellSpec], surveyed: int) -> bool:
    """Whether the fast plan, with so many surveyed cells, measures clearly less than the grid."""
    places = len({(spec.suite, spec.batch) for spec in grid})
    return len(grid) > SMALL_GRID and surveyed > 0 and surveyed + places + _checked(grid) < WORTH_A_PLAN * len(grid)


def predict(grid: Iterable[CellSpec], surveyed: Sequence[CellResult], probes: Sequence[Probe]) -> dict[str, Prediction]:
    """Predictions by key, for every cell whose drafter was surveyed on its suite and probed at its batch."""
    lengths = _lengths(surveyed)
    plain = {p.batch: p.round_seconds for p in probes if p.drafter is None}
    rounds: dict[tuple[str, int], dict[float, float]] = {}
    for p in probes:
        if p.drafter is not None:
            rounds.setdefault((p.drafter, p.batch), {})[p.k] = p.round_seconds
    found = {}
    for spec in grid:
        known = lengths.get((spec.drafter, spec.suite))
        times = rounds.get((spec.drafter, spec.batch))
        if known is None or times is None or spec.batch not in plain:
            continue
        length = _length_at(known, spec)
        speedup = length * plain[spec.batch] / between(times, spec.k)
        found[spec.key] = Prediction(key=spec.key, acceptance_length=length, speedup=speedup)
    return found


def choose(grid: Sequence[CellSpec], predictions: Mapping[str, Prediction], measured: Iterable[str]) -> Choice:
    """What to measure next. measured: keys that are known already; they are not chosen again."""
    known = set(measured)
    promising: list[CellSpec] = []
    for place in dict.fromkeys((spec.suite, spec.batch) for spec in grid):
        here = [s for s in grid if (s.suite, s.batch) == place and s.key in predictions]
        here.sort(key=lambda s: -predictions[s.key].speedup)
        if here:
            best = predictions[here[0].key].speedup
            close = [s for s in here[1:] if predictions[s.key].speedup >= (1 - CLOSE) * best]
            promising += [here[0], *close[:MOST_CLOSE]]
            # What the best drafter costs at rest tells whether its loop may run on where drafts do not pay.
            promising += [s for s in here if s.k == 0 and s.drafter == here[0].drafter and s not in promising]
    taken = known | {s.key for s in promising}
    # Keys are hashes: their order is random, and the same in every process.
    others = sorted((s for s in grid if s.key in predictions and s.key not in taken), key=lambda s: s.key)
    return Choice(tuple(s for s in promising if s.key not in known), tuple(others[: _checked(grid)]))


def prediction_errors(predictions: Mapping[str, Prediction], speedups: Mapping[str, float | None]) -> list[float]:
    """|predicted / measured - 1| of the cells that have both, ascending."""
    return sorted(
        abs(p.speedup / measured - 1) for key, p in predictions.items() if (measured := speedups.get(key)) is not None
    )


def _checked(grid: Sequence[CellSpec]) -> int:
    return max(_LEAST_CHECKED, math.ceil(CHECKED * len(grid)))


# Accepted tokens -> rounds, of one surveyed cell.
_Counts = Counter[int]


def _lengths(surveyed: Sequence[CellResult]) -> dict[tuple[str, str], dict[int, _Counts]]:
    """By drafter and suite, and by K: how many rounds accepted how many tokens."""
    found: dict[tuple[str, str], dict[int, _Counts]] = {}
    for cell in surveyed:
        counts: _Counts = Counter()
        for c in speculative_rounds(cell):
            counts[c.accepted] += c.count
        if counts:
            found.setdefault((cell.spec.drafter, cell.spec.suite), {})[cell.spec.k] = counts
    return found


def _length_at(known: Mapping[int, _Counts], spec: CellSpec) -> float:
    """Acceptance length at a cell's K, the target's own token included."""
    if spec.k == 0:
        return 1.0
    largest = max(known)
    if not drafts_trees(spec.drafter):
        return _mean_length(known[largest], spec.k)
    lengths = {k: _mean_length(counts, k) for k, counts in known.items()}
    return between({math.log(k): length for k, length in lengths.items()}, math.log(spec.k))


def _mean_length(counts: _Counts, k: int) -> float:
    return 1 + sum(min(accepted, k) * n for accepted, n in counts.items()) / counts.total()


def between(points: Mapping[float, float], x: float) -> float:
    """Linear interpolation; the nearest point's value outside of them."""
    xs = sorted(points)
    return float(np.interp(x, xs, [points[at] for at in xs]))
