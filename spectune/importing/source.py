"""Reading other tools' files: every error names the file and the key."""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectune.errors import UsageError


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping out of a file, with typed reading. `place` is the file, and where inside it."""

    place: str
    values: Mapping[str, Any]

    @property
    def file(self) -> str:
        """The file alone."""
        return re.sub(r": (line|item) \d+$", "", self.place)

    def number(self, key: str, *, scale: float = 1.0) -> float | None:
        """A finite number, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(f"{self.place}: {key} is not a number: {value!r}")
        return value * scale

    def count(self, key: str) -> int | None:
        """A whole number of 0 or more."""
        value = self.number(key)
        if value is None:
            return None
        if value < 0 or value != int(value):
            raise UsageError(f"{self.place}: {key} is not a count: {value!r}")
        return int(value)

    def positive(self, key: str, *, scale: float = 1.0) -> float | None:
        """A number above 0; 0 stands for "not measured" in several tools, and is None."""
        value = self.number(key, scale=scale)
        if value is not None and value < 0:
            raise UsageError(f"{self.place}: {key} is below 0: {value!r}")
        return value or None

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) and value else None

    def rates(self, key: str) -> tuple[float, ...] | None:
        """A list of numbers; None where it is absent or empty."""
        value = self.values.get(key)
        if value is None or value == []:
            return None
        if not isinstance(value, list):
            raise UsageError(f"{self.place}: {key} is not a list: {value!r}")
        inner = Table(f"{self.place}: {key}", {str(i): v for i, v in enumerate(value)})
        return tuple(0.0 if (n := inner.number(str(i))) is None else n for i in range(len(value)))

    def histogram(self, key: str) -> dict[int, int] | None:
        """A mapping of whole numbers, which JSON writes as text, to counts."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise UsageError(f"{self.place}: {key} is not a mapping: {value!r}")
        inner = Table(f"{self.place}: {key}", value)
        found: dict[int, int] = {}
        for name in value:
            if not str(name).isdecimal():
                raise UsageError(f"{self.place}: {key}: {name!r} is not a whole number")
            found[int(name)] = inner.count(name) or 0
        return found

    def table(self, key: str) -> Table | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise UsageError(f"{self.place}: {key} is not a mapping: {value!r}")
        return Table(f"{self.place}: {key}", value)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def read_tables(path: Path) -> list[Table]:
    """The objects of a JSON file (one, or a list of them), of JSON lines, or the rows of a CSV file."""
    text = read_text(path)
    if not text.strip():
        raise UsageError(f"{path} is empty")
    if path.suffix.lower() == ".csv":
        return _csv_tables(path, text)
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        lines = ((n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip())
        return [_table(f"{path}: line {n}", _json(f"{path}: line {n}", line)) for n, line in lines]
    document = _json(str(path), text)
    if isinstance(document, list):
        return [_table(f"{path}: item {n}", item) for n, item in enumerate(document)]
    return [_table(str(path), document)]


def _json(place: str, text: str) -> Any:
    def refuse(constant: str) -> None:
        raise UsageError(f"{place}: {constant} is no number")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place} is no JSON: {error}", "was the file cut short?") from None


def _table(place: str, value: Any) -> Table:
    if not isinstance(value, dict):
        raise UsageError(f"{place} is not a JSON object")
    return Table(place, value)


def _csv_tables(path: Path, text: str) -> list[Table]:
    rows = csv.DictReader(text.splitlines(), restkey="")
    found = []
    for row in rows:
        if "" in row and isinstance(row[""], list):
            raise UsageError(f"{path}: line {rows.line_num} has more values than the header has names")
        values = {name.strip(): _value(value) for name, value in row.items() if name}
        found.append(Table(f"{path}: line {rows.line_num}", values))
    if not found:
        raise UsageError(f"{path} has no rows")
    return found


def _value(text: str | None) -> Any:
    """A field of a CSV file: a number, a JSON list or object, text, or None where it is empty."""
    text = (text or "").strip()
    if text in ("", "nan", "NaN", "None", "null"):
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        # Tables written by pandas hold dictionaries in Python's form.
        return ast.literal_eval(text) if text[0] in "[{" else text
    except (ValueError, SyntaxError):
        return text
