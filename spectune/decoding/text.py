"""Text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_RESTART = 64  # tokens after which decoding starts afresh, so that long outputs cost linear time


def split_text(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; "" while a character that is split over tokens is incomplete."""
    pieces: list[str] = []
    shown = ""
    start = 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[start:end]), skip_special_tokens=True)
        if text.endswith("\ufffd"):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        shown = text
        if end - start > _RESTART and pieces[-1]:
            start, shown = end - 1, tokenizer.decode([tokens[end - 1]], skip_special_tokens=True)
    return pieces
