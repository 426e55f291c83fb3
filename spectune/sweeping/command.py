"""From options back to the command line: what run.json records, and what a user types to go on."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from spectune.sweeping.options import SweepOptions, flag


def sweep_command(options: SweepOptions, output: Path) -> tuple[str, ...]:
    """The shortest `spectune sweep` command that gives these options."""
    words = ["spectune", "sweep"]
    for option in fields(SweepOptions):
        value = getattr(options, option.name)
        if value != option.default:
            words += _words(flag(option.name), value)
    return (*words, "--output", str(output))


def resume_command(options: SweepOptions, output: Path) -> str:
    """What to type to go on with a run, quoted for a shell."""
    return shlex.join((*sweep_command(options, output), "--resume"))


def _words(name: str, value: Any) -> list[str]:
    match value:
        case True:
            return [name]
        case False:
            return [name.replace("--", "--no-", 1)]
        case tuple() if value and isinstance(value[0], int):
            return [name, ",".join(map(str, value))]
        case tuple():
            return [word for item in value for word in (name, item)]
        case _:
            return [name, str(value)]
