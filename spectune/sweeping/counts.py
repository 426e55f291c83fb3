"""Lists of counts, as the K and batch options take them: "1,2,4", "1-8", or both mixed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spectune.errors import UsageError

LARGEST = 4096  # beyond any K or batch in use; keeps a typing error such as 1-80000000 from filling the memory
_ITEM = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def parse_counts(value: str | int | Sequence[int], what: str, *, least: int = 1) -> tuple[int, ...]:
    """Counts of at least `least`, in the order given. `what` names the option in the UsageError for all else."""
    if isinstance(value, str):
        counts = tuple(n for item in value.split(",") for n in _item(item.strip(), value, what, least))
    elif isinstance(value, int):
        counts = (value,)
    else:
        counts = tuple(value)
    if not counts:
        raise UsageError(f"{what} is empty", _EXAMPLE)
    for n in counts:
        if isinstance(n, bool) or not isinstance(n, int) or not least <= n <= LARGEST:
            raise UsageError(f"{what} takes counts from {least} to {LARGEST}, not {n!r}", _EXAMPLE)
    twice = next((n for n in counts if counts.count(n) > 1), None)
    if twice is not None:
        raise UsageError(f"{what} names {twice} twice", "name each count once")
    return counts


_EXAMPLE = "write for instance 1,2,4 or 1-8"


def _item(item: str, whole: str, what: str, least: int) -> Sequence[int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise UsageError(f"{what} takes counts, not {whole!r}", _EXAMPLE)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UsageError(f"{what}: the range {item} runs backwards", f"write {last}-{first}")
    if last > LARGEST:
        raise UsageError(f"{what} takes counts from {least} to {LARGEST}, not {last}", _EXAMPLE)
    return range(first, last + 1)


def spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spread, both ends included."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
