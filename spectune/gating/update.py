"""Renewing a baseline: only by a run that passes, or where its changes were accepted explicitly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spectune.gating.baseline import Baseline, baseline_text
from spectune.gating.check import Outcome
from spectune.gating.exact import exact_values, number
from spectune.gating.selector import label
from spectune.reporting.store import write


def update(path: Path, old: Baseline, run: Baseline, outcome: Outcome, *, accept: bool) -> list[str]:
    """Write the run as the new baseline and say what changed, or say why it was not written."""
    if why := incomplete(run):
        return [f"{path} was not written: {why}"]
    if outcome.verdict != "PASS" and not accept:
        return [f"{path} was not written: {outcome.verdict}; --accept-changes writes it all the same"]
    # A baseline of exact figures stays one.
    if all(c.times is None for c in old.cells):
        run = run.model_copy(update={"cells": tuple(c.model_copy(update={"times": None}) for c in run.cells)})
    write(path, baseline_text(run))
    return [f"{path} was written", *(f"  {line}" for line in changes(old, run))]


def incomplete(run: Baseline) -> str | None:
    """Why a run is no baseline, however its checks came out: a gate would miss the cells that have no result."""
    if any(f.reason != "infeasible" for f in run.failures):
        return "a run with failed cells is no baseline; sweep again with --resume"
    if run.unfinished or not run.cells:
        return "a run with missing cells is no baseline; sweep to the end with --resume"
    return None


def changes(old: Baseline, new: Baseline) -> Iterator[str]:
    """One line per cell that came, went or has other counts."""
    before, after = ({c.place: c for c in side.cells} for side in (old, new))
    for place in dict.fromkeys([*before, *after]):
        if place not in after or place not in before:
            yield f"{label(place)}: {'added' if place in after else 'gone'}"
            continue
        was, is_ = exact_values(before[place]), exact_values(after[place])
        words = [f"{name} {_value(was[name])} -> {_value(is_[name])}" for name in was if was[name] != is_[name]]
        if words:
            yield f"{label(place)}: {', '.join(words)}"
        elif [r.output_digest for r in before[place].requests] != [r.output_digest for r in after[place].requests]:
            yield f"{label(place)}: other outputs"
        elif before[place].spec != after[place].spec:
            yield f"{label(place)}: other settings"


def _value(value: float | None) -> str:
    return "null" if value is None else number(value)
