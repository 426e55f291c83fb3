"""From the command line to imported.json."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

from spectune import __version__
from spectune.errors import UsageError
from spectune.importing.record import Imported, Point

_Choice = TypeVar("_Choice", bound=str)


def imported(points: Sequence[Point]) -> Imported:
    """The document, with when and how it was made."""
    return Imported(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spectune_version=__version__,
        command=("spectune", *sys.argv[1:]),
        points=tuple(points),
    )


def choose(option: str, value: str | None, choices: Sequence[_Choice]) -> _Choice | None:
    """`value` as one of `choices`. Raises UsageError for another."""
    found = next((c for c in choices if c == value), None)
    if value is not None and found is None:
        raise UsageError(f"{option} does not know {value!r}", f"choose from {', '.join(choices)}")
    return found
