"""Configuration files: one TOML file may hold the tables of several commands."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from spectune.errors import UsageError


def read_table(path: Path, name: str, hint: str) -> dict[str, Any]:
    """The table [name]; others are left alone. Raises UsageError, with `hint` where the table is missing."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "give a TOML file that can be read") from None
    except (ValueError, RecursionError) as error:  # numbers and nesting beyond Python too
        raise UsageError(f"{path}: {error}", "correct the TOML there") from None
    table = document.get(name)
    if not isinstance(table, dict):
        raise UsageError(f"{path} has no [{name}] table", hint)
    return table
