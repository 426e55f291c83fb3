"""Sections of a benchmark: each has its seconds, and whatever becomes of it, the next one runs.

A section yields figures, and lines that a reader of them should know. What it yielded before it failed or ran out of
time is kept. A module that is not installed skips the section that needs it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.table import Table

from spectune.engines.spread import Spread

Status = Literal["done", "skipped", "failed", "out of time"]
_AGAIN = 5.0  # seconds until the alarm rings again, should something have swallowed it


class Skipped(Exception):
    """A section cannot run here; says why."""


class OutOfTime(BaseException):
    """The seconds of a section are over. No handler of ordinary errors on the way may keep it."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What the median of a figure shall be."""

    limit: float
    at_least: bool

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured several times; `values` has every repeat."""

    what: str
    unit: str
    values: Spread
    aim: Aim | None = None

    @classmethod
    def of(cls, what: str, unit: str, values: Sequence[float], aim: Aim | None = None) -> Figure:
        return cls(what, unit, Spread.of(values), aim)

    @property
    def met(self) -> bool | None:
        return None if self.aim is None else self.aim.met(self.values.median)

    def document(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.unit,
            "median": self.values.median,
            "low": self.values.low,
            "high": self.values.high,
            "n": len(self.values.repeats),
            "repeats": list(self.values.repeats),
            "aim": None if self.aim is None else str(self.aim),
            "met": self.met,
        }


Part = Figure | str


@dataclass(frozen=True, slots=True)
class Section:
    """`seconds` is the most it may take."""

    name: str
    seconds: float
    run: Callable[[], Iterator[Part]]


@dataclass(slots=True)
class Outcome:
    """What became of a section."""

    name: str
    limit_seconds: float
    status: Status = "done"
    reason: str | None = None
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "seconds": self.seconds,
            "limit_seconds": self.limit_seconds,
            "figures": [f.document() for f in self.figures],
            "notes": self.notes,
        }


def run_section(section: Section, seconds: float) -> Outcome:
    """Run a section for `seconds` at most. Never raises what the section raises, but for Ctrl-C."""
    outcome = Outcome(section.name, max(0.0, seconds))
    if seconds <= 0:
        outcome.status, outcome.reason = "skipped", "no time was left"
        return outcome
    began = time.perf_counter()
    try:
        with _limit(seconds):
            for part in section.run():
                if isinstance(part, Figure):
                    outcome.figures.append(part)
                else:
                    outcome.notes.append(part)
    except OutOfTime:
        outcome.status, outcome.reason = "out of time", f"not finished within {seconds:.3g} s"
    except Skipped as skipped:
        outcome.status, outcome.reason = "skipped", str(skipped)
    except ModuleNotFoundError as error:
        outcome.status, outcome.reason = "skipped", f"{error.name} is not installed"
    except Exception as error:  # whatever it is, the other sections still have something to say
        outcome.status, outcome.reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:500]
    outcome.seconds = time.perf_counter() - began
    return outcome


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in this block after some seconds, as soon as Python is at work. In the main thread only."""

    def ring(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def table(outcomes: Sequence[Outcome]) -> Table:
    """A line per figure, and one per section that has none or did not end well."""
    grid = Table(box=None, pad_edge=False)
    for name in ("section", "figure"):
        grid.add_column(name)
    for name in ("median", "min–max", "n", "aim"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("")
    for outcome in outcomes:
        name = outcome.name
        for figure in outcome.figures:
            v = figure.values
            aim, verdict = ("", "") if figure.aim is None else (str(figure.aim), "met" if figure.met else "not met")
            median, span = f"{v.median:.4g} {figure.unit}".strip(), f"{v.low:.4g}–{v.high:.4g}"
            grid.add_row(name, figure.what, median, span, str(len(v.repeats)), aim, verdict)
            name = ""
        if outcome.reason is not None:
            grid.add_row(name, f"{outcome.status}: {outcome.reason}", "", "", "", "", "")
        elif not outcome.figures:
            grid.add_row(name, outcome.status, "", "", "", "", "")
    return grid
