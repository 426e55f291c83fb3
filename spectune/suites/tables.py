"""Rows of CSV and Parquet files, and the lines of a text file."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from typing import Any

from spectune.errors import UsageError
from spectune.suites.formats import LENGTH_FIELDS
from spectune.suites.row import Row

_SMALL_NUMBER = re.compile("-?[0-9]{1,9}")


def text_rows(text: str) -> Iterator[Row]:
    """One prompt on each line, said by a user. Blank lines are skipped."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield Row(number, {"messages": [{"role": "user", "content": line.strip()}]})


def csv_rows(text: str, file: str) -> Iterator[Row]:
    """The records below the header line; an empty cell counts as absent.

    Raises UsageError for broken quoting, a doubled column, or a record longer than the header.
    """
    # The module's limit of 128 KiB a cell is below a prompt of 32k tokens.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            if header is None:
                header = _header(cells, file, line) if any(cells) else None
            elif len(cells) > len(header):
                raise UsageError(
                    f"{file}:{line}: {len(cells)} cells below a header of {len(header)}",
                    "put a cell that holds a comma in double quotes",
                )
            elif any(cells):
                yield Row(line, {name: _cell(name, cell) for name, cell in zip(header, cells, strict=False)})
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{file}:{line}: not valid CSV: {error}") from error


def parquet_rows(data: bytes, file: str) -> list[Row]:
    """The records of a Parquet file. Raises UsageError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        records = pq.read_table(io.BytesIO(data)).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{file}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
    return [Row(number, fields) for number, fields in enumerate(records, start=1)]


def _header(cells: list[str], file: str, line: int) -> list[str]:
    names = [cell.strip() for cell in cells]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise UsageError(f"{file}:{line}: the column {doubled!r} stands twice in the header")
    return names


def _cell(name: str, cell: str) -> Any:
    if name in LENGTH_FIELDS and _SMALL_NUMBER.fullmatch(cell):
        return int(cell)
    return cell or None
