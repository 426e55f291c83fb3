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
from spectune.sweeping.cell import CellResult, CellSpec, Record
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
from spectune.sweeping.sweep import Sweep, failure_message, sigterm_as_interrupt

FILE = "fast.json"
_POLL_SECONDS = 1.0  # between looks at cells that another process is measuring

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

    Everything is kept in the run directory, so an interrupted plan goes on where it was, and several processes agree
    on what to measure: one of them times the rounds, once the survey of all of them is complete.
    """
    directory, listener = sweep.directory, sweep.listener
    usable = [spec for spec in grid if spec.key not in sweep.infeasible]
    if len(usable) < len(grid):
        listener.note(f"{len(grid) - len(usable)} of {len(grid)} cells do not fit the device and are left out")
    extend(first)
    replace(sweep, plan=first).run()
    with sigterm_as_interrupt(), directory.locked("fast"):
        _wait(sweep, first)
        record = read_record(directory.path) or FastRecord(grid_cells=len(grid))
        record = _probed(sweep, grid, contexts, record.model_copy(update={"grid_cells": len(grid)}))
        surveyed = [r for r in directory.results() if r.key in {spec.key for spec in first} and not _is_wrong(r)]
        predictions = predict(usable, surveyed, record.probes)
        chosen = choose(usable, predictions, {spec.key for spec in first})
        record = record.model_copy(
            update={
                "predictions": tuple(predictions.values()),
                "checks": tuple(spec.key for spec in chosen.checks),
            }
        )
        _write(directory, record)
        plan = (*first, *chosen.promising, *chosen.checks)
        extend(plan)
    failed = {f.key for f in directory.failures()} & {spec.key for spec in first}  # tried just now
    replace(sweep, plan=[spec for spec in plan if spec.key not in failed]).run()
    speedups = {r.key: figures(r).speedup for r in directory.results()}
    measured = sum(spec.key in speedups for spec in plan)
    for spec in first:
        speedups.pop(spec.key, None)
    return FastOutcome(len(grid), measured, tuple(prediction_errors(predictions, speedups)))


def _is_wrong(cell: CellResult) -> bool:
    return cell.output_check is not None and cell.output_check.verdict == "different"


def _wait(sweep: Sweep, plan: Sequence[CellSpec]) -> None:
    """Until no cell of the plan is in another process's hands; one whose process died is measured here."""
    directory = sweep.directory

    def is_free(key: str) -> bool:
        with directory.claim(key) as ours:
            return ours

    while held := [s for s in plan if not directory.is_finished(s.key) and directory.failure(s.key) is None]:
        time.sleep(_POLL_SECONDS)
        if any(is_free(spec.key) for spec in held):
            replace(sweep, plan=held).run()


def _probed(sweep: Sweep, grid: Sequence[CellSpec], contexts: Mapping[str, float], record: FastRecord) -> FastRecord:
    """Time the rounds that are not timed yet, and keep each place's as soon as they are known.

    A place that fails is left out: its cells are not predicted.
    """
    places, ks = probe_places(grid, contexts, sweep.infeasible), probed_ks(grid)
    for number, place in enumerate(places, 1):
        spec = place.spec
        what = place.drafter or f"verification, {', '.join(place.suites)}"
        own = [p for p in record.probes if (p.drafter, p.suite, p.batch) == (place.drafter, spec.suite, spec.batch)]
        if own and max(p.k for p in own) >= max(ks):
            found = [p.model_copy(update={"suites": _stands_for(place, p.suites)}) for p in own]
        else:  # rounds of some K count beside the K = 0 of the same turns only: no old one can stay
            sweep.listener.note(f"timing rounds [{number}/{len(places)}]: {what}, batch {spec.batch}")
            found = _try_probe(sweep, place, ks, what)
        if found != own:
            others = [p for p in record.probes if p not in own]
            record = record.model_copy(update={"probes": (*others, *found)})
            _write(sweep.directory, record)
    return record


def _stands_for(place: ProbePlace, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The suites whose verification a place's rounds tell beside its own."""
    return tuple(suite for suite in dict.fromkeys((*known, *place.suites)) if suite != place.spec.suite)


def _try_probe(sweep: Sweep, place: ProbePlace, ks: Sequence[int], what: str) -> list[Probe]:
    try:
        return _probe(sweep, place, ks)
    except Exception as error:
        sweep.listener.note(f"no times for {what}, batch {place.spec.batch}: {failure_message(error)}")
    # Only now: the exception's traceback has kept the rounds' tensors alive.
    sweep.release()
    return []


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
            suites=_stands_for(place),
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
