"""Batches of training text for the loop."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from spectune.errors import UsageError
from spectune.training.loop import Batch
from spectune.training.states import StateStore, pad
from spectune.training.text import Text

_MIXED = 64  # batches whose rows are drawn from one part of the shuffled text, sorted by length


class TrainingData:
    """Texts in batches of so many tokens, in an order of the seed's choice.

    Args:
        texts: all of them; those with a held-out prompt are kept apart.
        store: states of all texts; None for methods that read none.
        batch_tokens: of a batch, padding included.

    Raises:
        UsageError: too little text for both sides.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        store: StateStore | None,
        *,
        batch_tokens: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.training = [text for text in texts if not text.is_held_out]
        self.apart = [text for text in texts if text.is_held_out]
        if not self.training or not self.apart:
            raise UsageError(
                f"{len(texts)} texts are too few to train and to judge on",
                "give more --tokens, or a --text file with more rows",
            )
        self.store = store
        self.batch_tokens = batch_tokens
        self.device = device
        self.seed = seed

    def plan(self, epoch: int) -> list[list[int]]:
        """Batches of rows of similar length, in random order."""
        rng = random.Random(f"{self.seed}:{epoch}")
        order = list(range(len(self.training)))
        rng.shuffle(order)
        typical = max(1, self.batch_tokens * len(order) // max(1, sum(len(t.ids) for t in self.training)))
        part = _MIXED * typical
        batches: list[list[int]] = []
        for start in range(0, len(order), part):
            batches += _batches(self.training, order[start : start + part], self.batch_tokens)
        rng.shuffle(batches)
        return batches

    def batch(self, rows: Sequence[int], *, progress: float = 0.0) -> Batch:
        return self._batch([self.training[row] for row in rows], progress)

    def held_out(self, tokens: int | None = None) -> Iterator[Batch]:
        """The held-out text in its own order, or a beginning of it with about so many answer tokens."""
        taken: list[Text] = []
        count = 0
        for text in self.apart:
            if tokens is not None and count >= tokens:
                break
            taken.append(text)
            count += text.written
        for rows in _batches(taken, range(len(taken)), self.batch_tokens):
            yield self._batch([taken[row] for row in rows], 1.0)

    def _batch(self, texts: Sequence[Text], progress: float) -> Batch:
        ids = pad([torch.tensor(text.ids) for text in texts])
        place = torch.arange(ids.shape[1])
        starts = torch.tensor([text.prompt for text in texts])[:, None]
        ends = torch.tensor([len(text.ids) for text in texts])[:, None]
        mask = (place >= starts) & (place < ends)
        states = None if self.store is None else pad([self.store.read(text) for text in texts]).to(self.device)
        return Batch(ids.to(self.device), mask.to(self.device), states, progress)


def _batches(texts: Sequence[Text], rows: Sequence[int], tokens: int) -> list[list[int]]:
    """Cut rows, sorted by length, into batches of up to so many tokens with padding; one row at least."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for row in sorted(rows, key=lambda row: len(texts[row].ids)):
        if batch and (len(batch) + 1) * len(texts[row].ids) > tokens:
            batches.append(batch)
            batch = []
        batch.append(row)
    return [*batches, batch] if batch else batches
