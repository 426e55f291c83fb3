"""Imported results on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from spectune.importing.analysis import UNPAIRED, Compared, compare, fitted, left_out
from spectune.importing.documents import NOT_IN_TOTALS, best
from spectune.importing.record import Imported, Point
from spectune.reporting import format as form
from spectune.reporting.grid import cell, grid


def print_points(points: Sequence[Point]) -> None:
    """One row per point: what is known of it."""
    table = grid("imported", ("suite", "draft", "batch", "K", "AL", "accepted", "tokens/s"), left=("suite", "draft"))
    for p in points:
        batch, k = (form.MISSING if v is None else str(v) for v in (p.batch, p.k))
        length, speed = form.number(p.acceptance_length), form.number(p.tokens_per_second, 1)
        values = (p.suite or form.MISSING, p.drafter or form.MISSING, batch, k)
        table.add_row(*map(cell, (*values, length, form.number(p.acceptance_rate), speed)))
    console = _console()
    console.print(table)
    _print_lines([*left_out(points), *(f"{p.file}: {note}" for p in points for note in p.notes)])


def print_recommendation(imported: Imported) -> None:
    """The fastest at each place, and why that is no verdict."""
    found = compare(imported.points)
    console = _console()
    for c in best(found):
        name = c.drafter or "the draft"
        line = f"batch {c.batch}: {name}, K {c.k}: {c.speedup:.2f} times plain decoding  [CAN'T TELL]"
        console.print(cell(f"{c.suite}, {line}" if c.suite else line), soft_wrap=True)
    _print_lines([f"{UNPAIRED}; `spectune sweep` measures both in pairs."])
    console.print(_compared_table(found))
    _print_lines([*dict.fromkeys(c.reason for c in found if c.reason), *left_out(imported.points)])


def print_fit(imported: Imported) -> None:
    """Acceptance by position, and what a round costs."""
    columns = ("draft", "K", "AL", "i.i.d. rate", "conditional by position")
    table = grid("acceptance", columns, left=("draft",))
    found = fitted(imported.points)
    for f in found:
        k = form.MISSING if f.point.k is None else str(f.point.k)
        values = (f.point.drafter or form.MISSING, k, form.number(f.point.acceptance_length))
        table.add_row(*map(cell, (*values, form.number(f.iid_rate), form.positions(f.point.conditional))))
    _console().print(table)
    _console().print(_compared_table(compare(imported.points)))
    reasons = [f"{f.point.file}: i.i.d. rate: {f.reason}" for f in found if f.reason]
    _print_lines([*reasons, f"speedup models: {NOT_IN_TOTALS}"])


def _compared_table(found: Sequence[Compared]) -> Table:
    columns = ("suite", "batch", "draft", "K", "speedup", "repeats' range", "round cost")
    table = grid("against plain decoding", columns, left=("suite", "draft"))
    for c in found:
        spread = form.span(c.low, c.high) if c.low is not None else form.MISSING
        names = (c.suite or form.MISSING, str(c.batch), c.drafter or form.MISSING, str(c.k))
        table.add_row(*map(cell, (*names, form.number(c.speedup), spread, form.number(c.round_cost))))
    return table


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        _console().print(cell(line), style="dim", soft_wrap=True)


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)
