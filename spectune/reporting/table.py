"""The export: one row per cell as CSV, Parquet or JSON. pandas is only imported here.

The columns are those of `spectune.reporting.row`. Acceptance by position is spread over columns, one per
position (`joint_acceptance_1`, …); other lists become text. Failed cells have a row with `status` failed.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from spectune.errors import UsageError
from spectune.reporting.summary import Summary

SUFFIXES = (".csv", ".parquet", ".json")
_BY_POSITION = ("joint_acceptance", "conditional_acceptance")
_WHOLE = (
    "k",
    "batch",
    "rounds",
    "undrafted_rounds",
    "drafted",
    "accepted",
    "prompts",
    "repeats",
    "bytes_per_plain_step",
    "bytes_per_round",
)
_YES_NO = ("synthetic", "full_occupancy")


def export(summary: Summary, path: Path) -> bytes:
    """The content of `path`, in the format of its suffix. Raises UsageError for an unknown suffix."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"cannot export to {path.name!r}", f"end the name with one of {' '.join(SUFFIXES)}")
    rows = [*summary.rows, *summary.failed_rows]
    if suffix == ".json":
        columns = list(rows[0])
        return (_json([{c: row.get(c) for c in columns} for row in rows]) + "\n").encode()
    import pandas as pd

    longest = max(p.spec.k for p in summary.profiles)
    frame = pd.DataFrame([_flat(row, longest) for row in rows])
    # Columns of one type each, so that a null stays a null: pandas would turn counts into floats.
    for column in frame.columns:
        if column in _WHOLE:
            frame[column] = frame[column].astype("Int64")
        elif column in _YES_NO:
            frame[column] = frame[column].astype("boolean")
        elif column in _TEXTS:
            frame[column] = frame[column].astype("string")
        else:
            frame[column] = frame[column].astype("Float64")
    if suffix == ".csv":
        return str(frame.to_csv(index=False, lineterminator="\n")).encode()
    out = io.BytesIO()
    frame.to_parquet(out, index=False)
    return bytes(out.getvalue())


def _json(rows: list[dict[str, Any]]) -> str:
    """A strict JSON array."""
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False)


_TEXTS = (
    "key",
    "status",
    "suite",
    "drafter",
    "rule",
    "failure",
    "output_check",
    "verdict",
    "no_speedup_reason",
    "no_interval_reason",
    "repeat_speedups",
    "excluded",
    "warnings",
)


def _flat(row: dict[str, Any], longest: int) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in _BY_POSITION:
            flat |= {f"{name}_{i + 1}": value[i] if i < len(value) else None for i in range(longest)}
        elif name == "repeat_speedups":
            flat[name] = " ".join(map(repr, value)) or None
        elif name == "warnings":
            flat[name] = "\n".join(value) or None
        else:
            flat[name] = value
    return flat
