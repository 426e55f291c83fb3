"""Carrying out a fast plan: survey, probes, predictions, the chosen cells (see `fast_plan`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from spectune.engines.engine import Engine, Requests
from spectune.sweeping.atomic import write_atomically
from spectune.sweeping.cell import CellSpec, Record
from spectune.sweeping.fast_plan import (
    Prediction,
    Probe,
    choose,
    predict,
    prediction_errors,
    probe_places,
)
from spectune.sweeping.figures import figures
from spectune.sweeping.listener import Listener
from spectune.sweeping.rundir import RunDirectory
from spectune.sweeping.sweep import Sweep

FILE = "fast.json"
PROBE_TOKENS = 24  # per row of a probe's pass

Extend = Callable[[Sequence[CellSpec]], None]  # make cells part of the run's plan


class FastRecord(Record):
    """fast.json: what the plan knew, and what it made of it."""

    schema_version: Literal[1] = 1
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


def run_fast(sweep: Sweep, grid: Sequence[CellSpec], first: Sequence[CellSpec], extend: Extend) -> FastOutcome:
    """Measure what a fast plan takes of the grid, `first` its survey; `sweep` is made for any part of it.

    Everything is kept in the run directory, so an interrupted plan goes on where it was.
    """
    directory = sweep.directory
    extend(first)
    replace(sweep, plan=first).run()
    record = read_record(directory.path) or FastRecord(grid_cells=len(grid))
    record = record.model_copy(update={"probes": _probes(sweep, grid, record.probes)})
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


def _probes(sweep: Sweep, grid: Sequence[CellSpec], known: Sequence[Probe]) -> tuple[Probe, ...]:
    """Time the rounds that are not timed yet. A probe that fails is left out: its cells are not predicted."""
    probes = {(p.drafter, p.batch, p.k): p for p in known}
    places = probe_places(grid)
    for number, spec in enumerate(places, 1):
        wanted = [(spec.drafter, spec.batch, spec.k), (None, spec.batch, 0)]
        missing = [place for place in wanted if place not in probes]
        if not missing or spec.key in sweep.infeasible:
            continue
        sweep.listener.note(f"timing rounds [{number}/{len(places)}]: {spec.drafter}, K {spec.k}, batch {spec.batch}")
        try:
            requests = sweep.engine.render(spec, sweep.suites[spec.suite])
            for place in missing:
                if (probe := _probe(sweep.engine, spec, requests, plain=place[0] is None)) is not None:
                    probes[place] = probe
        except Exception as error:
            _say(sweep.listener, spec, error)
            sweep.engine.release()
    return tuple(probes.values())


def _probe(engine: Engine, spec: CellSpec, requests: Requests, *, plain: bool) -> Probe | None:
    """Medians need no warm-up: what the first round of a shape costs beyond the others does not move them."""
    begin = time.perf_counter()
    few = [replace(r, max_new_tokens=min(r.max_new_tokens, PROBE_TOKENS)) for r in requests.requests[: spec.batch]]
    done = engine.run_pass(spec, few, mode="plain" if plain else "speculative", repeat=0, order=0)
    times = done.times
    parts = (times.draft_median, times.verify_median, times.overhead_median)
    if not times.rounds or any(part is None for part in parts):
        return None
    seconds = sum(part for part in parts if part is not None)
    name, k = (None, 0) if plain else (spec.drafter, spec.k)
    return Probe(
        drafter=name,
        batch=spec.batch,
        k=k,
        round_seconds=seconds,
        rounds=times.rounds,
        cost_seconds=time.perf_counter() - begin,
    )


def _say(listener: Listener, spec: CellSpec, error: Exception) -> None:
    listener.note(f"no times for {spec.drafter}, K {spec.k}, batch {spec.batch}: {error}")


def read_record(run: Path) -> FastRecord | None:
    """None where there is none, or one that cannot be understood: it can be made again."""
    try:
        return FastRecord.model_validate_json((run / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def _write(directory: RunDirectory, record: FastRecord) -> None:
    with directory.locked():
        write_atomically(directory.path / FILE, record.model_dump_json(indent=1) + "\n")
