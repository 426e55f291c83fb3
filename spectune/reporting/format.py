"""Numbers and names as every output prints them: terminal and page round alike, so they never disagree."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "n/a"


def number(value: float | None, digits: int = 2) -> str:
    """Speedups, acceptance lengths, cost ratios; "n/a" for None."""
    return MISSING if value is None else f"{value:.{digits}f}"


def rate(value: float | None) -> str:
    """Tokens per second."""
    return number(value, 1)


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"


def milliseconds(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{seconds * 1e3:.2f}"


def span(low: float | None, high: float | None) -> str:
    """An interval, both ends like `number`."""
    return MISSING if low is None or high is None else f"{low:.2f} to {high:.2f}"


def speedup(value: float | None, low: float | None, high: float | None) -> str:
    """The speedup with its interval where there is one."""
    if value is None:
        return MISSING
    return number(value) if low is None or high is None else f"{number(value)} ({span(low, high)})"


def size(count: float | None) -> str:
    """Bytes, in decimal units."""
    if count is None:
        return MISSING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def millions(count: float | None) -> str:
    """Parameters of a model."""
    return MISSING if count is None else f"{count / 1e6:.1f} M"


def positions(values: Sequence[float | None]) -> str:
    """Acceptance by position."""
    return " ".join(number(v) for v in values) or MISSING


def plain(value: object) -> str:
    """A fact about the machine as people write it."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(own)}" for name, own in value.items())
    return str(value)


def one_line(text: str) -> str:
    """Visible, and in one line: a line of its own could pass for our words, or be a command to a CI that reads them."""
    return visible(text).replace("\n", " ")


def visible(text: str) -> str:
    """Names and messages come from outside: control characters must not reach a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
