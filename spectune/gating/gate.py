"""The gate: every check of a run, from its baseline and from requirements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spectune.errors import UsageError
from spectune.gating import exact, required, timed
from spectune.gating.baseline import Baseline, Cell
from spectune.gating.check import Check, Outcome
from spectune.gating.policy import Policy
from spectune.gating.selector import label, place_of, require_match
from spectune.sweeping.cell import CellSpec

# What exact and timed comparisons alike need to be equal. The device is part of the hardware.
SETTINGS = (
    "target_digest",
    "drafter_digest",
    "suite_digest",
    "dtype",
    "sampling",
    "seed",
    "max_new_tokens",
    "ignore_eos",
    "chat_template",
    "engine",
    "synthetic",
)


def gate(run: Baseline, baseline: Baseline | None, policy: Policy) -> Outcome:
    """Raises UsageError where there is nothing to hold the run against, or where a selector matches no cell."""
    if baseline is None and not policy.requirements:
        raise UsageError("there is nothing to hold the run against", "give --baseline FILE or --require CHECK")
    everywhere = [place_of(s) for s in _specs(run)] + ([] if baseline is None else [c.place for c in baseline.cells])
    for threshold in policy.thresholds:
        require_match(
            threshold.selector, everywhere, f"threshold for {threshold.metric.name if threshold.metric else 'all'}"
        )
    checks = [*_run_checks(run, baseline)]
    if policy.only != "timed":
        for cell in run.cells:
            checks += exact.absolute_checks(cell, policy)
    notes: list[str] = []
    if baseline is not None:
        checks += _compare(run, baseline, policy)
        notes += _notes(run, baseline)
    for requirement, level in policy.requirements:
        checks += required.judge(requirement, level, run)
    lengths = {c.place: v for c in run.cells if (v := exact.exact_values(c)["acceptance_length"]) is not None}
    return Outcome(run.run, None if baseline is None else baseline.run, tuple(checks), tuple(notes), lengths)


def _run_checks(run: Baseline, baseline: Baseline | None) -> Iterator[Check]:
    """Cells without a result. One that was predicted not to fit matters only where the baseline has it."""
    wanted = set() if baseline is None else {c.place for c in baseline.cells}
    for f in run.failures:
        place = place_of(f.spec)
        if f.reason != "infeasible" or place in wanted:
            text = f"the cell failed: {f.reason}: {f.message}; sweep again with --resume"
            yield Check("finished", "exact", place, "RUN FAILED", text)
    for spec in run.unfinished:
        yield Check("finished", "exact", place_of(spec), "CANNOT JUDGE", "the cell was not run; sweep with --resume")
    if not run.cells and not run.failures and not run.unfinished:
        yield Check("finished", "exact", None, "CANNOT JUDGE", "the run has no cell; sweep first")


def _compare(run: Baseline, baseline: Baseline, policy: Policy) -> Iterator[Check]:
    now = {c.place: c for c in run.cells}
    known = {place_of(s) for s in _specs(run)}
    pairs = [(c, now[c.place]) for c in baseline.cells if c.place in now]
    if not pairs and any(c.place in known for c in baseline.cells):
        return  # they are in the run's plan: each is named as failed or not run
    if not pairs:
        text = f"no cell of the baseline ({_first(baseline)}) is in the run ({_first(run)}); sweep the same plan"
        yield Check("overlap", "exact", None, "CANNOT JUDGE", text)
        return
    for cell in baseline.cells:
        if cell.place not in known:
            text = "the cell is in the baseline and not in the run; sweep it, or write a new baseline"
            yield Check("finished", "exact", cell.place, "CANNOT JUDGE", text)
    same = []
    for base, cell in pairs:
        if (differing := _differ(base, cell)) is not None:
            text = f"{differing}; sweep with the baseline's settings, or write a new baseline"
            yield Check("settings", "exact", cell.place, "CANNOT JUDGE", text)
        else:
            same.append((base, cell))
    machine = hardware_differs(baseline.hardware, run.hardware)
    if policy.only != "timed":
        for base, cell in same:
            yield from exact.comparisons(base, cell, policy, other_hardware=machine)
    if policy.only != "exact":
        for m in timed.COMPARED:
            yield from timed.comparisons(m, same, policy, machine=machine)


def hardware_differs(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """The first facts that differ, in words; None for the same hardware."""
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    return "; ".join(f"{key} {_fact(before.get(key))} -> {_fact(now.get(key))}" for key in keys[:2]) or None


def _differ(before: Cell, now: Cell) -> str | None:
    """What makes the two incomparable, in words."""
    pairs = {name: (getattr(before.spec, name), getattr(now.spec, name)) for name in SETTINGS}
    names = [name for name, (was, is_) in pairs.items() if was != is_]
    if names:
        return "; ".join(f"{name} {_fact(pairs[name][0])} -> {_fact(pairs[name][1])}" for name in names[:2])
    if [r.id for r in before.requests] != [r.id for r in now.requests]:
        # A sweep to a precision takes as many prompts as it needs.
        return f"{len(before.requests)} -> {len(now.requests)} requests, not the same ones"
    return None


def _notes(run: Baseline, baseline: Baseline) -> Iterator[str]:
    own = {c.place for c in baseline.cells}
    if extra := [c.place for c in run.cells if c.place not in own]:
        yield f"{len(extra)} cells are not in the baseline and were not compared, the first: {label(extra[0])}"
    keys = [k for k in run.software if run.software[k] != baseline.software.get(k)]
    if keys:
        yield "software differs: " + ", ".join(
            f"{k} {_fact(baseline.software.get(k))} -> {_fact(run.software[k])}" for k in keys
        )


def _specs(run: Baseline) -> list[CellSpec]:
    return [*(c.spec for c in run.cells), *(f.spec for f in run.failures), *run.unfinished]


def _first(side: Baseline) -> str:
    specs = _specs(side)
    return f"{len(specs)} cells, the first {label(place_of(specs[0]))}" if specs else "no cell"


def _fact(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
