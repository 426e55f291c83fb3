"""What `recommend` shows first: every suite and batch with bars, the warnings in a line, and what to run next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spectune.recommending.choice import Advice
from spectune.reporting import format as form
from spectune.reporting.bars import bar
from spectune.reporting.grid import cell, grid
from spectune.reporting.summary import Summary

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"FASTER": "green", "SLOWER": "red", "CAN'T TELL": "yellow"}
_WIDTH = 6  # of a bar of speedups, in characters
_SHORT = 4  # of a bar of acceptance lengths


def place_table(summary: Summary, *, ascii_only: bool) -> Table:
    """One row per suite and batch. Where the answer is OFF, the numbers are those of what came closest."""
    from rich.text import Text

    columns = ("suite", "batch", "use", "speedup (95 %)", "", "AL")
    table = grid("by suite and batch; bars from 0", columns, left=("suite", "use", "", "AL"))
    for column in table.columns[4:]:
        column.no_wrap = True
    found = summary.recommendation.by_place
    lengths = {id(a): _length(summary, a) for a in found}
    fastest = max((a.speedup.value or 0.0 for a in found if a.speedup), default=0.0)
    longest = max((n or 0.0 for n in lengths.values()), default=0.0)
    for a in found:
        sped, length = a.speedup, lengths[id(a)]
        use = f"OFF ({a.verdict})" if a.choice is None else str(a.choice)
        numbers = f"{form.number(length)} {bar(length, longest, _SHORT, ascii_only=ascii_only)}"
        table.add_row(
            cell(str(a.suite)),
            cell(str(a.batch)),
            Text(form.visible(use), style=COLOURS[a.verdict]),
            cell(form.speedup(sped.value, sped.low, sped.high) if sped else form.MISSING),
            cell(bar(sped.value if sped else None, fastest, _WIDTH, ascii_only=ascii_only)),
            cell(numbers.rstrip()),
        )
    return table


def _length(summary: Summary, advice: Advice) -> float | None:
    """Acceptance length of the best configuration of a place."""
    for p in summary.profiles:
        if (p.spec.suite, p.spec.batch, p.config) == (advice.suite, advice.batch, advice.best):
            return p.acceptance.acceptance_length
    return None


def warnings_by_name(summary: Summary) -> dict[str, list[str]]:
    """The notes of all cells by the name of the warning."""
    found: dict[str, list[str]] = {}
    for p in summary.profiles:
        for note in p.notes:
            found.setdefault(note.partition(":")[0], []).append(note)
    return found


def warning_line(summary: Summary) -> str | None:
    """All warnings in one line; None without any."""
    found = warnings_by_name(summary)
    if not found:
        return None
    names = ", ".join(f"{name} ({len(notes)})" for name, notes in found.items())
    return f"warnings (cells of {len(summary.profiles)}): {names}"


def next_commands(summary: Summary) -> Iterator[tuple[str, str]]:
    """Commands to run next, each with what it gives."""
    run = shlex.quote(str(summary.run.path))
    asked = _asked(summary)
    if any(e.text for e in summary.exports):
        engine = next(e.engine for e in summary.exports if e.text)
        yield f"spectune recommend {run}{asked} --for {engine}", f"settings for {engine}"
    yield f"spectune recommend {run}{asked} --all", "regret, Pareto set, all advice, warnings and settings"
    yield f"spectune report {run}", "all of it with figures, as one HTML page"


def _asked(summary: Summary) -> str:
    """The options that decided this answer, for the same answer from another command."""
    words: list[str] = []
    if summary.mix:
        words += ["--mix", ",".join(f"{suite}={share:g}" for suite, share in summary.mix.items())]
    if summary.goal:
        objective, slo = summary.goal
        words += ["--objective", objective, *(("--slo", slo.option) if slo else ())]
    return "".join(f" {shlex.quote(word)}" for word in words)
