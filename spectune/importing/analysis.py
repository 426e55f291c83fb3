"""What `recommend` and `fit` can say about imported points: less than about a run, and never more than is known.

Totals of a server do not pair requests, so a speedup here has no interval and its verdict is always CAN'T TELL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from spectune.errors import UsageError
from spectune.importing.record import Point
from spectune.sweeping.synthetic import rate_of_length

UNPAIRED = "totals of a server do not pair requests with plain decoding, so there is no interval"

Place = tuple[str | None, int]  # suite, batch


@dataclass(frozen=True, slots=True)
class Compared:
    """A configuration against plain decoding at one place; means over repeats.

    `speedup` is null where there is no plain decoding at this place, or no speed: `reason` says which. `low` and `high`
    are the extremes over repeats of both, no confidence interval; null for single repeats. `round_cost` is the time of
    a round in plain steps: above that acceptance length it pays.
    """

    suite: str | None
    batch: int
    drafter: str | None
    k: int
    repeats: int
    acceptance_length: float | None
    speedup: float | None
    low: float | None
    high: float | None
    by: str | None  # what was compared: tokens_per_second, or tpot_seconds
    round_cost: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Fitted:
    """A point's acceptance as one number that does not depend on K, where it can be had."""

    point: Point
    iid_rate: float | None  # the one conditional rate with this length at this K
    reason: str | None


def compare(points: Sequence[Point]) -> tuple[Compared, ...]:
    """Every speculating configuration at every place, fastest first. Points without K or batch take no part."""
    groups: dict[tuple[Place, str | None, int], list[Point]] = {}
    for p in points:
        if p.k is not None and p.batch is not None:
            drafter = None if p.k == 0 else p.drafter
            groups.setdefault(((p.suite, p.batch), drafter, p.k), []).append(p)
    plain = {place: own for (place, _, k), own in groups.items() if k == 0}
    found = [
        _compare(place, drafter, k, own, plain.get(place, ())) for (place, drafter, k), own in groups.items() if k > 0
    ]
    return tuple(sorted(found, key=lambda c: (c.suite or "", c.batch, -(c.speedup or 0.0), c.k)))


def fitted(points: Sequence[Point]) -> tuple[Fitted, ...]:
    """The i.i.d. rate of every speculating point."""
    return tuple(_fitted(p) for p in points if p.k != 0)


def left_out(points: Sequence[Point]) -> tuple[str, ...]:
    """A line per point that cannot be compared, and why."""
    lines = []
    for p in points:
        reasons = [p.missing.get(name, "not known") for name in ("k", "batch") if getattr(p, name) is None]
        if reasons:
            lines.append(f"{p.file}: {'; '.join(reasons)}")
    return tuple(lines)


def _compare(place: Place, drafter: str | None, k: int, own: Sequence[Point], plain: Sequence[Point]) -> Compared:
    lengths = [p.acceptance_length for p in own if p.acceptance_length is not None]
    length = fmean(lengths) if lengths else None
    by, mine, base = _speeds(own, plain)
    speedup = fmean(mine) / fmean(base) if by else None
    several = by is not None and len(mine) > 1 and len(base) > 1
    return Compared(
        suite=place[0],
        batch=place[1],
        drafter=drafter,
        k=k,
        repeats=len(own),
        acceptance_length=length,
        speedup=speedup,
        low=min(mine) / max(base) if several else None,
        high=max(mine) / min(base) if several else None,
        by=by,
        round_cost=length / speedup if length and speedup else None,
        reason=None if by else "no speed in the files" if plain else "no plain decoding (K 0) at this batch and suite",
    )


def _speeds(own: Sequence[Point], plain: Sequence[Point]) -> tuple[str | None, list[float], list[float]]:
    """Speeds of both in the same measure, the server's tokens/s before the mean time per token."""
    for name in ("tokens_per_second", "tpot_seconds"):
        mine = [v for p in own if (v := getattr(p, name)) is not None]
        base = [v for p in plain if (v := getattr(p, name)) is not None]
        if len(mine) == len(own) and len(base) == len(plain) and mine and base:
            if name == "tpot_seconds":
                mine, base = [1 / v for v in mine], [1 / v for v in base]
            return name, mine, base
    return None, [], []


def _fitted(point: Point) -> Fitted:
    if point.k is None or point.acceptance_length is None:
        name = "k" if point.k is None else "acceptance_length"
        return Fitted(point, None, point.missing.get(name, "not known"))
    if point.drafted is None or point.rounds is None:
        return Fitted(point, None, "the file does not say whether every round drafted K tokens")
    if point.drafted != point.k * point.rounds:
        return Fitted(point, None, "drafts were shortened")
    try:
        return Fitted(point, rate_of_length(point.acceptance_length, point.k), None)
    except UsageError as error:
        return Fitted(point, None, error.message)
