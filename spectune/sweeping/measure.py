"""Measuring one cell: warm-up at its own shapes, then plain and speculative passes in pairs, A B B A.

Where the engine can, the two passes of a pair take turns round by round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Protocol

from spectune.engines.engine import (
    Engine,
    Interleaves,
    KeepsRecordings,
    KeepsText,
    Mode,
    Request,
    Requests,
    SeesDistributions,
)
from spectune.errors import SpectuneError, UsageError
from spectune.measuring.device_memory import watch_peak
from spectune.sweeping.cell import Bandwidth, CellResult, CellSpec, Memory, MemoryPlan, OutputCheck, PassResult
from spectune.sweeping.sample import Sample
from spectune.sweeping.warning import cell_warnings


class Gauge(Protocol):
    """Reads the device while passes run, and compares them with its bandwidth."""

    def watch(self) -> AbstractContextManager[None]: ...

    def assess(self, spec: CellSpec, passes: Sequence[PassResult]) -> tuple[Bandwidth, tuple[str, ...]]:
        """The bandwidth figures of what was watched last, and warnings about them."""


def measure_cell(
    engine: Engine,
    spec: CellSpec,
    requests: Requests,
    *,
    gauge: Gauge,
    notes: Sequence[str] = (),
    on_tokens: Callable[[int], None] | None = None,
    memory: MemoryPlan | None = None,
) -> CellResult:
    """All passes of a cell. `notes` become warnings of the cell, `memory` is kept beside what was measured.

    Raises UsageError where no request is left, SpectuneError where an engine's counts contradict each other.
    """
    if not requests.requests:
        raise UsageError(f"no prompt of {spec.suite} can be used", "; ".join(requests.notes) or None)
    started_at = timestamp()
    begin = time.perf_counter()
    engine.warm_up(spec, requests.requests)
    warmup_seconds = time.perf_counter() - begin
    passes: list[PassResult] = []
    sample = Sample(spec, requests.requests)
    with gauge.watch(), watch_peak(spec.device) as peak:
        while some := sample.next(passes):
            for repeat, modes in pass_order(spec, first=len(passes) // 2):
                for done in _pair(engine, spec, some, modes, repeat, len(passes), on_tokens):
                    check_counts(spec, some, done)
                    passes.append(done)
    unrecorded: Sequence[str] = ()
    if isinstance(engine, KeepsRecordings):
        unrecorded = engine.unrecorded()
        if memory is not None:
            memory = memory.model_copy(update={"graph_bytes": engine.recorded_bytes()})
    bandwidth, doubts = gauge.assess(spec, passes)
    check = output_check(engine, spec, sample.taken, passes)
    left_out = (f"prompts-left-out: {'; '.join(requests.notes)}",) if requests.notes else ()
    return CellResult(
        key=spec.key,
        spec=spec,
        started_at=started_at,
        finished_at=timestamp(),
        warmup_seconds=warmup_seconds,
        passes=tuple(passes),
        bandwidth=bandwidth,
        output_check=check,
        overlap=engine.overlap(spec, sample.taken) if isinstance(engine, SeesDistributions) else (),
        excerpt=engine.excerpt(sample.taken) if isinstance(engine, KeepsText) else None,
        memory=None
        if memory is None
        else Memory(plan=memory, predicted_bytes=memory.total_bytes, measured_bytes=peak.reading),
        warnings=(
            *notes,
            *left_out,
            *sample.shortfall(passes),
            *cell_warnings(spec, passes, check),
            *(f"bandwidth: {doubt}" for doubt in doubts),
            *(f"not-recorded: {why}; rounds were called step by step" for why in unrecorded),
        ),
    )


def _pair(
    engine: Engine,
    spec: CellSpec,
    requests: Sequence[Request],
    modes: tuple[Mode, Mode],
    repeat: int,
    order: int,
    on_tokens: Callable[[int], None] | None,
) -> Iterator[PassResult]:
    """Both passes of a repeat."""
    if isinstance(engine, Interleaves) and engine.interleaves(spec):
        yield from engine.run_pair(spec, requests, modes=modes, repeat=repeat, order=order, on_tokens=on_tokens)
        return
    for number, mode in enumerate(modes, order):
        yield engine.run_pass(spec, requests, mode=mode, repeat=repeat, order=number, on_tokens=on_tokens)


def pass_order(spec: CellSpec, *, first: int = 0) -> list[tuple[int, tuple[Mode, Mode]]]:
    """(repeat, modes) of the pairs over some prompts; `first` is the number of repeats before them.

    Pairs alternate; which mode begins depends on the key, so that over many cells drift favours neither.
    """
    modes: tuple[Mode, Mode] = ("plain", "speculative")
    if int(spec.key, 16) % 2:
        modes = ("speculative", "plain")
    return [(r, modes if r % 2 == 0 else (modes[1], modes[0])) for r in range(first, first + spec.repeats)]


def output_check(
    engine: Engine, spec: CellSpec, requests: Sequence[Request], passes: Sequence[PassResult]
) -> OutputCheck | None:
    """Compare every request's output over all passes. None where the rule does not promise equal tokens."""
    if spec.rule not in ("greedy", "match") or spec.synthetic is not None:
        return None
    digests: dict[str, list[str]] = {request.id: [] for request in requests}
    for done in passes:
        for result in done.requests:
            if result.output_digest not in digests[result.id]:
                digests[result.id].append(result.output_digest)
    differences = tuple(
        engine.difference(spec, request, (digests[request.id][0], other))
        for request in requests
        for other in digests[request.id][1:]
    )
    if not differences:
        return OutputCheck(verdict="identical")
    ties = all(difference.is_tie for difference in differences)
    return OutputCheck(verdict="numeric ties" if ties else "different", differences=differences)


def check_counts(spec: CellSpec, requests: Sequence[Request], done: PassResult) -> None:
    """Raises SpectuneError unless tokens, rounds and accepted tokens fit together for every request."""
    limits = {request.id: request.max_new_tokens for request in requests}
    ids = [result.id for result in done.requests]
    if sorted(ids) != sorted(limits):
        raise SpectuneError(f"miscounted: {len(limits)} requests went in, {len(ids)} results came out")
    largest = spec.k if done.mode == "speculative" else 0
    for result in done.requests:
        rounds = sum(c.count for c in result.rounds)
        accepted = sum(c.accepted * c.count for c in result.rounds)
        emitted = result.output_tokens - 1
        # Every round emits its accepted tokens and at most one more; a stop token or a limit cuts that one.
        if not max(accepted, rounds) <= emitted <= accepted + rounds:
            raise SpectuneError(
                f"miscounted: {result.id} ({done.mode}) has {result.output_tokens} tokens "
                f"after {rounds} rounds with {accepted} accepted"
            )
        if any(c.drafted > largest for c in result.rounds):
            raise SpectuneError(f"miscounted: {result.id} ({done.mode}) drafted more than {largest} in a round")
        if result.output_tokens > limits[result.id]:
            raise SpectuneError(
                f"miscounted: {result.id} has {result.output_tokens} tokens, its limit is {limits[result.id]}"
            )


def timestamp() -> str:
    """Now, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
