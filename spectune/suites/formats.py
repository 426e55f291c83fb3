"""The row formats, told apart by their fields, and the step from a row to a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spectune.suites import content
from spectune.suites.content import Content, Reader, json_type
from spectune.suites.prompt import Prompt
from spectune.suites.row import BadRow, Fields

ID_FIELDS = ("id", "question_id", "task_id", "unique_id")
CATEGORY_FIELDS = ("category", "subject")
LENGTH_FIELDS = ("max_new_tokens", "max_tokens", "max_completion_tokens", "output_tokens")
SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True, slots=True)
class Format:
    """A row is in this format when it has all `fields`."""

    name: str
    fields: tuple[str, ...]
    read: Reader
    category: str = "default"


# The first match wins, so a format stands above those that ask for fewer of the same fields.
FORMATS = (
    Format("HumanEval", ("prompt", "task_id", "entry_point"), content.text_field("prompt"), "code"),
    Format("MBPP", ("text", "test_list"), content.mbpp_field("text"), "code"),
    Format("MBPP sanitized", ("prompt", "test_list"), content.mbpp_field("prompt"), "code"),
    Format("SPEED-Bench messages", ("messages", "question_id"), content.messages_field("messages")),
    Format("messages", ("messages",), content.messages_field("messages")),
    Format("MT-Bench, Spec-Bench or SPEED-Bench", ("turns", "question_id"), content.turns_field("turns")),
    Format("turns", ("turns",), content.turns_field("turns")),
    Format("ShareGPT", ("conversations",), content.conversations_field("conversations")),
    Format("vLLM custom", ("prompt", "output_tokens"), content.text_field("prompt")),
    Format("prompt", ("prompt",), content.text_field("prompt")),
    Format("GSM8K", ("question", "answer"), content.user_field("question"), "math"),
    Format("question", ("question",), content.user_field("question")),
    Format("MATH", ("problem", "solution"), content.user_field("problem"), "math"),
    Format("problem", ("problem",), content.user_field("problem")),
    Format("text", ("text",), content.text_field("text")),
    Format("instruction", ("instruction",), content.user_field("instruction", "input", "context")),
)


@dataclass(frozen=True, slots=True)
class Parsed:
    """`prompt` is None for a skipped row; `note` says what was left out of it."""

    format: str
    prompt: Prompt | None
    note: str | None


def parse_row(fields: Fields, *, column: str | None, default_id: str) -> Parsed:
    """The prompt that a row holds. `column` names the field to read in place of the sniffed one.

    Raises BadRow for a row without a prompt, or with fields of a wrong type or value.
    """
    form = sniff(fields) if column is None else _of_column(fields, column)
    found = form.read(fields)
    prompt = _prompt(fields, form, found, default_id) if found.messages or found.text else None
    return Parsed(form.name, prompt, found.note)


def sniff(fields: Fields) -> Format:
    """The format of a row. Raises BadRow if it has none of the known fields."""
    present = {name for name, value in fields.items() if value is not None}
    for form in FORMATS:
        if present.issuperset(form.fields):
            return form
    known = ", ".join(dict.fromkeys(form.fields[0] for form in FORMATS))
    raise BadRow(
        f"no prompt in this row; its fields are: {_names(fields)}",
        f"name the field with --column, or call it one of {known}",
    )


def _of_column(fields: Fields, column: str) -> Format:
    if column not in fields:
        raise BadRow(f"no column {column!r}; the columns are: {_names(fields)}")
    value = fields[column]
    if value is None:
        raise BadRow(f"`{column}` is empty")
    if isinstance(value, list) and value and isinstance(value[0], dict):
        reader = content.conversations_field if "from" in value[0] else content.messages_field
    elif isinstance(value, list):
        reader = content.turns_field
    else:
        reader = content.text_field if column in ("prompt", "text") else content.user_field
    return Format(f"column {column}", (column,), reader(column))


def _prompt(fields: Fields, form: Format, found: Content, default_id: str) -> Prompt:
    prompt = Prompt(
        id=_id(fields, default_id),
        category=_category(fields, form.category),
        messages=found.messages,
        text=found.text,
        max_new_tokens=_length(fields),
    )
    said = [prompt.text or "", *(m.content for m in prompt.messages or ())]
    if any(SPEED_BENCH_PLACEHOLDER in text for text in said):
        raise BadRow(
            "SPEED-Bench placeholder instead of a prompt: the published rows hold no text",
            "prepare the data with NVIDIA's specdec_bench first, then load the prepared file",
        )
    for text in (*said, prompt.id, prompt.category):
        if not _is_unicode(text):
            raise BadRow("a lone surrogate (half of a character written as \\uD800-\\uDFFF)")
    return prompt


def _id(fields: Fields, default: str) -> str:
    value, name = _first(fields, ID_FIELDS)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRow(f"`{name}` must be a string or a whole number, not {json_type(value)}")
    if not str(value).strip():
        raise BadRow(f"`{name}` is empty")
    return str(value)


def _category(fields: Fields, default: str) -> str:
    value, name = _first(fields, CATEGORY_FIELDS)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"`{name}` must be a string, not {json_type(value)}")
    return (value or "").strip() or default


def _length(fields: Fields) -> int | None:
    value, name = _first(fields, LENGTH_FIELDS)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRow(f"`{name}` must be a whole number, not {json_type(value)}")
    if value < 1:
        raise BadRow(f"`{name}` is {value}; it must be at least 1")
    return value


def _first(fields: Fields, names: tuple[str, ...]) -> tuple[Any, str]:
    return next(((fields[n], n) for n in names if fields.get(n) is not None), (None, names[0]))


def _names(fields: Fields) -> str:
    return ", ".join(map(str, fields)) or "(none)"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
