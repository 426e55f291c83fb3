"""Training an early exit: a norm and a low-rank change in front of the target's own output head."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from spectune.heads.exit import ExitConfig, ExitHead
from spectune.heads.medusa_layouts import save_exit
from spectune.heads.parallel import draft_rows
from spectune.training.distillation import slices, soft_cross_entropy
from spectune.training.heldout import PlaceCounts, overlap
from spectune.training.loop import Batch, HeldOut

PLACES = 5  # of a draft, whose acceptance is measured


class ExitTraining:
    """A new exit, first the plain one: the target's norm and head behind `layer` layers.

    Args:
        head_weight: [V, h] the target's output head.
        last_tap: number of the target's layers.
        norm_weight: [h] of the target's final norm; `eps` is that norm's.
        layer: E, layers that run before the exit.
        draft_ids: [D] draft vocabulary; None for the whole one.
        rank: of the change.
    """

    def __init__(
        self,
        head_weight: Tensor,
        last_tap: int,
        norm_weight: Tensor,
        eps: float,
        layer: int,
        draft_ids: Tensor | None = None,
        *,
        rank: int = 64,
    ) -> None:
        head_weight = head_weight.float()
        vocab_size, hidden_size = head_weight.shape
        self.module = ExitHead(ExitConfig(layer, hidden_size, vocab_size, rank, eps), draft_ids).to(head_weight.device)
        self.module.bind(head_weight, head_weight)
        with torch.no_grad():
            self.module.norm.weight.copy_(norm_weight)
        self.head_weight = head_weight
        self.teacher_rows = draft_rows(head_weight, draft_ids)
        self.taps: tuple[int, ...] = (layer, last_tap)
        self.learning_rate = 2e-3

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of the exit against the target's distribution at the same position."""
        early, last = self._split(batch)
        used = self._predicts_written(batch)
        scale = torch.full((int(used.sum()), 1), 1.0, device=early.device) / used.sum().clamp(min=1)
        return soft_cross_entropy(
            self.module.exit_state(early[used])[:, None], self.teacher_rows, last[used], self.teacher_rows, scale
        )

    @torch.inference_mode()
    def evaluate(self, batches: Iterable[Batch]) -> HeldOut:
        """Figures on held-out text, for drafts of up to PLACES tokens, each made from the tokens before it."""
        counts = PlaceCounts(PLACES)
        for batch in batches:
            early, last = (x.flatten(0, 1) for x in self._split(batch))
            best, guessed, shared = [], [], []
            for piece in slices(len(last), len(self.head_weight) + len(self.teacher_rows)):
                p = (last[piece] @ self.head_weight.T).float().softmax(-1)
                q = self.module(early[piece]).float().softmax(-1)
                best.append(p.argmax(-1))
                guess = q.argmax(-1)
                guessed.append(guess if self.module.draft_ids is None else self.module.draft_ids[guess])
                shared.append(overlap(p, q, self.module.draft_ids))
            shape = batch.ids.shape
            truth, guess, common = (torch.cat(x).view(shape) for x in (best, guessed, shared))
            follows = torch.zeros_like(batch.mask)
            follows[:, :-1] = batch.ids[:, 1:] == truth[:, :-1]
            # Place i of the draft that starts at t is read at t + i, behind text that must be greedy up to there.
            greedy = torch.ones_like(follows)
            places = []
            for i in range(PLACES):
                places.append(greedy)
                greedy = greedy & _ahead(follows, i)
            counts.add(
                torch.stack([_ahead(guess, i) for i in range(PLACES)], -1).flatten(0, 1)[..., None],
                torch.stack([_ahead(truth, i) for i in range(PLACES)], -1).flatten(0, 1),
                torch.stack(places, -1).flatten(0, 1),
                torch.stack([_ahead(self._predicts_written(batch), i) for i in range(PLACES)], -1).flatten(0, 1),
                torch.stack([_ahead(common, i) for i in range(PLACES)], -1).flatten(0, 1),
            )
        return HeldOut(counts.acceptance(), counts.mean_overlap())

    def save(self, folder: Path, *, compact: bool = False) -> None:
        """Write the exit; see `save_exit`."""
        save_exit(folder, self.module, compact=compact)

    def _split(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The states that enter layer E and those behind the final norm, each [B, T, h]."""
        assert batch.states is not None, "the loop reads the taps that a method names"
        early, last = batch.states.float().chunk(2, -1)
        return early, last

    def _predicts_written(self, batch: Batch) -> Tensor:
        """[B, T] whether the token behind a position was written by the target."""
        return _ahead(batch.mask, 1)


def _ahead(x: Tensor, places: int) -> Tensor:
    """out[:, t] = x[:, t + places], zeros behind the end. [B, T] -> [B, T]."""
    out = torch.zeros_like(x)
    kept = max(0, x.shape[1] - places)
    out[:, :kept] = x[:, x.shape[1] - kept :]
    return out
