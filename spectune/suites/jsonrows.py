"""Rows of JSON lines or of one JSON array, each with the line it starts on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from spectune.errors import UsageError
from spectune.suites.content import json_type
from spectune.suites.row import Row


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_GAP = re.compile(r"[ \t\r\n]*")


def json_rows(text: str, file: str) -> Iterator[Row]:
    """The objects of a JSON array, or of a file with one object on each line; blank lines are skipped.

    Raises UsageError for anything that is not JSON and for rows that are not objects.
    """
    return _array(text, file) if text.lstrip().startswith("[") else _lines(text, file)


def _lines(text: str, file: str) -> Iterator[Row]:
    # Not splitlines(): U+2028 and the like may stand unescaped inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            value, end = _value(line, _skip(line, 0), file, number)
            if line[end:].strip():
                raise UsageError(f"{file}:{number}: text after the end of the JSON object", _LAYOUT)
            yield _row(value, file, number)


def _array(text: str, file: str) -> Iterator[Row]:
    at, line, seen = _skip(text, text.index("[") + 1), 1, 0
    if text[at : at + 1] == "]":
        return
    while True:
        line, seen = line + text.count("\n", seen, at), at
        value, at = _value(text, at, file, line)
        yield _row(value, file, line)
        at = _skip(text, at)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise UsageError(f"{file}:{_line(text, at)}: expected a comma or the end of the array", _LAYOUT)
        at = _skip(text, at + 1)
    end = _skip(text, at + 1)
    if end < len(text):
        raise UsageError(f"{file}:{_line(text, end)}: text after the end of the array", _LAYOUT)


_LAYOUT = "write one object on each line, or one array of objects"


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _skip(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return gap.end() if gap else at


def _value(text: str, at: int, file: str, line: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        bad = line + text.count("\n", at, error.pos)
        raise UsageError(f"{file}:{bad}: not valid JSON: {error.msg} (column {error.colno})", _LAYOUT) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}:{line}: not valid JSON: {error}") from error


def _row(value: Any, file: str, line: int) -> Row:
    if not isinstance(value, dict):
        raise UsageError(f"{file}:{line}: a row must be a JSON object, not {json_type(value)}", _LAYOUT)
    return Row(line, value)
