"""A tokenizer for models without text: words become ids by hashing, so that prompts keep their lengths.

What it decodes to is only a list of ids. Words are cut into pieces of up to eight letters, which on the bundled suites
gives about as many tokens as a trained vocabulary does (`tests/test_shapes.py` compares it with SmolLM2's).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

_PIECE = re.compile(r"\s?[^\W\d_]{1,8}|\s?\d|\s+(?=\s)|\s|[^\w\s]+|_")


class HashTokenizer:
    """The part of a Hugging Face tokenizer's interface that rendering and printing need.

    Args:
        vocab_size: ids are below it.
    """

    bos_token_id = None
    chat_template = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The same piece of text has the same id everywhere; there are no special tokens."""
        return {"input_ids": [self._id(piece) for piece in _PIECE.findall(text)]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The ids themselves: there is no text behind them."""
        return "".join(f"<{i}>" for i in ids)

    def _id(self, piece: str) -> int:
        return int.from_bytes(hashlib.sha256(piece.encode()).digest()[:8], "big") % self.vocab_size
