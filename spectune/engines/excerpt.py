"""The start of what a cell wrote, with the origin of each token, for people to read."""

from __future__ import annotations

from typing import Any

from spectune.decoding.generation import Generation
from spectune.decoding.text import split_text
from spectune.engines.engine import Request
from spectune.sweeping.cell import EXCERPT_PROMPT, EXCERPT_TOKENS, Excerpt, ExcerptPiece


def to_excerpt(request: Request, generation: Generation, tokenizer: Any) -> Excerpt:
    """The first tokens of a generation, neighbours of one kind and round merged, below the start of its prompt."""
    # Characters are at most a few bytes and a token is at least one: the rest of a long prompt is never decoded.
    prompt = tokenizer.decode(list(request.token_ids[: 4 * EXCERPT_PROMPT]), skip_special_tokens=True)
    tokens = generation.tokens[:EXCERPT_TOKENS]
    rounds = [0] + [n for n, r in enumerate(generation.rounds, 1) for _ in range(r.emitted)]
    merged: list[tuple[str, tuple[str, int], int]] = []
    for text, kind, n in zip(split_text(tokenizer, tokens), generation.origins, rounds, strict=False):
        if merged and merged[-1][1] == (kind, n):
            before, same, count = merged.pop()
            merged.append((before + text, same, count + 1))
        else:
            merged.append((text, (kind, n), 1))
    return Excerpt(
        id=request.id,
        prompt=_storable(prompt[:EXCERPT_PROMPT]),
        prompt_cut=len(prompt) > EXCERPT_PROMPT or len(request.token_ids) > 4 * EXCERPT_PROMPT,
        pieces=tuple(
            ExcerptPiece(text=_storable(text), kind=kind, tokens=count)  # type: ignore[arg-type]
            for text, (kind, _), count in merged
        ),
        cut=len(generation.tokens) > EXCERPT_TOKENS,
    )


def _storable(text: str) -> str:
    """A cell file is UTF-8, which has no lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")
