"""Two runs against each other: equal cells in pairs, and what differs between the runs left out of the pairing.

A setting that has one value within each run, and another one in the other run, is what is being compared. All others
must be equal for two cells to be partners. Prompts are resampled alike in both runs (Efron and Tibshirani 1993,
chapter 8), repeats apart, since the runs had nothing to do with each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spectune.speedup.acceptance import speculative_requests
from spectune.speedup.positions import length_resamples, measured
from spectune.speedup.profile import Profile
from spectune.speedup.uncertainty import (
    Draws,
    Estimate,
    Rates,
    cell_rates,
    interval,
    ratio_draws,
)
from spectune.sweeping.cell import CellResult, CellSpec

# Weights are compared by the name they go by; how often a cell was repeated does not change what it measures.
_NO_IDENTITY = frozenset({"target_digest", "drafter_digest", "repeats"})


@dataclass(frozen=True, slots=True)
class Difference:
    """`b` − `a` with its interval; `low` and `high` are None for the `reason`."""

    a: float | None
    b: float | None
    value: float | None
    low: float | None
    high: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Pair:
    """`speedup` is b's speedup over plain decoding / a's, `rate` the same of speculative tokens per second."""

    a: Profile
    b: Profile
    speedup: Estimate
    rate: Estimate
    acceptance_length: Difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """`differs` names the settings that were left out of the pairing, with both values."""

    differs: dict[str, tuple[str, str]]
    pairs: tuple[Pair, ...]
    only_a: tuple[CellSpec, ...]
    only_b: tuple[CellSpec, ...]


def compare(a: Sequence[Profile], b: Sequence[Profile]) -> Comparison:
    """Pair the finished cells of two runs, in the order of `a`."""
    differs = _differing([p.spec for p in a], [p.spec for p in b])
    names = [n for n in CellSpec.model_fields if n not in differs and n not in _NO_IDENTITY]

    def place(p: Profile) -> tuple[Any, ...]:
        return tuple(getattr(p.spec, name) for name in names)

    there = {place(p): p for p in b}
    found = [(p, there.pop(place(p), None)) for p in a]
    return Comparison(
        differs,
        tuple(_pair(p, q) for p, q in found if q is not None),
        tuple(p.spec for p, q in found if q is None),
        tuple(p.spec for p in b if place(p) in there),
    )


def _differing(a: Sequence[CellSpec], b: Sequence[CellSpec]) -> dict[str, tuple[str, str]]:
    found = {}
    for name in CellSpec.model_fields:
        mine, other = ({str(getattr(s, name)) for s in specs} for specs in (a, b))
        # Prompts of another suite are never the same work; other weights under one name are told apart from this.
        if (
            not name.startswith("suite")
            and not name.endswith("digest")
            and len(mine) == len(other) == 1
            and mine != other
        ):
            found[name] = mine.pop(), other.pop()
    return found


def _pair(a: Profile, b: Profile) -> Pair:
    first, second = cell_rates(a.cell, repeat_seed="a"), cell_rates(b.cell, repeat_seed="b")
    why = a.excluded or b.excluded
    if why is None and _prompts(a.cell) != _prompts(b.cell):
        why = "other prompts"
    return Pair(
        a,
        b,
        _ratio(first, second, lambda r: (_over(r.speculative, r.plain), ratio_draws(r)), why),
        _ratio(first, second, lambda r: (r.speculative, r.speculative_draws), why),
        _lengths(a, b, why),
    )


def _ratio(a: Rates, b: Rates, part: Callable[[Rates], tuple[float | None, Draws | None]], why: str | None) -> Estimate:
    prompts, repeats = min(a.prompts, b.prompts), min(a.repeats, b.repeats)
    (x, x_draws), (y, y_draws) = part(a), part(b)
    value = _over(y, x)
    if why is not None or value is None:
        return Estimate(None, None, None, "CAN'T TELL", prompts, repeats, why or "a rate is unknown")
    if x_draws is None or y_draws is None:
        return interval(value, None, prompts, repeats, a.reason or b.reason)
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval(value, np.asarray(y_draws / x_draws), prompts, repeats)


def _lengths(a: Profile, b: Profile, why: str | None) -> Difference:
    x, y = a.acceptance.acceptance_length, b.acceptance.acceptance_length
    if why is not None or x is None or y is None:
        return Difference(x, y, None, None, None, why or "nothing was decoded speculatively")
    x_draws, y_draws = (length_resamples(p.spec.suite, speculative_requests(p.cell)) for p in (a, b))
    if x_draws is None or y_draws is None:
        return Difference(x, y, y - x, None, None, "one prompt only: its spread cannot be known")
    found = measured(y - x, y_draws - x_draws)
    return Difference(x, y, found.value, found.low, found.high, None)


def _prompts(cell: CellResult) -> list[str]:
    return sorted({r.prompt_id for p in cell.passes for r in p.requests})


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
