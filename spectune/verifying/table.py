"""The outcome of an audit as a table and as JSON."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from spectune.sweeping.cell import CellSpec
from spectune.sweeping.progress import describe as place
from spectune.sweeping.rundir import RunDirectory
from spectune.verifying.conclude import describe
from spectune.verifying.record import FOLDER

if TYPE_CHECKING:
    from rich.table import Table

    from spectune.verifying.audit import Outcome

COLOURS = {
    "identical": "green",
    "consistent": "green",
    "numeric ties": "green",
    "lossy": "yellow",
    "cannot judge": "yellow",
    "FAIL": "red",
}
_SHOWN = 5  # partings printed for each audit; the record has all


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Every audit's record, where it is kept, and the exit code."""
    return {
        "run": None if outcome.directory is None else str(outcome.directory),
        "exit_code": outcome.exit_code,
        "audits": [audit.model_dump(mode="json") for audit in outcome.audits],
        "failed": [{**_place(f.cell), "message": f.message} for f in outcome.failures],
    }


def as_table(outcome: Outcome) -> Table:
    """One row per audit."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("suite", "batch", "draft", "rule", "K", "verdict", "why"):
        right = column in ("batch", "K")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=column == "verdict")
    for audit in outcome.audits:
        table.add_row(
            *(Text(str(value)) for value in _place(audit.cell).values()),
            Text(audit.verdict, style=COLOURS[audit.verdict]),
            Text(audit.reason),
        )
    return table


def closing(outcome: Outcome) -> list[str]:
    """What stands below the table: partings, audits that broke off, and the next command."""
    lines = []
    for audit in outcome.audits:
        found = audit.identity.partings
        for parting in found[:_SHOWN]:
            kind = "numeric tie" if parting.is_tie else "FAIL"
            lines.append(f"{kind}: {place(audit.cell)}: {describe(parting)}")
        if len(found) > _SHOWN:
            lines.append(f"  and {len(found) - _SHOWN} more; --json has all")
    lines += [f"failed: {place(f.cell)}: {f.message}" for f in outcome.failures]
    if outcome.directory is not None:
        run = RunDirectory(outcome.directory)
        report = shlex.join(("spectune", "report", str(run.path)))
        lines.append(f"next: {report}" if run.exists() else f"kept in {run.path / FOLDER}; it holds no sweep yet")
    return lines


def _place(cell: CellSpec) -> dict[str, Any]:
    return {
        "suite": cell.suite,
        "batch": cell.batch,
        "draft": cell.drafter,
        "rule": cell.rule,
        "k": cell.k,
    }
