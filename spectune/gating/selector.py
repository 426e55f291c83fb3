"""Selectors: which cells a threshold or a requirement is about, as `code` or `suite=code,drafter=ngram,k=4,batch=1`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from spectune.errors import UsageError
from spectune.sweeping.cell import CellSpec

Place = tuple[str, str, str, int, int]  # suite, drafter, rule, K, batch
_KEYS = ("suite", "drafter", "rule", "k", "batch")
# A comma separates only where a key follows: the names of drafters have commas too.
_SEPARATOR = re.compile(rf"\s*,\s*(?=(?:{'|'.join(_KEYS)})\s*=)")


def place_of(spec: CellSpec) -> Place:
    """What a cell is in its run; the same place of two runs can be compared."""
    return spec.suite, spec.drafter, spec.rule, spec.k, spec.batch


def label(place: Place) -> str:
    suite, drafter, rule, k, batch = place
    lossy = f", {rule}" if rule != "greedy" else ""
    return f"{suite}, batch {batch}, {drafter}, K {k}{lossy}"


@dataclass(frozen=True, slots=True)
class Selector:
    """None: any."""

    suite: str | None = None
    drafter: str | None = None
    rule: str | None = None
    k: int | None = None
    batch: int | None = None

    def matches(self, place: Place) -> bool:
        wanted = (self.suite, self.drafter, self.rule, self.k, self.batch)
        return all(w is None or w == p for w, p in zip(wanted, place, strict=True))

    def __str__(self) -> str:
        parts = [(key, getattr(self, key)) for key in _KEYS]
        return ",".join(f"{key}={value}" for key, value in parts if value is not None)


ANY = Selector()


def parse_selector(text: str, where: str) -> Selector:
    """Read the text between the brackets; a word alone is a suite. Raises UsageError."""
    found: dict[str, str | int] = {}
    for part in _SEPARATOR.split(text.strip()):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            key, value = "suite", key
        if key not in _KEYS or not value:
            raise UsageError(f"{where}: cannot read the selector {text!r}", f"write {'=..,'.join(_KEYS)}=.. or a suite")
        if key in found:
            raise UsageError(f"{where}: the selector {text!r} names {key} twice", "say it once")
        if key in ("k", "batch"):
            if not value.isdecimal():
                raise UsageError(f"{where}: {key} must be a whole number, not {value!r}", f"write {key}=4")
            found[key] = int(value)
        else:
            found[key] = value
    return Selector(**found)  # type: ignore[arg-type]


def require_match(selector: Selector, places: Iterable[Place], where: str) -> None:
    """Raises UsageError, naming what there is, where no place is selected."""
    places = list(places)
    if selector == ANY or any(selector.matches(p) for p in places):
        return
    have = [
        f"{name} {', '.join(map(str, dict.fromkeys(p[i] for p in places)))}"
        for i, name in ((0, "suite"), (1, "drafter"), (3, "k"), (4, "batch"))
    ]
    raise UsageError(f"{where}: no cell is {selector}", f"there are {'; '.join(have)}")
