"""What a gate asks for: tolerances and requirements, from the command line and the [gate] table of a TOML file.

    [gate]
    tolerance = "1%"                      # of every exact metric

    [[gate.threshold]]
    metric = "speedup"
    cells = "suite=code,batch=1"          # all cells if left out
    tolerance = "8%"                      # worse by more than this fails
    level = "warn"                        # or "error", the default

    [[gate.require]]
    check = "acceptance_length[code]>=2.0"
    level = "error"

Of several thresholds for a cell the last one holds; those of the command line come last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from spectune.errors import UsageError
from spectune.gating.metric import Kind, Level, Metric, metric
from spectune.gating.requirement import Requirement, parse_requirement
from spectune.gating.selector import ANY, Place, Selector, parse_selector
from spectune.sweeping.toml_table import read_table

_THRESHOLD_KEYS = {"metric", "cells", "tolerance", "level"}
_REQUIRE_KEYS = {"check", "level"}
_GATE_KEYS = {"tolerance", "threshold", "require"}
# A whole metric, with or without cells: "speedup[code]".
_NAMED = re.compile(r"\s*(?P<metric>\w+)\s*(?:\[(?P<selector>.*)\])?\s*")


@dataclass(frozen=True, slots=True)
class Threshold:
    """`metric` None: every exact metric. `tolerance` None: the metric's own."""

    metric: Metric | None
    selector: Selector
    tolerance: float | None
    level: Level


@dataclass(frozen=True, slots=True)
class Limit:
    """What holds for one metric of one cell; `stated` where somebody said it."""

    tolerance: float
    level: Level
    stated: bool


@dataclass(frozen=True, slots=True)
class Policy:
    thresholds: tuple[Threshold, ...] = ()
    requirements: tuple[tuple[Requirement, Level], ...] = ()
    only: Kind | None = None

    def limit(self, m: Metric, place: Place) -> Limit:
        tolerance, level, stated = m.tolerance, m.level, False
        for t in self.thresholds:
            if not t.selector.matches(place) or not (t.metric is m or (t.metric is None and m.kind == "exact")):
                continue
            level = t.level if t.metric is m else level
            if t.tolerance is not None:
                tolerance, stated = t.tolerance, True
        return Limit(tolerance, level, stated)


def make_policy(tolerances: Sequence[str], requirements: Sequence[str], file: Path | None, only: str | None) -> Policy:
    """Raises UsageError for anything that cannot be read."""
    if only is not None and only not in get_args(Kind):
        raise UsageError(f"--only does not know {only!r}", f"choose from {', '.join(get_args(Kind))}")
    from_file = Policy() if file is None else read_policy(file)
    return Policy(
        (*from_file.thresholds, *(_from_option(text) for text in tolerances)),
        (*from_file.requirements, *((parse_requirement(text), "error") for text in requirements)),
        only,  # type: ignore[arg-type]
    )


def read_policy(path: Path) -> Policy:
    """The [gate] table; tables of other commands are left alone."""
    table = read_table(path, "gate", "put the thresholds under lines [[gate.threshold]]")
    _known(table, _GATE_KEYS, f"{path}: [gate]")
    thresholds = []
    if "tolerance" in table:
        where = f"{path}: tolerance"
        thresholds.append(Threshold(None, ANY, parse_tolerance(_text(table["tolerance"], where), where), "error"))
    thresholds += [_threshold(t, f"{path}: gate.threshold {n}") for n, t in _tables(table, "threshold", path)]
    requirements = [_requirement(t, f"{path}: gate.require {n}") for n, t in _tables(table, "require", path)]
    return Policy(tuple(thresholds), tuple(requirements))


def parse_tolerance(text: str, where: str) -> float:
    """`1%` or `0.01`, as a share. Raises UsageError."""
    number = text.strip()
    scale = 0.01 if number.endswith("%") else 1.0
    try:
        value = scale * float(number.removesuffix("%").replace("_", "?"))  # 1_0 is not 10
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UsageError(f"{where}: {text!r} is no tolerance", "write a share from 0 to 100%, as 1% or 0.01")
    return value


def _from_option(text: str) -> Threshold:
    where = "--tolerance"
    name, equals, value = text.rpartition("=")
    if not equals:
        return Threshold(None, ANY, parse_tolerance(text, where), "error")
    found = _NAMED.fullmatch(name)
    if found is None:
        raise UsageError(f"{where}: cannot read {text!r}", "write 1%, outputs=20% or speedup[code]=8%")
    m = _tolerant(metric(found["metric"], where), where)
    selector = ANY if found["selector"] is None else parse_selector(found["selector"], where)
    return Threshold(m, selector, parse_tolerance(value, where), m.level)


def _threshold(table: dict[str, Any], where: str) -> Threshold:
    _known(table, _THRESHOLD_KEYS, where)
    if "metric" not in table:
        raise UsageError(f"{where} names no metric", 'add metric = "speedup"')
    m = metric(_text(table["metric"], where), where)
    selector = parse_selector(_text(table["cells"], where), where) if "cells" in table else ANY
    if not {"tolerance", "level"} & set(table):
        raise UsageError(f"{where} changes nothing", 'add tolerance = "8%", or level')
    tolerance = None
    if "tolerance" in table:
        _tolerant(m, where)
        tolerance = parse_tolerance(_text(table["tolerance"], where), where)
    return Threshold(m, selector, tolerance, _level(table, where, m.level))


def _tolerant(m: Metric, where: str) -> Metric:
    if m.always:
        raise UsageError(f"{where}: {m.name} is right or wrong and has no tolerance", "leave it out")
    return m


def _requirement(table: dict[str, Any], where: str) -> tuple[Requirement, Level]:
    _known(table, _REQUIRE_KEYS, where)
    if "check" not in table:
        raise UsageError(f"{where} has no check", 'add check = "speedup>=1.3"')
    return parse_requirement(_text(table["check"], where), where), _level(table, where, "error")


def _level(table: dict[str, Any], where: str, default: Level) -> Level:
    level = table.get("level", default)
    if level not in get_args(Level):
        raise UsageError(f"{where}: no level {level!r}", f"choose from {', '.join(get_args(Level))}")
    return level  # type: ignore[no-any-return]


def _tables(table: dict[str, Any], name: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    found = table.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UsageError(f"{path}: gate.{name} must be a list of tables", f"write [[gate.{name}]]")
    return list(enumerate(found, 1))


def _known(table: dict[str, Any], keys: set[str], where: str) -> None:
    if unknown := sorted(set(table) - keys):
        raise UsageError(f"{where}: no key {unknown[0]!r}", f"known are {', '.join(sorted(keys))}")


def _text(value: object, where: str) -> str:
    """A number counts as written: tolerance = 0.01."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{where}: must be a text, not {value!r}", 'put it in quotes, as "1%"')
    return str(value)
