"""Small bars for a terminal: block characters in eighths, or ASCII where its encoding has no blocks."""

from __future__ import annotations

_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL = "█"


def bar(value: float | None, longest: float, width: int, *, ascii_only: bool) -> str:
    """`value` as a bar from 0, where `longest` takes all of `width` characters; empty for None and below 0.

    What is longer than `longest` is cut there. In ASCII a bar is rounded to whole characters.
    """
    if value is None or value <= 0 or longest <= 0:
        return ""
    share = min(1.0, value / longest) * width
    if ascii_only:
        return "#" * round(share)
    eighths = round(share * 8)
    return _FULL * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
