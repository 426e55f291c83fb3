"""From a path to prompts: reads the bytes, picks the reader by suffix, checks every row."""

from __future__ import annotations

import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from spectune.errors import UsageError
from spectune.suites.formats import parse_row
from spectune.suites.jsonrows import json_rows
from spectune.suites.prompt import Prompt
from spectune.suites.row import BadRow, Row
from spectune.suites.tables import csv_rows, parquet_rows, text_rows

SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Reading:
    """A file as it was understood. `rows` counts the skipped rows too."""

    format: str
    rows: int
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...]


def read_prompts(path: Path, *, column: str | None = None, label: str) -> Reading:
    """All prompts of a file. `label` is what errors call the file.

    Raises UsageError, with the file and the line, for a file that cannot be read or understood, and for
    two rows with one id.
    """
    rows = _rows(path, label, column)
    formats: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for row in rows:
        try:
            parsed = parse_row(row.fields, column=column, default_id=f"{stem(path)}-{row.number}")
        except BadRow as error:
            raise UsageError(f"{label}:{row.number}: {error.message}", error.hint) from error
        formats[parsed.format] += 1
        if parsed.note:
            notes[parsed.note] += 1
        if parsed.prompt is None:
            continue
        first = lines.setdefault(parsed.prompt.id, row.number)
        if first != row.number:
            raise UsageError(
                f"{label}:{row.number}: the id {parsed.prompt.id!r} is already used on line {first}",
                "give every row its own id, or none",
            )
        prompts.append(parsed.prompt)
    said = tuple(f"{count} {'row' if count == 1 else 'rows'}: {note}" for note, count in notes.items())
    return Reading(" + ".join(formats), formats.total(), tuple(prompts), said)


def stem(path: PurePath) -> str:
    """The file name without its suffixes: `a/b.jsonl.gz` gives `b`."""
    return PurePath(path.name.removesuffix(".gz")).stem


def _rows(path: Path, file: str, column: str | None) -> Iterable[Row]:
    suffix = PurePath(path.name.removesuffix(".gz")).suffix.lower()
    data = _bytes(path, file)
    if suffix not in SUFFIXES:
        raise UsageError(f"{file}: unknown file type {suffix!r}", f"use one of {', '.join(SUFFIXES)} (or .gz of it)")
    if suffix == ".parquet":
        return parquet_rows(data, file)
    text = _decode(data, file)
    if suffix == ".csv":
        return csv_rows(text, file)
    if suffix == ".txt":
        if column is not None:
            raise UsageError(f"{file}: a .txt file has no columns", "leave --column out")
        return text_rows(text)
    return json_rows(text, file)


def _bytes(path: Path, file: str) -> bytes:
    if not os.path.exists(path):
        raise UsageError(f"{file}: no such file", "`spectune suites list` shows the bundled suites")
    if path.is_dir():
        raise UsageError(f"{file}: is a directory", "name a file inside it")
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.name.endswith(".gz") else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{file}: not a readable gzip file: {error}") from error
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from error


def _decode(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{file}:{line}: not UTF-8 text", "convert the file to UTF-8") from error
