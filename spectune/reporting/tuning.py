"""Objective, Pareto set, schedule, regret and advice: their part of the JSON document, and their tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spectune.recommending.objective import Answer, Candidate
from spectune.recommending.schedule import Schedule
from spectune.recommending.tuning import Tuning
from spectune.reporting import format as form
from spectune.reporting.grid import cell, grid
from spectune.speedup.crossing import Crossing

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 6  # candidates of a ranking on the terminal


def tuning_document(tuning: Tuning, *, asked: bool) -> dict[str, Any]:
    """For `recommend --json`. `objective` is null unless one was asked for."""
    return {
        "mix": tuning.shares,
        "objective": [_answer(a) for a in tuning.answers] if asked else None,
        "pareto": [{"workload": a.workload, "set": [_candidate(c) for c in a.pareto]} for a in tuning.answers],
        "schedules": [_schedule(s) for s in tuning.schedules],
        "best_schedule": _schedule(tuning.best_schedule) if tuning.best_schedule else None,
        "context_crossover": [
            {"batch": c.batch, "k": c.k, "found": _crossing(c.found, "context"), "reason": c.reason}
            for c in tuning.contexts
        ],
        "regret": [asdict(r) | {"by_batch": {str(b): s for b, s in r.by_batch.items()}} for r in tuning.regrets],
        "advice": [asdict(f) for f in tuning.advice],
    }


def answer_line(answer: Answer) -> str:
    """The answer to an objective in a few words."""
    if answer.choice is None:
        return f"no answer: {answer.reason}"
    verdict = "CAN'T TELL" if answer.gain is None else answer.gain.verdict
    if answer.choice.config is None:
        return f"OFF: decode without speculation at batch {answer.choice.batch}  [{verdict}]"
    return f"{answer.choice}  [{verdict}]"


def objective_lines(tuning: Tuning) -> Iterator[str]:
    """One line per workload."""
    first = tuning.answers[0]
    yield f"objective {first.objective}" + (f": {first.slo}" if first.slo else "")
    for a in tuning.answers:
        yield f"  {a.workload}: {answer_line(a)}{_gain(a)}"


def _gain(answer: Answer) -> str:
    found = answer.gain
    if found is None:
        return ""
    if found.value is None:
        return f"; {found.reason}"
    return f", {form.speedup(found.value, found.low, found.high)} times plain decoding"


def ranking_table(answer: Answer) -> Table:
    """The first of the ranking. Rates are tokens/s, all of them; `counted` is what the objective counts."""
    columns = ("use", "batch", "per user", "in all", "counted (95 %)", "times plain (95 %)")
    table = grid(f"best by {answer.objective}: {answer.workload}", columns, left=("use",))
    for c in answer.ranking[:_SHOWN]:
        rates = (form.rate(c.per_user.value), form.rate(c.in_all.value))
        counted = form.speedup(c.value.value, c.value.low, c.value.high)
        gain = form.MISSING if c.gain is None else form.speedup(c.gain.value, c.gain.low, c.gain.high)
        table.add_row(*map(cell, (str(c.config or "OFF"), str(c.batch), *rates, counted, gain)))
    return table


def pareto_table(answer: Answer) -> Table:
    columns = ("use", "batch", "per user (95 %)", "in all (95 %)")
    table = grid(f"Pareto set, tokens/s: {answer.workload}", columns, left=("use",))
    for c in answer.pareto:
        rates = [form.speedup(m.value, m.low, m.high) for m in (c.per_user, c.in_all)]
        table.add_row(*map(cell, (str(c.config or "OFF"), str(c.batch), *rates)))
    return table


def schedule_table(schedule: Schedule) -> Table:
    resting = any(row.resting for row in schedule.rows)
    columns = ("batch", "K", "best K", "speedup (95 %)", "within 1 %", *(["K 0 in the loop"] if resting else []))
    table = grid(f"K by batch: {schedule.drafter}", columns, left=("within 1 %",))
    for row in schedule.rows:
        s = row.speedup
        values = (str(row.batch), str(row.k), str(row.best_k), form.speedup(s.value, s.low, s.high))
        rest = form.speedup(row.resting.value, row.resting.low, row.resting.high) if row.resting else form.MISSING
        table.add_row(*map(cell, (*values, " ".join(map(str, row.flat)) or "OFF", *([rest] if resting else []))))
    return table


def crossover_lines(tuning: Tuning, schedule: Schedule) -> Iterator[str]:
    """Where the schedule's drafter stops paying, by batch and by context."""
    if schedule.crossover is not None:
        again = "" if schedule.monotone else "; it pays again at a larger one"
        yield f"speculation {schedule.crossover.text('batch')}{again}"
    reasons = dict.fromkeys(c.reason for c in tuning.contexts if c.reason)
    for c in tuning.contexts:
        if c.found is not None:
            yield f"at batch {c.batch}, K {c.k}, it {c.found.text('context')} (from the latency surfaces)"
    for reason in reasons:
        yield f"context where it stops paying: unknown, {reason}"


def regret_table(tuning: Tuning) -> Table:
    table = grid(
        "regret: the oracle's speed / this speed (chosen and scored on the same prompts)",
        ("policy", "what", "speedup (95 %)", "regret (95 %)"),
        left=("policy", "what"),
    )
    for r in tuning.regrets:
        own, lost = r.speedup, r.loss
        numbers = form.speedup(own.value, own.low, own.high), form.speedup(lost.value, lost.low, lost.high)
        table.add_row(*map(cell, (r.policy, r.what, *numbers)))
    return table


def advice_lines(tuning: Tuning) -> Iterator[str]:
    """Each name once, with its first place; the others are counted."""
    names: dict[str, int] = {}
    for f in tuning.advice:
        names[f.name] = names.get(f.name, 0) + 1
    for name, count in names.items():
        first = next(f for f in tuning.advice if f.name == name)
        more = "" if count == 1 else f" (and {count - 1} more like it, in --json)"
        yield f"{name}: {first.where}: {first.text}{more}"


def _answer(a: Answer) -> dict[str, Any]:
    return {
        "objective": a.objective,
        "slo_seconds": asdict(a.slo) if a.slo else None,
        "workload": a.workload,
        "speculate": a.choice is not None and a.choice.config is not None,
        "choice": _candidate(a.choice) if a.choice else None,
        "verdict": "CAN'T TELL" if a.gain is None else a.gain.verdict,
        "gain": asdict(a.gain) if a.gain else None,
        "flat_optimum": [_candidate(c) for c in a.flat],
        "ranking": [_candidate(c) for c in a.ranking],
        "reason": a.reason,
    }


def _candidate(c: Candidate) -> dict[str, Any]:
    return {**asdict(c), "speculate": c.config is not None}


def _schedule(s: Schedule) -> dict[str, Any]:
    return {**asdict(s), "crossover": _crossing(s.crossover, "batch")}


def _crossing(found: Crossing | None, what: str) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "text": found.text(what)}
