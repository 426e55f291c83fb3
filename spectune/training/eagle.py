"""Training EAGLE heads on a frozen target.

A head is used on its own outputs, so it is trained on them ("training-time test", EAGLE-3, section 3.2): step 0 reads
the target's states at all places of a text at once, step k reads what step k - 1 put out, and the text's own tokens.
At step k, place i stands for position i + k; it sees the true places up to i, as step 0 left them, and its own outputs
of steps 1 … k: exactly what it sees when it drafts behind place i.

    version 3   Σ_k 0.8^k CE(p, q_k)          no loss on features
    version 1   the same plus SmoothL1(f^, f); one step is EAGLE-1, more are HASS (Zhang et al. 2024, arXiv 2408.15766)

p is the target's distribution over the draft vocabulary. Everything is arranged by u = i + k + 1, the position whose
state predicts the same token in the target: p is then computed once for all steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from spectune.heads.eagle import EagleHead, attend_causally
from spectune.heads.eagle_layouts import save_eagle
from spectune.heads.parallel import draft_rows
from spectune.training.distillation import slices, soft_cross_entropy
from spectune.training.heldout import PlaceCounts, overlap
from spectune.training.loop import Batch, HeldOut

DECAY = 0.8  # weight of step k's loss is DECAY^k (EAGLE-3's code)
PLACES = 5  # of a draft, whose acceptance is measured
_FIRST_STEP_ALONE = 0.5  # share of the run that learns step 0 alone: it decides most, and costs half as much
_HEAD_FROZEN = 0.5  # share of the run before the output rows, which start as the target's own, learn too


class EagleTraining:
    """Loss and held-out figures of an EAGLE head.

    Args:
        module: the head, bound to the target, in float32.
        head_weight: [V, h] the target's output head; its draft rows teach, all of it judges.
        layers: of the target; the state behind its final norm teaches.
        steps: how often the head runs over each text, all but the first time on its own outputs. None: 3, for version 1
            only 1, as published.
        feature_weight: of the loss on features, version 1. The authors weigh features 10 : 1 against cross-entropy;
            a small head has nothing to spare for what is not drafted from, so here both weigh 1.
        feature_noise: version 1 reads features with uniform noise, of this half-width relative to their root mean
            square (the authors add ±0.1 to features of about that size).
        trained: the head has learnt before, so all of it learns from the start, at half the rate.
    """

    def __init__(
        self,
        module: EagleHead,
        head_weight: Tensor,
        layers: int,
        *,
        steps: int | None = None,
        feature_weight: float = 1.0,
        feature_noise: float = 0.1,
        trained: bool = False,
    ) -> None:
        predicts_features = module.config.version == 1
        self.module = module
        self.head_weight = head_weight.float()
        self.teacher_rows = draft_rows(self.head_weight, module.draft_ids)
        self.taps = tuple(sorted({*module.config.taps, layers}))
        self.steps = steps or (1 if predicts_features else 3)
        self.feature_weight = feature_weight if predicts_features else 0.0
        self.feature_noise = feature_noise if predicts_features else 0.0
        self.alone_until = 0.0 if trained else _FIRST_STEP_ALONE
        self.head_frozen_until = 0.0 if trained else _HEAD_FROZEN
        self.learning_rate = 5e-4 if trained else 1e-3

    def loss(self, batch: Batch) -> Tensor:
        """Σ_k 0.8^k times the mean loss of step k, over places whose token the target wrote. Early on step 0 alone.

        Cross-entropy leaves out places whose token is not in the draft vocabulary: there the head cannot be right
        (the authors test the target's first choice, which costs its whole output head; in greedy text it is the same).
        """
        states, teacher = self._split(batch)
        steps = 1 if batch.progress < self.alone_until else self.steps
        if self.feature_noise:
            width = self.feature_noise * states.square().mean().sqrt()
            states = states + (2 * torch.rand_like(states) - 1) * width
        outputs = _by_teacher(list(unroll(self.module, states, batch.ids, steps)))  # [B, T - 1, n, h]
        valid = _valid(batch.mask, steps)
        drafted = valid & self._in_draft_vocabulary(batch.ids[:, 1:])[..., None]
        used = valid.any(-1)
        outputs, teacher = outputs[used], teacher[used]  # [N, n, h], [N, h]
        weight = self.module.output_weight()
        loss = soft_cross_entropy(
            self.module.output_state(outputs),
            weight if batch.progress >= self.head_frozen_until else weight.detach(),
            teacher,
            self.teacher_rows,
            _weights(drafted)[used],
        )
        if self.feature_weight:
            distance = functional.smooth_l1_loss(
                self.module.following(outputs), teacher[:, None].expand_as(outputs), reduction="none"
            )
            loss = loss + self.feature_weight * (distance.mean(-1) * _weights(valid)[used]).sum()
        return loss

    @torch.inference_mode()
    def evaluate(self, batches: Iterable[Batch]) -> HeldOut:
        """Figures on held-out text, for drafts of PLACES tokens, all but the first from the head's own outputs."""
        counts = PlaceCounts(PLACES)
        for batch in batches:
            self._count(batch, counts)
        return HeldOut(counts.acceptance(), counts.mean_overlap())

    def _count(self, batch: Batch, counts: PlaceCounts) -> None:
        states, teacher = self._split(batch)
        outputs = _by_teacher(list(unroll(self.module, states, batch.ids, PLACES)))
        valid = _valid(batch.mask, PLACES)
        used = valid.any(-1)
        draft_ids, weight = self.module.draft_ids, self.module.output_weight()
        truth = torch.full_like(batch.ids[:, 1:], -1)
        guess = torch.zeros_like(valid, dtype=torch.long)
        shared = torch.zeros_like(valid, dtype=torch.float32)
        places, outputs, teacher = used.nonzero(), outputs[used], teacher[used]
        for piece in slices(len(teacher), len(self.head_weight) + PLACES * len(weight)):
            row, u = places[piece].T
            p = (teacher[piece] @ self.head_weight.T).float().softmax(-1)
            q = (self.module.output_state(outputs[piece]) @ weight.T).float().softmax(-1)
            best = q.argmax(-1)
            truth[row, u] = p.argmax(-1)
            guess[row, u] = best if draft_ids is None else draft_ids[best]
            shared[row, u] = overlap(p[:, None], q, draft_ids)
        follows = (batch.ids[:, 1:] == truth)[..., None].expand_as(valid)
        guess, truth, valid, shared, follows = (
            _by_place(x) for x in (guess, truth[..., None].expand_as(guess), valid, shared, follows)
        )
        # A place is judged if the text before it, behind the draft's start, is greedy.
        greedy = functional.pad(follows[..., :-1].long().cumprod(-1), (1, 0), value=1).bool()
        counts.add(*(x.flatten(0, 1) for x in (guess[..., None], truth, greedy, valid, shared)))

    def save(self, folder: Path, *, compact: bool = False, base_model: str | None = None) -> None:
        """Write the head; see `save_eagle`."""
        save_eagle(folder, self.module, compact=compact, base_model=base_model)

    def _split(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The states that the head reads [B, T, taps * h], and the teacher's at u = 0 … T - 2 [B, T - 1, h]."""
        assert batch.states is not None, "the loop reads the taps that a method names"
        width = self.module.config.target_hidden_size
        states = batch.states.float()
        return states[..., : len(self.module.config.taps) * width], states[:, :-1, -width:]

    def _in_draft_vocabulary(self, ids: Tensor) -> Tensor:
        draft_ids = self.module.draft_ids
        return torch.ones_like(ids, dtype=torch.bool) if draft_ids is None else torch.isin(ids, draft_ids)


def unroll(head: EagleHead, states: Tensor, ids: Tensor, steps: int) -> Iterator[Tensor]:
    """The outputs of training-time test, [B, T - 1, h] per step; those whose token lies behind the text mean nothing.

    Args:
        states: [B, T, taps * h_t] of the target.
        ids: [B, T] the text; rows may be padded behind it.
    """
    attend = TestTimeAttention()
    features = head.fuse(states[:, :-1])
    positions = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
    for step in range(steps):
        tokens = _shift(ids, -(1 + step))[:, :-1]
        output = head(tokens, features, positions + step, attend)
        yield output
        features = head.following(output)


class TestTimeAttention:
    """Who sees what in training-time test; an `Attend` that remembers the steps before. Made anew for every text.

    Place i of step k sees the keys of step 0 up to place i, and those of steps 1 … k at place i itself.
    """

    __test__ = False  # for pytest: a name, not a test

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[Tensor, Tensor]]] = {}  # per layer and step, keys and values

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = self.seen.setdefault(layer, [])
        groups = query.shape[1] // key.shape[1]
        seen.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        if len(seen) == 1:
            return attend_causally(layer, query, key, value)
        (keys, values), own = seen[0], seen[1:]
        query = query * query.shape[-1] ** -0.5
        length = query.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = [(query @ keys.transpose(2, 3)).masked_fill(future, -torch.inf)]
        scores += [(query * k).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat(scores, -1).float().softmax(-1).to(values.dtype)
        mixed = weights[..., :length] @ values
        for place, (_, v) in enumerate(own):
            mixed = mixed + weights[..., length + place, None] * v
        return mixed.transpose(1, 2)


def _shift(x: Tensor, places: int) -> Tensor:
    """out[:, u] = x[:, u - places], zeros from beyond either end. x [B, T, ...]."""
    out = torch.zeros_like(x)
    length = x.shape[1] - abs(places)
    if length > 0:
        out[:, max(places, 0) :][:, :length] = x[:, max(-places, 0) :][:, :length]
    return out


def _by_teacher(outputs: list[Tensor]) -> Tensor:
    """Steps' outputs by place i -> all of them by u = i + k + 1. n times [B, T - 1, h] -> [B, T - 1, n, h]."""
    return torch.stack([_shift(x, 1 + k) for k, x in enumerate(outputs)], 2)


def _by_place(x: Tensor) -> Tensor:
    """The way back. [B, T - 1, n] by u -> by i; zeros where u lies behind the text."""
    return torch.stack([_shift(x[..., k], -(1 + k)) for k in range(x.shape[2])], 2)


def _valid(mask: Tensor, steps: int) -> Tensor:
    """[B, T - 1, n] by u: the target wrote all tokens that a draft up to step k proposes, up to token u + 1.

    mask: [B, T] True where the target wrote the token.
    """
    written = mask[:, 1:]
    runs = []
    run = torch.ones_like(written)
    for k in range(steps):
        run = run & _shift(written, k)
        # The first place's draft begins with token 2: token 1 is what it reads.
        runs.append(run & (torch.arange(run.shape[1], device=run.device) > k))
    return torch.stack(runs, -1)


def _weights(valid: Tensor) -> Tensor:
    """[B, T - 1, n] DECAY^k over the number of step k's places."""
    decay = DECAY ** torch.arange(valid.shape[-1], device=valid.device)
    return valid * decay / valid.sum((0, 1)).clamp(min=1)
