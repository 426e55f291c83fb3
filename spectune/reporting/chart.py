"""A figure as data: what is drawn, before anything draws it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Numbers = tuple[float | None, ...]
Kind = Literal["lines", "points", "rows", "bars"]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name; a value of None leaves a gap. `tips` say each point in words.

    `style` is the place of the name in the figure's legend. `low` and `high` are the ends of intervals, or empty.
    `labels` stand beside the points where there is room; the first ones have precedence.
    """

    name: str
    style: int
    x: Numbers
    y: Numbers
    tips: tuple[str, ...]
    low: Numbers = ()
    high: Numbers = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    lines   joined points over x, intervals along y
    points  points alone
    rows    points in rows y = 0, 1, … from the top, intervals along x
    bars    bars from `low` to `high` at each x
    """

    title: str
    kind: Kind
    series: tuple[Series, ...]
    x_label: str
    y_label: str
    x_ticks: tuple[tuple[float, str], ...] = ()  # empty: any numbers
    y_ticks: tuple[tuple[float, str], ...] = ()
    log_x: bool = False
    even: bool = False  # a line where the speedup is 1
    diagonal: bool = False  # a line where x is y
    share: bool = False  # y goes from 0 to 1

    @property
    def description(self) -> str:
        """For who cannot see it: the axes and every series in a few words."""
        parts = [f"{self.y_label or 'Rows'} over {self.x_label}."]
        for s in self.series[:12]:
            known = [(tip, y) for tip, y in zip(s.tips, s.y, strict=True) if y is not None]
            if known:
                parts.append(f"{known[0][0]}." if len(known) == 1 else f"{known[0][0]} … {known[-1][0]}.")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels with one legend. `legend` is empty where the axes name everything."""

    name: str  # of its file when exported
    title: str
    caption: str
    panels: tuple[Panel, ...]
    legend: tuple[str, ...]


def named_ticks(values: Iterable[int]) -> tuple[tuple[float, str], ...]:
    return tuple((float(v), str(v)) for v in sorted(set(values)))


def distinct(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))
