"""The user's own file to train on: prompts for the target to answer, or texts that are ready.

Rows are those of a suite's file. One with an answer (a `completion` or `response`, a last message of the assistant, a
second turn of a ShareGPT conversation) is a ready text; the target answers the others.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from spectune.decoding.loading import Loaded
from spectune.errors import UsageError
from spectune.suites.files import read_prompts
from spectune.suites.formats import parse_row
from spectune.suites.jsonrows import json_rows
from spectune.suites.prompt import Prompt, Suite
from spectune.suites.render import render
from spectune.training.corpus import TextRow, require_tokenizer

_ANSWERS = ("completion", "response")


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file's rows: `asked` are to be answered by the target, `ready` have their answers."""

    path: Path
    asked: tuple[Prompt, ...]
    ready: tuple[tuple[Prompt, str], ...]

    @property
    def digest(self) -> str:
        """Hash of the prompts that the target answers."""
        return Suite(self.path.name, str(self.path), self.asked).digest

    def rows(self, target: Loaded, first: int) -> list[TextRow]:
        """The ready texts as token ids, numbered from `first` on."""
        tokenizer = require_tokenizer(target)
        stop = tokenizer.eos_token_id
        rows = []
        for number, (prompt, answer) in enumerate(self.ready, first):
            output = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
            output += [stop] if stop in target.stop_ids and output[-1:] != [stop] else []
            rows.append(TextRow(number, prompt.id, tuple(render(prompt, tokenizer)), tuple(output), None))
        return rows


def read_text_file(path: Path) -> TextFile:
    """Read a file of prompts or texts.

    Raises:
        UsageError: a file that cannot be read or understood (naming the line), or that holds nothing.
    """
    label = str(path)
    prompts = read_prompts(path, label=label).prompts  # checks every row
    if PurePath(path.name.removesuffix(".gz")).suffix.lower() not in (".json", ".jsonl", ".ndjson"):
        return TextFile(path, prompts, ())
    asked, ready = [], []
    for row in json_rows(_read(path), label):
        prompt = parse_row(row.fields, column=None, default_id=f"{path.name}-{row.number}").prompt
        answer = _answer(row.fields)
        if prompt is not None and answer is not None:
            ready.append((prompt, answer))
        elif prompt is not None:
            asked.append(prompt)
    if not asked and not ready:
        raise UsageError(f"{label}: nothing to train on", "give rows with a prompt, or with a prompt and a response")
    return TextFile(path, tuple(asked), tuple(ready))


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8-sig")


def _answer(fields: Mapping[str, Any]) -> str | None:
    """The answer that a row brings along."""
    for name in _ANSWERS:
        if isinstance(fields.get(name), str) and fields[name].strip():
            return str(fields[name])
    messages = fields.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        last = messages[-1]
        if last.get("role") == "assistant" and isinstance(last.get("content"), str) and last["content"].strip():
            return str(last["content"])
    turns = fields.get("conversations")
    if isinstance(turns, list) and len(turns) > 1 and isinstance(turns[1], dict):
        said = turns[1].get("value")
        if turns[1].get("from") in ("gpt", "assistant") and isinstance(said, str) and said.strip():
            return said
    return None
