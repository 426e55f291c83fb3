"""Synthetic acceptance: how often drafted tokens are kept is set by the user, whatever the models say. Pure.

Rates are conditional: `rates[i]` is the chance that token i + 1 of a draft is kept, given that all before it were. As
in vLLM, SGLang and llama.cpp, an acceptance *length* counts the target's own token of each round, so it lies between 1
and K + 1. vLLM's and llama.cpp's *rate lists* are joint (token i and all before it): write those as
`{"joint": […]}` in a file.

A length fixes one rate for all positions: the one with which a chain of the sweep's largest K has that length. Smaller
K keep the same rate, and so a smaller length, as one real draft would.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from spectune.errors import UsageError

OPTION = "--synthetic-acceptance"
_HINT = "give a length such as 3.2, conditional rates such as 0.8,0.7,0.6, or a JSON or CSV file"
_STEPS = 200  # of the bisection: more than a double has bits


def synthetic_rates(text: str, k: int) -> tuple[float, ...]:
    """The conditional rates of positions 1 … k that the option's value asks for.

    Args:
        text: an acceptance length, rates divided by commas, or the path of a file: JSON with `conditional`, `joint` or
            `acceptance_length`, or CSV with lines `position,rate` (conditional).
        k: the largest K of the sweep.

    Raises:
        UsageError: none of these, a length that K cannot have, rates outside 0 … 1, or fewer rates than K.
    """
    if "," in text and not Path(text).is_file():
        return _checked([_number(part) for part in text.removesuffix(",").split(",")], k)
    try:
        length = float(text)
    except ValueError:
        return _from_file(Path(text).expanduser(), k)
    return (rate_of_length(length, k),) * k


def rate_of_length(length: float, k: int) -> float:
    """The one rate r with 1 + r + … + r^k = length. Raises UsageError unless 1 <= length <= k + 1."""
    if not 1 <= length <= k + 1:
        hint = "for rates write 0.7,0.6" if length < 1 else "use a larger --k, or a smaller length"
        raise UsageError(
            f"{OPTION} {length:g}: with K {k} an acceptance length lies between 1 and {k + 1}, "
            "the target's own token counted",
            hint,
        )
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if expected_length((middle,) * k) < length:
            low = middle
        else:
            high = middle
    return high if length > 1 else 0.0


def expected_length(rates: Sequence[float]) -> float:
    """Acceptance length of a draft that always has len(rates) tokens: 1 + Σ_i Π_{j<=i} rates_j."""
    joint, total = 1.0, 1.0
    for rate in rates:
        joint *= rate
        total += joint
    return total


def one_setting(cells: Iterable[tuple[float, ...] | None]) -> bool:
    """Whether cells of several K share one list of rates, each having the first K of it, or none has any."""
    lists = set(cells)
    longest = max((rates or () for rates in lists), key=len, default=())
    return lists <= {None} or all(rates is not None and rates == longest[: len(rates)] for rates in lists)


def _from_file(path: Path, k: int) -> tuple[float, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"{OPTION} {path}: {reason}", _HINT) from None
    if path.suffix.lower() == ".csv":
        return _checked(_csv_rates(path, text), k)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is no JSON: {error}", _HINT) from None
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds no JSON object", _HINT)
    match document:
        case {"conditional": list(values)}:
            return _checked([_number(v) for v in values], k)
        case {"joint": list(values)}:
            return _checked(_conditional([_number(v) for v in values]), k)
        case {"acceptance_length": length}:
            return (rate_of_length(_number(length), k),) * k
    raise UsageError(f'{path} has none of "conditional", "joint" and "acceptance_length"', _HINT)


def _csv_rates(path: Path, text: str) -> list[float]:
    rows = [row for row in csv.reader(text.splitlines()) if row]
    if rows and rows[0] == ["position", "rate"]:
        rows = rows[1:]
    for place, row in enumerate(rows, 1):
        if len(row) != 2 or row[0].strip() != str(place):
            raise UsageError(f"{path}: line {place} must be {place},RATE, not {','.join(row)!r}")
    return [_number(row[1]) for row in rows]


def _conditional(joint: Sequence[float]) -> list[float]:
    """From joint rates; behind a rate of 0 nothing is ever reached."""
    before, rates = 1.0, []
    for rate in joint:
        if rate > before:
            raise UsageError(f"{OPTION}: joint rates never rise, but {rate:g} follows {before:g}")
        rates.append(rate / before if before > 0 else 0.0)
        before = rate
    return rates


def _number(value: object) -> float:
    try:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ValueError
        return float(value)
    except ValueError:
        raise UsageError(f"{OPTION}: {value!r} is not a number", _HINT) from None


def _checked(rates: Sequence[float], k: int) -> tuple[float, ...]:
    for rate in rates:
        if not 0 <= rate <= 1 or math.isnan(rate):
            raise UsageError(f"{OPTION}: a rate lies between 0 and 1, not {rate:g}", _HINT)
    if len(rates) < k:
        raise UsageError(
            f"{OPTION} gives {len(rates)} rate{'s' if len(rates) != 1 else ''}, and K {k} needs {k}",
            "give more rates, or use a smaller --k",
        )
    return tuple(rates[:k])
