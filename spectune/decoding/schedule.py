"""How many tokens to draft, by the number of active rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spectune.errors import UsageError


class Schedule(Protocol):
    """K of a round. It is asked once a round."""

    @property
    def largest(self) -> int: ...

    def at(self, rows: int) -> int: ...


@dataclass(frozen=True, slots=True)
class KSchedule:
    """`steps` are (rows, K): K holds up to that many active rows; above the last one nothing is drafted."""

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        rows = [r for r, _ in self.steps]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1 or min(k for _, k in self.steps) < 0:
            raise UsageError(f"a K schedule needs rising row counts and K of 0 or more, not {list(self.steps)}")

    @classmethod
    def constant(cls, k: int) -> KSchedule:
        return cls(((1 << 30, k),))

    def at(self, rows: int) -> int:
        return next((k for limit, k in self.steps if rows <= limit), 0)

    @property
    def largest(self) -> int:
        return max(k for _, k in self.steps)
