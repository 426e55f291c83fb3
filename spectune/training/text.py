"""A row of training text: a prompt and what the target wrote behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from spectune.training.corpus import TextRow

MAX_LENGTH = 512  # tokens of a row
_SHORTEST = 4  # answer tokens; below that there is nothing to learn from a row
_HELD_OUT = 20  # one prompt in so many


@dataclass(frozen=True)
class Text:
    """Token ids; the first `prompt` of them were given, the rest was written by the target."""

    ids: tuple[int, ...]
    prompt: int

    @cached_property
    def key(self) -> str:
        """Names the token ids."""
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:20]

    @cached_property
    def is_held_out(self) -> bool:
        """A property of the prompt: all answers to it are on the same side, however large the corpus is."""
        digest = hashlib.sha256(json.dumps(self.ids[: self.prompt]).encode()).digest()
        return int.from_bytes(digest[:4], "big") % _HELD_OUT == 0

    @property
    def written(self) -> int:
        return len(self.ids) - self.prompt


def texts_of(rows: Iterable[TextRow], max_length: int = MAX_LENGTH) -> list[Text]:
    """Rows as training text. Of a long prompt its end is kept, of a long answer its beginning."""
    texts = []
    for row in rows:
        prompt = row.prompt[-(max_length // 2) :]
        ids = (prompt + row.output)[:max_length]
        if len(ids) - len(prompt) >= _SHORTEST:
            texts.append(Text(ids, len(prompt)))
    return texts


def texts_digest(texts: Iterable[Text]) -> str:
    """Hash of texts in their order."""
    return hashlib.sha256(json.dumps([[t.key, t.prompt] for t in texts]).encode()).hexdigest()[:16]
