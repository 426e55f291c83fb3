"""Prompt lookup: propose what followed the last occurrence of the current ending (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectune.decoding.drafter import Draft, Kept, Round, Row

MIN_NGRAM = 1
MAX_NGRAM = 4


class NgramIndex:
    """Where each n-gram of a growing text was last continued.

    An n-gram is entered when the token behind it arrives, so the text's own ending never matches itself.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.sizes = range(max_n, min_n - 1, -1)  # longest first
        self.continuation: dict[tuple[int, ...], int] = {}
        self.indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index `tokens`, of which a prefix has been indexed before."""
        for end in range(max(self.indexed, 1), len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self.continuation[tuple(tokens[end - n : end])] = end
        self.indexed = len(tokens)

    def lookup(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that followed the longest, then most recent, match of the ending."""
        for n in self.sizes:
            if n <= len(tokens):
                start = self.continuation.get(tuple(tokens[-n:]))
                if start is not None:
                    return list(tokens[start : start + limit])
        return []


class NgramDrafter:
    """Drafts by lookup in the row's own text; has no weights and takes no forward."""

    device: torch.device | None = None
    taps: tuple[int, ...] = ()

    def __init__(self, min_n: int = MIN_NGRAM, max_n: int = MAX_NGRAM) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self.indexes: list[NgramIndex] = []

    def start(self, rows: int, capacity: int) -> None:
        self.indexes = [NgramIndex(self.min_n, self.max_n) for _ in range(rows)]

    def admit(self, index: int, row: Row, states: Tensor | None = None) -> None:
        self.indexes[index] = NgramIndex(self.min_n, self.max_n)
        self.indexes[index].extend(row.tokens)

    def propose(self, round_: Round) -> Draft | None:
        found = [
            index.lookup(row.tokens, limit)
            for index, row, limit in zip(self.indexes, round_.rows, round_.limits, strict=False)
        ]
        width = max(map(len, found))
        if width == 0:
            return None
        tokens = torch.tensor([f + [0] * (width - len(f)) for f in found], device=round_.device)
        counts = torch.tensor([len(f) for f in found], device=round_.device)
        return Draft(tokens, torch.minimum(counts, round_.counts_before_stop(tokens)), None, 0)

    def keep(self, rows: Sequence[Row], kept: Kept) -> None:
        for index, row in zip(self.indexes, rows, strict=False):
            index.extend(row.tokens)

    def move(self, source: int, destination: int) -> None:
        self.indexes[destination] = self.indexes[source]
