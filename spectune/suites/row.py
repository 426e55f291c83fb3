"""A row as it stands in a file, before anybody knows what its fields mean, and a prompt as a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spectune.suites.prompt import Prompt

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """`number` counts from 1: a line of a text file, a record of a Parquet file."""

    number: int
    fields: Fields


class BadRow(ValueError):
    """A row cannot be understood. The reader adds the file and the line."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def to_fields(prompt: Prompt) -> dict[str, Any]:
    """The prompt as a row of our own format; loading it gives the same prompt again."""
    fields: dict[str, Any] = {"id": prompt.id, "category": prompt.category}
    if prompt.messages is not None:
        fields["messages"] = [{"role": m.role, "content": m.content} for m in prompt.messages]
    else:
        fields["prompt"] = prompt.text
    if prompt.max_new_tokens is not None:
        fields["max_new_tokens"] = prompt.max_new_tokens
    return fields
