"""A prompt and a suite of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a suite: chat `messages` or a raw `text`, never both."""

    id: str
    category: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.text is None):
            raise ValueError(f"prompt {self.id!r} needs messages or a text, not both")


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts under one name. `notes` say what the loader left out, and why."""

    name: str
    source: str  # "bundled" or the path
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def digest(self) -> str:
        """Hash of the prompts really used: a filter, a sample or a limit changes it."""
        rows = [
            [p.id, p.category, p.text, [[m.role, m.content] for m in p.messages or ()], p.max_new_tokens]
            for p in self.prompts
        ]
        return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()[:16]
