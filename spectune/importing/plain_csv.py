"""A table of one's own: one row per measurement, columns named as below, any of them left out.

k, batch, repeat, suite, drafter     what was measured; K 0 is plain decoding
rounds, drafted, accepted            counts
acceptance_length, bonus             tokens per round; `bonus` is included or excluded (or --bonus)
acceptance_rate                      accepted / drafted, between 0 and 1; acceptance_rate_percent: times 100
joint_1 …, conditional_1 …           rates by position; position_1 … with --rates joint or conditional
output_tokens, tokens_per_second     of the whole server
ttft_seconds, tpot_seconds           or ttft_ms, tpot_ms
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from spectune.errors import UsageError
from spectune.importing.definitions import Answers, Bonus, Given, acceptance_fields
from spectune.importing.record import Point
from spectune.importing.source import Table

_COLUMNS = (
    "k", "batch", "repeat", "suite", "drafter", "rounds", "drafted", "accepted", "acceptance_length", "bonus",
    "acceptance_rate", "acceptance_rate_percent", "output_tokens", "tokens_per_second", "ttft_seconds", "ttft_ms",
    "tpot_seconds", "tpot_ms",
)  # fmt: skip
_FULL_DRAFTS = "length and joint rates follow from the conditional ones for drafts that are never shortened"
_POSITION = re.compile(r"(joint|conditional|position)_([1-9]\d*)")


def is_format(tables: Sequence[Table]) -> bool:
    return ": line " in tables[0].place and all(_known(name) for name in tables[0].values)


def points(tables: Sequence[Table], answers: Answers) -> list[Point]:
    """One point per row. Raises UsageError for a column that is not known here, which would be lost in silence."""
    unknown = [name for name in tables[0].values if not _known(name)]
    if unknown:
        raise UsageError(f"{tables[0].place}: unknown column {unknown[0]!r}", f"columns are {', '.join(_COLUMNS)}")
    return [_point(table, answers) for table in tables]


def _known(name: str) -> bool:
    return name in _COLUMNS or _POSITION.fullmatch(name) is not None


def _point(table: Table, answers: Answers) -> Point:
    k = answers.k if (own := table.count("k")) is None else own
    batch = table.count("batch") or answers.batch
    joint, conditional = _rates(table, answers)
    given = Given(
        rounds=table.count("rounds"),
        drafted=table.count("drafted"),
        accepted=table.count("accepted"),
        length=table.number("acceptance_length"),
        bonus=_bonus(table),
        rate=_either(table, "acceptance_rate", "acceptance_rate_percent", 0.01),
        joint=joint,
        conditional=conditional,
        keys={"length": "acceptance_length", "rate": "acceptance_rate", "joint": "joint rates"},
    )
    found = acceptance_fields(given, table.place, k, answers)
    missing = found.pop("missing")
    if k is None:
        missing["k"] = "no column k: --k"
    if batch is None:
        missing["batch"] = "no column batch: --batch"
    return Point(
        file=table.place,
        format="csv",
        suite=table.text("suite") or answers.suite,
        drafter=table.text("drafter") or answers.drafter,
        k=k,
        batch=batch,
        repeat=table.count("repeat") or 0,
        output_tokens=table.count("output_tokens"),
        tokens_per_second=table.positive("tokens_per_second"),
        ttft_seconds=_either(table, "ttft_seconds", "ttft_ms", 1e-3),
        tpot_seconds=_either(table, "tpot_seconds", "tpot_ms", 1e-3) or None,
        missing=missing,
        notes=(_FULL_DRAFTS,) if conditional and found["joint"] and joint is None else (),
        **found,
    )


def _bonus(table: Table) -> Bonus | None:
    match table.values.get("bonus"):
        case None:
            return None
        case "included":
            return "included"
        case "excluded":
            return "excluded"
        case other:
            raise UsageError(f"{table.place}: bonus is included or excluded, not {other!r}")


def _either(table: Table, name: str, other: str, scale: float) -> float | None:
    value = table.number(name)
    return table.number(other, scale=scale) if value is None else value


def _rates(table: Table, answers: Answers) -> tuple[list[float] | None, list[float] | None]:
    """Joint and conditional rates by position."""
    found: dict[str, list[float]] = {}
    for kind in ("joint", "conditional", "position"):
        places = sorted(int(m[2]) for n in table.values if (m := _POSITION.fullmatch(n)) and m[1] == kind)
        values = [table.number(f"{kind}_{i}") for i in places]
        while values and values[-1] is None:  # a row of a smaller K
            values.pop()
        if places[: len(values)] != list(range(1, len(values) + 1)) or None in values:
            raise UsageError(f"{table.place}: {kind}_1 and the following have a gap")
        if values:
            found[kind] = [v for v in values if v is not None]
    if "position" in found:
        if answers.rates is None:
            raise UsageError(
                f"{table.place}: position_1 does not say whether rates are joint or conditional",
                "add --rates joint or --rates conditional, or name the columns joint_1 or conditional_1",
            )
        found[answers.rates] = found.pop("position")
    return found.get("joint"), found.get("conditional")
