"""The sweep: claim a cell, measure it, write it, until the plan is done."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spectune.engines.engine import Engine
from spectune.errors import SpectuneError, UsageError
from spectune.interrupts import Interrupts, interrupts
from spectune.measuring.bytes_model import TheoryCard
from spectune.suites.prompt import Suite
from spectune.sweeping.cell import CellResult, CellSpec, FailedCell, MemoryPlan
from spectune.sweeping.estimate import Estimate, TimeLeft
from spectune.sweeping.listener import Listener
from spectune.sweeping.measure import Gauge, measure_cell, timestamp
from spectune.sweeping.rundir import RunDirectory

FailureReason = Literal["oom", "error", "refused", "infeasible"]


class Interrupted(SpectuneError):
    """Ctrl-C or SIGTERM (exit code 130). Finished cells are on disk."""

    exit_code = 130


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """What a sweep left behind. `elsewhere` are keys that another process is still measuring.

    A dry run has a plan and an estimate, but no directory and no cells.
    """

    plan: tuple[CellSpec, ...]
    card: TheoryCard
    directory: Path | None = None
    results: tuple[CellResult, ...] = ()
    failures: tuple[FailedCell, ...] = ()
    elsewhere: tuple[str, ...] = ()
    estimate: Estimate | None = None
    memory: tuple[str, ...] = ()  # the memory plan in words
    fast: str | None = None  # what the fast plan came to, in words

    @property
    def exit_code(self) -> int:
        """4 where every cell failed, else 0."""
        return 4 if self.failures and not self.results else 0


@dataclass(slots=True)
class Sweep:
    """One process's work on a run directory. `notes` become warnings of every cell it measures."""

    plan: Sequence[CellSpec]
    suites: Mapping[str, Suite]
    engine: Engine
    directory: RunDirectory
    gauge: Gauge
    listener: Listener
    notes: Sequence[str] = ()
    memory: Mapping[str, MemoryPlan] = field(default_factory=dict)  # by key
    infeasible: Mapping[str, str] = field(default_factory=dict)  # key -> why the cell does not fit the device

    def run(self) -> None:
        """Measure every cell that is neither finished nor claimed by another process.

        Cells that failed before are tried again, once. A failing cell does not stop the sweep.
        Raises SpectuneError where the disk is full or the engine cannot go on, and KeyboardInterrupt
        (on SIGTERM too) as it comes.
        """
        known = {failed.key: failed.failed_at for failed in self.directory.failures()}
        left = TimeLeft(self.suites)
        self.listener.begin(self.directory.path, len(self.plan), len(self.plan) - len(self._open(known)))
        try:
            with interrupts() as stop:
                # Again and again: a cell that another process held may be free now, if that process died.
                while any(self._attempt(spec, known, left, stop) for spec in self._open(known)):
                    pass
        finally:
            self.listener.end()

    def outcome(self, card: TheoryCard) -> SweepOutcome:
        """What is on disk now for the cells of the plan."""
        keys = {spec.key for spec in self.plan}
        results = tuple(r for r in self.directory.results() if r.key in keys)
        failures = tuple(f for f in self.directory.failures() if f.key in keys)
        done = {r.key for r in results} | {f.key for f in failures}
        elsewhere = tuple(spec.key for spec in self.plan if spec.key not in done)
        return SweepOutcome(tuple(self.plan), card, self.directory.path, results, failures, elsewhere)

    def _open(self, known: Mapping[str, str]) -> list[CellSpec]:
        return [spec for spec in self.plan if self._is_open(spec.key, known)]

    def _is_open(self, key: str, known: Mapping[str, str]) -> bool:
        if self.directory.is_finished(key):
            return False
        failed = self.directory.failure(key)
        # A newer failure is one that this sweep, or another process beside it, has just met.
        return failed is None or failed.failed_at == known.get(key)

    def _attempt(self, spec: CellSpec, known: Mapping[str, str], left: TimeLeft, stop: Interrupts) -> bool:
        """Whether the cell was ours and is done now, well or badly."""
        stop.check()
        with self.directory.claim(spec.key) as ours:
            if not ours or not self._is_open(spec.key, known):
                return False
            self.listener.start(spec)
            begin = time.perf_counter()
            cell = self._measure(spec, stop)
            if isinstance(cell, CellResult):
                self.directory.write_result(cell)
                left.record(spec, time.perf_counter() - begin)
                self.listener.finished(cell, left.seconds(self._open(known)))
            else:
                self.directory.write_failure(cell)
                self.listener.failed(cell, left.seconds(self._open(known)))
        return True

    def _measure(self, spec: CellSpec, stop: Interrupts) -> CellResult | FailedCell:
        if spec.key in self.infeasible:
            return self._failure(spec, "infeasible", self.infeasible[spec.key])
        try:
            requests = self.engine.render(spec, self.suites[spec.suite])
            return measure_cell(
                self.engine,
                spec,
                requests,
                gauge=self.gauge,
                notes=self.notes,
                on_tokens=self.listener.tokens,
                memory=self.memory.get(spec.key),
            )
        except Exception as error:
            stop.check()  # the error may be what an interruption has become
            failed = self._failure(spec, failure_reason(error), failure_message(error))
        # Only now: the exception's traceback has kept the cell's tensors alive.
        self.release()
        return failed

    @staticmethod
    def _failure(spec: CellSpec, reason: FailureReason, message: str) -> FailedCell:
        return FailedCell(key=spec.key, spec=spec, failed_at=timestamp(), reason=reason, message=message)

    def release(self) -> None:
        """Free what a failure has left on the device. Raises SpectuneError where the engine cannot go on."""
        gc.collect()
        try:
            self.engine.release()
        except Exception as error:
            raise SpectuneError(f"the engine cannot go on: {failure_message(error)}") from error


def failure_reason(error: BaseException) -> FailureReason:
    """What kind of failure an exception is. Goes by names and texts, so that torch need not be imported."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    if names & {"OutOfMemoryError", "MemoryError"} or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)
    ):
        return "oom"
    return "refused" if isinstance(error, UsageError) else "error"


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")


def failure_message(error: BaseException) -> str:
    """One line: the exception, and for an unexpected one the line of code that raised it."""
    if isinstance(error, SpectuneError):
        return str(error)
    first = next(iter(str(error).strip().splitlines()), "")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
    return f"{type(error).__name__}{place}{': ' if first else ''}{first}"
