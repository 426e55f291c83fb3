"""`spectune doctor`: what works on this machine, and why not."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from spectune.measuring.doctor import Check

WINDOW_SECONDS = 1.1  # long enough for every reading, the energy counter's included
COLOURS = {"ok": "green", "warn": "yellow", "missing": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say what works on this machine, what does not, and what to do about it.

    The exit code is 0, or 4 where torch or transformers cannot be used.

    Example: spectune doctor
    """
    from spectune.measuring.doctor import examine, usable

    checks = examine(window=lambda: time.sleep(WINDOW_SECONDS))
    if as_json:
        print(json.dumps({"usable": usable(checks), "checks": [asdict(c) for c in checks]}, indent=2))
    else:
        _print_table(checks)
    if not usable(checks):
        raise typer.Exit(4)


def _print_table(checks: tuple[Check, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "status", "detail", box=box.SIMPLE_HEAD)
    for check in checks:
        # Text, not str: a version or an error may hold [brackets].
        detail = Text(check.detail)
        if check.hint:
            detail.append(f"\n{check.hint}", style="dim")
        table.add_row(Text(check.name), Text(check.status, style=COLOURS[check.status]), detail)
    Console().print(table)
