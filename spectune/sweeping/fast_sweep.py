"""Carrying out a fast plan: survey, probes, predictions, the chosen cells (see `fast_plan`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from spectune.engines.engine import Request
from spectune.sweeping.atomic import write_atomically
from spectune.sweeping.cell import CellSpec, Record
from spectune.sweeping.fast_plan import (
    Prediction,
    ProbePlace,
    choose,
    predict,
    prediction_errors,
    probe_places,
    probed_ks,
)
from spectune.sweeping.figures import figures
from spectune.sweeping.round_costs import Probe
from spectune.sweeping.rundir import RunDirectory
from spectune.sweeping.sweep import Sweep

FILE = "fast.json"

Extend = Callable[[Sequence[CellSpec]], None]  # make cells part of the run's plan


class FastRecord(Record):
    """fast.json: what the plan knew, and what it made of it."""

    schema_version: Literal[2] = 2
    grid_cells: int
    probes: tuple[Probe, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    checks: tuple[str, ...] = ()  # keys of cells measured for the predictions' sake


@dataclass(frozen=True, slots=True)
class FastOutcome:
    """What became of a fast plan. Errors are |predicted / measured - 1| of cells that the survey did not see."""

    grid_cells: int
    measured_cells: int
    errors: tuple[float, ...]

    def text(self) -> str:
        share = f"fast plan: {self.measured_cells} of {self.grid_cells} cells measured"
        if not self.errors:
            return f"{share}; --plan full measures all"
        median, p90 = np.percentile(self.errors, [50, 90])
        return (
            f"{share}; its predictions were off by {median:.1%} in the median and "
            f"{p90:.1%} at the 90th percentile of {len(self.errors)} cells"
        )


def run_fast(
    sweep: Sweep,
    grid: Sequence[CellSpec],
    first: Sequence[CellSpec],
    contexts: Mapping[str, float],
    extend: Extend,
) -> FastOutcome:
    """Measure what a fast plan takes of the grid, `first` its survey; `sweep` is made for any part of it.

    `contexts` are the tokens that a row of each suite has, on average.

    Everything is kept in the run directory, so an interrupted plan goes on where it was.
    """
    directory = sweep.directory
    extend(first)
    replace(sweep, plan=first).run()
    record = read_record(directory.path) or FastRecord(grid_cells=len(grid))
    record = record.model_copy(update={"probes": _probes(sweep, grid, contexts, record.probes)})
    _write(directory, record)
    surveyed = [r for r in directory.results() if r.key in {spec.key for spec in first}]
    predictions = predict(grid, surveyed, record.probes)
    chosen = choose(grid, predictions, {spec.key for spec in first})
    record = record.model_copy(
        update={
            "predictions": tuple(predictions.values()),
            "checks": tuple(spec.key for spec in chosen.checks),
        }
    )
    _write(directory, record)
    plan = (*first, *chosen.promising, *chosen.checks)
    extend(plan)
    replace(sweep, plan=plan).run()
    speedups = {r.key: figures(r).speedup for r in directory.results()}
    for spec in first:
        speedups.pop(spec.key, None)
    return FastOutcome(len(grid), len(plan), tuple(prediction_errors(predictions, speedups)))


def _probes(
    sweep: Sweep, grid: Sequence[CellSpec], contexts: Mapping[str, float], known: Sequence[Probe]
) -> tuple[Probe, ...]:
    """Time the rounds that are not timed yet. A place that fails is left out: its cells are not predicted."""
    probes = {(p.drafter, p.suite, p.batch, p.k): p for p in known}
    places, ks = probe_places(grid, contexts, sweep.infeasible), probed_ks(grid)
    for number, place in enumerate(places, 1):
        spec = place.spec
        done = any((place.drafter, spec.suite, spec.batch, k) in probes for k in ks)
        if done:
            continue
        what = place.drafter or f"verification, {', '.join(place.suites)}"
        sweep.listener.note(f"timing rounds [{number}/{len(places)}]: {what}, batch {spec.batch}")
        try:
            for probe in _probe(sweep, place, ks):
                probes[probe.drafter, probe.suite, probe.batch, probe.k] = probe
        except Exception as error:
            sweep.listener.note(f"no times for {what}, batch {spec.batch}: {error}")
            sweep.engine.release()
    return tuple(probes.values())


def _probe(sweep: Sweep, place: ProbePlace, ks: Sequence[int]) -> list[Probe]:
    begin = time.perf_counter()
    spec = place.spec
    requests = _typical(sweep.engine.render(spec, sweep.suites[spec.suite]).requests, spec.batch)
    timed = sweep.engine.time_rounds(spec, requests, ks, drafting=place.drafter is not None)
    share = (time.perf_counter() - begin) / max(1, len(timed))
    return [
        Probe(
            drafter=place.drafter,
            suite=spec.suite,
            suites=tuple(suite for suite in place.suites if suite != spec.suite),
            batch=spec.batch,
            cost_seconds=share,
            **t.model_dump(),
        )
        for t in timed
    ]


def _typical(requests: Sequence[Request], batch: int) -> list[Request]:
    """As many requests as the batch has rows, spread evenly over the lengths of the prompts."""
    ordered = sorted(requests, key=lambda r: len(r.token_ids))
    return [ordered[(2 * i + 1) * len(ordered) // (2 * batch)] for i in range(batch)]


def read_record(run: Path) -> FastRecord | None:
    """None where there is none, or one that cannot be understood: it can be made again."""
    try:
        return FastRecord.model_validate_json((run / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def _write(directory: RunDirectory, record: FastRecord) -> None:
    with directory.locked():
        write_atomically(directory.path / FILE, record.model_dump_json(indent=1) + "\n")
