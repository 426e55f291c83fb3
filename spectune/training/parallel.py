"""Training and measuring heads that predict several coming tokens from one state (Medusa, blockwise).

Only the heads learn; the target's states come from a cache. Head i at position t predicts token t + 2 + i, so its
teacher is the target's distribution at position u = t + 1 + i. Everything is arranged by u: the teacher's logits are
then computed once for all heads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from spectune.heads.parallel import ParallelHeads, draft_rows
from spectune.training.distillation import slices, soft_cross_entropy
from spectune.training.heldout import PlaceCounts, overlap
from spectune.training.loop import Batch, HeldOut

DECAY = 0.8  # weight of head i's loss is DECAY^i (Cai et al. 2024)
RANKS = 10  # guesses per head whose accuracy is measured


class ParallelTraining:
    """Loss and held-out figures of parallel heads.

    Args:
        module: the heads, bound to the target.
        head_weight: [V, h] the target's output head; its draft rows teach, all of it judges.
        last_tap: number of the tap behind the target's final norm, which is its number of layers.
    """

    def __init__(self, module: ParallelHeads, head_weight: Tensor, last_tap: int) -> None:
        self.module = module
        self.head_weight = head_weight.float()
        self.teacher_rows = draft_rows(self.head_weight, module.draft_ids)
        self.taps: tuple[int, ...] = (last_tap,)
        self.learning_rate = 1e-3

    def loss(self, batch: Batch) -> Tensor:
        """Σ_i 0.8^i times the mean cross-entropy of head i against the target's distribution."""
        states = _states(batch)
        aligned = _by_teacher(self.module.head_states(states))
        valid = _valid(batch.mask, self.module.heads)
        decay = DECAY ** torch.arange(self.module.heads, device=valid.device)
        scale = valid * decay / valid.sum((0, 1)).clamp(min=1)
        used = valid.any(-1)
        return soft_cross_entropy(
            aligned[used], self.module.head_weight(), states[used], self.teacher_rows, scale[used]
        )

    @torch.inference_mode()
    def evaluate(self, batches: Iterable[Batch]) -> HeldOut:
        """Figures on held-out text. The heads also keep their rank accuracies, from which trees are grown."""
        counts = PlaceCounts(self.module.heads)
        for batch in batches:
            self._count(batch, counts)
        self.module.rank_accuracy = counts.rank_accuracy()
        return HeldOut(counts.acceptance(), counts.mean_overlap())

    def _count(self, batch: Batch, counts: PlaceCounts) -> None:
        rows, length = batch.ids.shape
        heads, draft_ids = self.module.heads, self.module.draft_ids
        states = _states(batch)
        aligned = _by_teacher(self.module.head_states(states)).flatten(0, 1)  # [B*T, n, h]
        states = states.flatten(0, 1)
        weight = self.module.head_weight()
        best, ranked, shared = [], [], []
        for piece in slices(len(states), len(self.head_weight) + heads * weight.shape[-2]):
            p = (states[piece] @ self.head_weight.T).float().softmax(-1)
            x = aligned[piece]
            logits = x @ weight.T if weight.dim() == 2 else torch.einsum("cnh,ndh->cnd", x, weight)
            q = logits.float().softmax(-1)
            best.append(p.argmax(-1))
            top = q.topk(min(RANKS, q.shape[-1])).indices
            ranked.append(top if draft_ids is None else draft_ids[top])
            shared.append(overlap(p[:, None], q, draft_ids))
        truth = torch.cat(best).view(rows, length)
        follows = torch.zeros_like(batch.mask)  # [B, T] whether the text goes on with the target's choice
        follows[:, :-1] = batch.ids[:, 1:] == truth[:, :-1]
        greedy = torch.stack([_shift(_run(follows, 1 + i), 1 + i) for i in range(heads)], -1)
        counts.add(
            *_by_start(
                torch.cat(ranked).view(rows, length, heads, -1),
                truth[..., None].expand(-1, -1, heads),
                greedy,
                _valid(batch.mask, heads),
                torch.cat(shared).view(rows, length, heads),
            )
        )


def _states(batch: Batch) -> Tensor:
    """[B, T, h] in float32, whatever type the cache holds."""
    assert batch.states is not None, "the loop reads the taps that a method names"
    return batch.states.float()


def _shift(x: Tensor, places: int) -> Tensor:
    """Move along the text: out[:, u] = x[:, u - places], zeros where that is before its start. x [B, T, ...]."""
    out = torch.zeros_like(x)
    kept = max(0, x.shape[1] - places)
    out[:, x.shape[1] - kept :] = x[:, :kept]
    return out


def _run(flags: Tensor, length: int) -> Tensor:
    """out[:, t]: flags hold at t … t + length - 1. [B, T] -> [B, T]."""
    padded = functional.pad(flags, (0, length - 1))
    return padded.unfold(1, length, 1).all(-1)


def _by_teacher(states: Tensor) -> Tensor:
    """Head i's state of position t = u - 1 - i at position u. [B, T, n, h] -> [B, T, n, h]."""
    return torch.stack([_shift(states[:, :, i], 1 + i) for i in range(states.shape[2])], 2)


def _valid(mask: Tensor, heads: int) -> Tensor:
    """[B, T, n] whether head i has something to learn at u: the target wrote all from token t + 1 to token u."""
    return torch.stack([_shift(_run(_shift_back(mask), 1 + i), 1 + i) for i in range(heads)], -1)


def _shift_back(mask: Tensor) -> Tensor:
    """out[:, t] = mask[:, t + 1]."""
    return functional.pad(mask[:, 1:], (0, 1))


def _by_start(*arranged: Tensor) -> list[Tensor]:
    """Undo `_by_teacher` for all positions: [B, T, n, ...] by u -> [B*T, n, ...] by t."""
    out = []
    for x in arranged:
        heads = x.shape[2]
        back = [torch.roll(x[:, :, i], -(1 + i), 1) for i in range(heads)]
        out.append(torch.stack(back, 2).flatten(0, 1))
    return out
