"""The outcome on a terminal: at most 80 columns, plain where there is no terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spectune.gating.check import Outcome
from spectune.gating.table import headline, rows, short_numbers, troubles
from spectune.reporting.format import one_line
from spectune.reporting.grid import cell, grid

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {"PASS": "green", "REGRESSION": "red", "RUN FAILED": "red", "CANNOT JUDGE": "yellow"}
_WARNINGS = 10  # shown here


def print_outcome(outcome: Outcome, console: Console) -> None:
    """The verdict, a row per cell, everything that did not pass, and the notes."""
    from rich.text import Text

    def line(text: str, style: str = "") -> None:
        console.print(Text(one_line(text), style=style), soft_wrap=True)

    line(headline(outcome), f"bold {_COLOURS[outcome.verdict]}")
    columns = ("suite", "batch", "draft", "K", "AL", "speedup", "verdict")
    table = grid("", columns, left=("suite", "draft", "verdict"))
    for row in rows(outcome):
        suite, drafter, _, k, batch = row.place
        length, speedup = short_numbers(row.acceptance, row.length), short_numbers(row.speedup)
        texts = (suite, str(batch), drafter, str(k), length, speedup)
        table.add_row(*map(cell, texts), Text(row.verdict, style=_COLOURS[row.verdict]))
    if table.row_count:
        console.print(table)
    found = troubles(outcome)
    warnings = [t for t in found if t.level == "warn"]
    for trouble in [t for t in found if t.level == "error"] + warnings[:_WARNINGS]:
        level = "" if trouble.level == "error" else "warning: "
        line(f"{level}{trouble.verdict}: {trouble.text}", _COLOURS[trouble.verdict])
    if len(warnings) > _WARNINGS:
        line(f"{len(warnings) - _WARNINGS} more warnings are in --json, --markdown and --junit", "yellow")
    for note in outcome.notes:
        line(f"note: {note}")
