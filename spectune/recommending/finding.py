"""A piece of advice: a measured number, the threshold that it crossed, and what to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """`value` and `threshold` are of the quantity that `measure` names, with its unit; `where` is what it is about."""

    name: str
    where: str
    measure: str
    value: float
    threshold: float
    text: str
