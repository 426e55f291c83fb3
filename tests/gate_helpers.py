"""Pairs of runs for the gate: the same cells, with times, counts or outputs changed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synthetic_run import cell, rounds_of

from spectune.gating.baseline import Baseline
from spectune.gating.check import Check, Outcome
from spectune.gating.gate import gate
from spectune.gating.policy import Policy, make_policy
from spectune.gating.snapshot import snapshot
from spectune.speedup.run import load_run
from spectune.sweeping.cell import CellResult

REPEATS = 5


def spread(width: float) -> Callable[[int], float]:
    """Five repeats, evenly over plus and minus `width`."""
    return lambda repeat: width * (repeat % 5 - 2) / 2


def timed_cell(speedup: float, width: float = 0.02, **changes: Any) -> CellResult:
    return cell(speedup=speedup, drift=spread(width), repeats=REPEATS, **changes)


def with_requests(original: CellResult, change: Callable[[Any], Any], mode: str = "speculative") -> CellResult:
    """Every request of the passes of one mode replaced."""
    passes = [
        p.model_copy(update={"requests": tuple(change(r) for r in p.requests)}) if p.mode == mode else p
        for p in original.passes
    ]
    return original.model_copy(update={"passes": tuple(passes)})


def slower(original: CellResult, mode: str, factor: float) -> CellResult:
    def change(request):
        keys = ("decode_seconds", "full_seconds")
        return request.model_copy(update={k: getattr(request, k) * factor for k in keys})

    return with_requests(original, change, mode)


def accepting(*rounds: tuple[int, int], **changes: Any) -> CellResult:
    """A cell whose requests had these (drafted, accepted) rounds."""
    return cell(rounds=rounds_of(*rounds), **changes)


def side(folder, *cells: CellResult, failures=(), **changes: Any) -> Baseline:
    from synthetic_run import write_run

    return snapshot(load_run(write_run(folder, cells, failures, **changes), allow_empty=True))


def judged(tmp_path, before, after, policy: Policy | None = None, **changes: Any) -> Outcome:
    """The gate of two lists of cells."""
    base = side(tmp_path / "before", *before)
    return gate(side(tmp_path / "after", *after, **changes), base, policy or make_policy((), (), None, None))


def check(outcome: Outcome, what: str) -> Check:
    (found,) = [c for c in outcome.checks if c.what == what]
    return found
