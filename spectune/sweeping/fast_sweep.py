"""Carrying out a fast plan: survey, probes, predictions, the chosen cells (see `fast_plan`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spectune.engines.engine import Request
from spectune.interrupts import interrupts
from spectune.sweeping.cell import CellResult, CellSpec
from spectune.sweeping.fast_plan import (
    Prediction,
    ProbePlace,
    choose,
    predict,
    prediction_errors,
    probe_places,
    probed_ks,
    second_look,
    survey,
)
from spectune.sweeping.fast_record import FastRecord, read_record, write_record
from spectune.sweeping.figures import figures
from spectune.sweeping.round_costs import Probe
from spectune.sweeping.rundir import RunDirectory
from spectune.sweeping.sweep import Sweep, failure_message

_LOOKS = 2  # of one call, once the plan is measured, each for more cells
_POLL_SECONDS = 1.0  # between looks at cells that another process is measuring

Extend = Callable[[Sequence[CellSpec]], None]  # make cells part of the run's plan


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
    prompts: int,
    contexts: Mapping[str, float],
    extend: Extend,
) -> FastOutcome:
    """Measure what a fast plan takes of the grid; `sweep` is made for any part of it.

    `prompts` are those of the smallest suite, `contexts` the tokens that a row of each suite has, on average.

    Everything is kept in the run directory, so an interrupted plan goes on where it was, and several processes agree
    on what to measure: one of them times the rounds, once the survey of all of them is complete.
    """
    directory = sweep.directory
    usable = [spec for spec in grid if spec.key not in sweep.infeasible]
    if len(usable) < len(grid):
        sweep.listener.note(f"{len(grid) - len(usable)} of {len(grid)} cells do not fit the device and are left out")
    record = read_record(directory.path) or FastRecord(grid_cells=len(grid))
    _write(directory, record.model_copy(update={"grid_cells": len(grid), "complete": False}))
    first = _survey(sweep, grid, prompts, extend)
    with directory.locked("fast"):
        record = read_record(directory.path) or FastRecord(grid_cells=len(grid))
        record = _probed(sweep, grid, contexts, record)
        surveyed = [r for r in directory.results() if r.key in {spec.key for spec in first} and not _is_wrong(r)]
        predictions = predict(usable, surveyed, record.probes)
        chosen = choose(usable, predictions, {spec.key for spec in first})
        record = record.model_copy(
            update={
                "predictions": tuple(predictions.values()),
                "checks": tuple(spec.key for spec in chosen.checks),
                "complete": True,
            }
        )
        extend((*first, *chosen.promising, *chosen.checks, *_places_that_do_not_fit(grid, usable)))
        _write(directory, record)
        # What an earlier plan of this run has chosen and not measured is wanted, too.
        wanted = {spec.key for spec in directory.info().plan}
    plan = [spec for spec in grid if spec.key in wanted]
    failed = {f.key for f in directory.failures()} & {spec.key for spec in first}  # tried just now
    replace(sweep, plan=[spec for spec in plan if spec.key not in failed]).run()
    plan = _look_again(sweep, usable, plan, predictions, extend)
    speedups = {r.key: figures(r).speedup for r in directory.results()}
    measured = sum(spec.key in speedups for spec in plan)
    for spec in first:
        speedups.pop(spec.key, None)
    return FastOutcome(len(grid), measured, tuple(prediction_errors(predictions, speedups)))


def _look_again(
    sweep: Sweep,
    grid: Sequence[CellSpec],
    plan: Sequence[CellSpec],
    predictions: Mapping[str, Prediction],
    extend: Extend,
) -> list[CellSpec]:
    """Measure what promises most after the plan was measured; the plan with these cells, in the grid's order.

    Another process that fills the same run may have added cells: they are waited for and looked at, too.
    """

    def planned() -> list[CellSpec]:
        there = {spec.key for spec in (*plan, *sweep.directory.info().plan)}
        return [spec for spec in grid if spec.key in there]

    for _ in range(_LOOKS):
        _wait(sweep, planned())
        results = sweep.directory.results()
        unfit = {f.key for f in sweep.directory.failures()} | {r.key for r in results if _is_wrong(r)}
        measured = {r.key: s for r in results if (s := figures(r).speedup) is not None}
        more = second_look([spec for spec in grid if spec.key not in unfit], predictions, measured)
        if not more:
            break
        extend(more)
        sweep.listener.note(f"{len(more)} more cells promise most, now that those before are measured")
        replace(sweep, plan=more).run()
    return planned()


def _survey(sweep: Sweep, grid: Sequence[CellSpec], prompts: int, extend: Extend) -> tuple[CellSpec, ...]:
    """Measure the survey. Where a cell runs out of memory, a smaller one of its drafter and suite stands in."""
    unfit = set(sweep.infeasible)
    first: dict[str, CellSpec] = {}
    while new := [spec for spec in survey(grid, prompts, unfit) if spec.key not in first]:
        first |= {spec.key: spec for spec in new}
        extend(tuple(first.values()))
        replace(sweep, plan=new).run()
        _wait(sweep, new)
        for spec in new:
            failed = None if sweep.directory.is_finished(spec.key) else sweep.directory.failure(spec.key)
            if failed is not None and failed.reason == "oom":
                unfit |= {s.key for s in grid if _is_no_smaller(s, spec)}
    return tuple(first.values())


def _is_no_smaller(one: CellSpec, other: CellSpec) -> bool:
    same = (one.drafter, one.suite) == (other.drafter, other.suite)
    return same and one.batch >= other.batch and one.k >= other.k


def _places_that_do_not_fit(grid: Sequence[CellSpec], usable: Sequence[CellSpec]) -> list[CellSpec]:
    """A cell of each drafter, suite and batch none of which fits: its failure says what would."""

    def place(spec: CellSpec) -> tuple[str, str, int]:
        return spec.drafter, spec.suite, spec.batch

    fitting = {place(spec) for spec in usable}
    return list({place(spec): spec for spec in reversed(grid) if place(spec) not in fitting}.values())


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
        own = [p for p in record.probes if (p.drafter, p.batch) == (place.drafter, place.spec.batch)]
        own = [p for p in own if p.suite in place.suites]
        if _tell(own, ks):
            timed = {p.suite for p in own}
            found = [p.model_copy(update={"suites": _stands_for(place, timed, p.suites)}) for p in own]
        else:  # rounds of some K count beside the K = 0 of the same turns only: no old one can stay
            found = _try_probe(sweep, place, ks, f"[{number}/{len(places)}]") or own
        if found != own:
            others = [p for p in record.probes if p not in own]
            record = record.model_copy(update={"probes": (*others, *found)})
            _write(sweep.directory, record)
    return record


def _tell(own: Sequence[Probe], ks: Sequence[int]) -> bool:
    """Whether a place's probes tell what rounds of these K cost: up to the largest, or as far as there was room."""
    if not any(p.k == 0 for p in own):
        return False
    room = max(p.k for p in own)
    return max(room, *(p.asked for p in own)) >= max(ks) and len(own) >= sum(k <= room for k in ks)


def _stands_for(place: ProbePlace, timed: Collection[str], known: Sequence[str] = ()) -> tuple[str, ...]:
    """The suites whose verification the rounds on the suites `timed` tell beside these."""
    if place.drafter is not None:
        return ()
    return tuple(suite for suite in dict.fromkeys((*known, *place.suites)) if suite not in timed)


def _try_probe(sweep: Sweep, place: ProbePlace, ks: Sequence[int], number: str) -> list[Probe]:
    """On the place's first suite that lets itself be timed."""
    for spec in place.specs:
        what = f"{place.drafter or 'verification'}, {spec.suite}, batch {spec.batch}"
        sweep.listener.note(f"timing rounds {number}: {what}")
        try:
            with interrupts():
                return _probe(sweep, place, spec, ks)
        except Exception as error:
            sweep.listener.note(f"no times for {what}: {failure_message(error)}")
        # Only now: the exception's traceback has kept the rounds' tensors alive.
        sweep.release()
    return []


def _probe(sweep: Sweep, place: ProbePlace, spec: CellSpec, ks: Sequence[int]) -> list[Probe]:
    begin = time.perf_counter()
    requests = _typical(sweep.engine.render(spec, sweep.suites[spec.suite]).requests, spec.batch)
    timed = sweep.engine.time_rounds(spec, requests, ks, drafting=place.drafter is not None)
    share = (time.perf_counter() - begin) / max(1, len(timed))
    return [
        Probe(
            drafter=place.drafter,
            suite=spec.suite,
            suites=_stands_for(place, {spec.suite}),
            batch=spec.batch,
            cost_seconds=share,
            asked=max(ks),
            **t.model_dump(),
        )
        for t in timed
    ]


def _typical(requests: Sequence[Request], batch: int) -> list[Request]:
    """As many requests as the batch has rows, spread evenly over the lengths of the prompts."""
    ordered = sorted(requests, key=lambda r: len(r.token_ids))
    return [ordered[(2 * i + 1) * len(ordered) // (2 * batch)] for i in range(batch)]


def _write(directory: RunDirectory, record: FastRecord) -> None:
    with directory.locked():
        write_record(directory.path, record)
