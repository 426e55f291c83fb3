"""The schedule: the K to use at each batch with one drafter, 0 included, and the batch where speculation stops paying.

A server can change K from round to round, but not the drafter that it has loaded: so there is one schedule per drafter
and rule. K is 0 at a batch unless the best K's whole interval lies above 1. The crossover follows the K that measured
best at each batch, whether it pays or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spectune.recommending.choice import suites_as_one
from spectune.speedup.crossing import Crossing, crossing
from spectune.speedup.profile import Profile
from spectune.speedup.uncertainty import FLAT, Estimate, Rates, estimate, ratio_draws


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One batch. `k` is 0 where nothing is FASTER; `speedup` is that of `best_k`, the largest measured.

    `flat` are the FASTER K within 1 % of the best, ascending; `k` is the first of them. `resting` is the speed of the
    speculative loop with K = 0 against true plain decoding, None where no cell measured it.
    """

    batch: int
    k: int
    best_k: int
    speedup: Estimate
    chosen: Estimate | None  # of `k`; None for 0
    flat: tuple[int, ...]
    resting: Estimate | None


@dataclass(frozen=True, slots=True)
class Schedule:
    drafter: str
    rule: str
    rows: tuple[ScheduleRow, ...]
    crossover: Crossing | None  # None with fewer than two batches
    monotone: bool  # False: it pays again at a larger batch, so one crossover does not tell all

    def k_at(self, batch: int) -> int:
        """The K of a measured batch; 0 for others."""
        return next((row.k for row in self.rows if row.batch == batch), 0)


Speeds = dict[tuple[str, str, int, int], Rates]  # drafter, rule, K, batch


def speeds(profiles: Sequence[Profile], shares: Mapping[str, float]) -> Speeds:
    """The rates of everything that was measured on all suites of the workload."""
    groups: dict[tuple[str, str, int, int], dict[str, Rates]] = {}
    for p in profiles:
        if p.excluded is None and p.rates.plain and p.rates.speculative and p.spec.suite in shares:
            place = (p.spec.drafter, p.spec.rule, p.spec.k, p.spec.batch)
            groups.setdefault(place, {})[p.spec.suite] = p.rates
    return {
        place: suites_as_one([(suite, own[suite]) for suite in shares], shares)
        for place, own in groups.items()
        if len(own) == len(shares)
    }


def schedules(measured: Speeds) -> tuple[Schedule, ...]:
    """One schedule per drafter and rule, in the order of the run."""
    names = dict.fromkeys((drafter, rule) for drafter, rule, k, _ in measured if k > 0)
    return tuple(_schedule(drafter, rule, measured) for drafter, rule in names)


def _schedule(drafter: str, rule: str, measured: Speeds) -> Schedule:
    own = {(k, b): rates for (d, r, k, b), rates in measured.items() if (d, r) == (drafter, rule)}
    rows = tuple(_row(batch, own) for batch in sorted({b for k, b in own if k > 0}))
    best = [own[row.best_k, row.batch] for row in rows]
    draws = [ratio_draws(rates) for rates in best]
    known = [d for d in draws if d is not None]
    matrix = np.stack(known, axis=1) if len(known) == len(draws) else None
    values = [row.speedup.value or 0.0 for row in rows]
    found = crossing([row.batch for row in rows], values, matrix) if len(rows) > 1 else None
    return Schedule(drafter, rule, rows, found, not any(a <= 1 < b for a, b in pairwise(values)))


def _row(batch: int, own: Mapping[tuple[int, int], Rates]) -> ScheduleRow:
    found = {k: estimate(rates) for (k, b), rates in own.items() if b == batch}
    resting = found.pop(0, None)
    best_k = max(found, key=lambda k: found[k].value or 0.0)
    faster = {k: e.value or 0.0 for k, e in found.items() if e.verdict == "FASTER"}
    flat = tuple(sorted(k for k, value in faster.items() if value >= (1 - FLAT) * max(faster.values())))
    k = flat[0] if flat else 0
    return ScheduleRow(batch, k, best_k, found[best_k], found.get(k), flat, resting)
