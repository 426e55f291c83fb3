"""What one field of a row says: a raw text, chat messages, or nothing usable.

`prompt` and `text` are taken as raw text, exactly as stored. Every other field is something said to an
assistant, so it becomes a user message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spectune.suites.prompt import Message
from spectune.suites.row import BadRow, Fields

ROLES = ("system", "user", "assistant")
LATER_TURNS = "only the first user turn is used"
FINAL_ANSWER = "the final assistant message is left out, since it is what the model has to write"
NO_HUMAN_START = "skipped: the conversation does not start with a human turn"
EMPTY_START = "skipped: the first human turn is empty"
TOO_FEW_TURNS = "skipped: the conversation has fewer than 2 turns"


@dataclass(frozen=True, slots=True)
class Content:
    """`messages` or `text`; neither when the row is skipped, and then `note` says why."""

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    note: str | None = None


Reader = Callable[[Fields], Content]


def text_field(name: str) -> Reader:
    """A raw text; a list of texts (MT-Bench as published on the Hub) is read as turns."""

    def read(fields: Fields) -> Content:
        if isinstance(fields[name], list):
            return turns_field(name)(fields)
        return Content(text=_text(fields[name], name))

    return read


def user_field(name: str, *context: str) -> Reader:
    """A user message; non-empty `context` fields follow it after a blank line."""

    def read(fields: Fields) -> Content:
        parts = [_text(fields[name], name)]
        parts += [_text(fields[c], c) for c in context if fields.get(c) not in (None, "")]
        return _user("\n\n".join(parts))

    return read


def mbpp_field(name: str) -> Reader:
    """The task followed by its tests: without them the name of the function to write is unknown."""

    def read(fields: Fields) -> Content:
        tests = _list(fields["test_list"], "test_list")
        lines = "\n".join(_text(test, "test_list") for test in tests)
        return _user(f"{_text(fields[name], name)}\n\nThe code has to pass these tests:\n{lines}")

    return read


def turns_field(name: str) -> Reader:
    """The first of a list of user turns; the later ones need answers that are not in the file."""

    def read(fields: Fields) -> Content:
        turns = _list(fields[name], name)
        note = LATER_TURNS if len(turns) > 1 else None
        return Content(messages=(Message("user", _text(turns[0], f"{name}[0]")),), note=note)

    return read


def messages_field(name: str) -> Reader:
    """A chat that ends with a user message, once answers at its end are left out."""

    def read(fields: Fields) -> Content:
        messages = [_message(item, f"{name}[{i}]") for i, item in enumerate(_list(fields[name], name))]
        note = FINAL_ANSWER if messages[-1].role == "assistant" else None
        while messages and messages[-1].role == "assistant":
            messages.pop()
        if not messages or messages[-1].role != "user":
            raise BadRow(f"`{name}` has no user message to answer")
        return Content(messages=tuple(messages), note=note)

    return read


def conversations_field(name: str) -> Reader:
    """ShareGPT: the first human turn of a conversation of at least two turns."""

    def read(fields: Fields) -> Content:
        turns = fields[name]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise BadRow(f"`{name}` must be a list of objects with `from` and `value`")
        if len(turns) < 2:
            return Content(note=TOO_FEW_TURNS)
        if turns[0].get("from") not in ("human", "user"):
            return Content(note=NO_HUMAN_START)
        first = turns[0].get("value")
        if isinstance(first, str) and not first.strip():
            return Content(note=EMPTY_START)
        note = LATER_TURNS if len(turns) > 2 else None
        return Content(messages=(Message("user", _text(first, f"{name}[0].value")),), note=note)

    return read


def _user(text: str) -> Content:
    return Content(messages=(Message("user", text),))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"`{name}` must be a string, not {json_type(value)}")
    if not value.strip():
        raise BadRow(f"`{name}` is empty")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{name}` must be a non-empty list, not {json_type(value)}")
    return value


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow(f"`{name}` must be an object with `role` and `content`, not {json_type(item)}")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise BadRow(f"`{name}.role` is {role!r}", f"use one of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_part(part, f"{name}.content") for part in content)
    # Templates treat an empty system message unlike a missing one, so it is kept as it is.
    if role != "user" and content == "":
        return Message(role, "")
    return Message(role, _text(content, f"{name}.content"))


def _part(part: Any, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise BadRow(f"`{name}` holds a part that is not text", "only text prompts can be measured")
    return str(part["text"])


def json_type(value: Any) -> str:
    """The type in the words of JSON: what the author of the file knows it by."""
    if value is None:
        return "null"
    if value == [] and isinstance(value, list):
        return "an empty list"
    names = {bool: "true/false", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")
