"""Training a draft model out of the target: a few of its layers learn to imitate all of them.

The layers are spread evenly over the target's, the first and the last among them; embedding and output head stay the
target's own. The draft learns the target's distribution over the text the target wrote,

    KL(p || q) + 0.1 · CE(written token, q)      then, in the last fifth, TV(p, q) = 1 - Σ min(p, q)

since 1 - TV is the rate at which speculative sampling keeps the draft's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from spectune.errors import UsageError
from spectune.heads.parallel import draft_rows
from spectune.heads.pruned import PrunedDraft, save_pruned
from spectune.training.distillation import slices
from spectune.training.heldout import PlaceCounts, overlap
from spectune.training.loop import Batch, HeldOut

PLACES = 5  # of a draft, whose acceptance is measured
_WRITTEN = 0.1  # weight of the written token beside the target's distribution
_FINISH = 0.8  # from this part of the training on, total variation alone


def spread_layers(count: int, layers: int) -> list[int]:
    """`count` of the numbers 0 … layers - 1, evenly spaced, first and last included; the first alone for one.

    Raises:
        UsageError: as many layers as the target has, or none.
    """
    if not 0 < count < layers:
        raise UsageError(f"a draft of {count} layers", f"the target has {layers}; choose 1 to {layers - 1}")
    if count == 1:
        return [0]
    return [round(i * (layers - 1) / (count - 1)) for i in range(count)]


def prune(model: Any, kept: Sequence[int]) -> Any:
    """Keep only some decoder layers of a transformers model, in place.

    Raises:
        UsageError: an architecture without one plain list of layers.
    """
    base, config = model.base_model, model.config.get_text_config()
    stacks = [
        name
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers
    ]
    if len(stacks) != 1:
        raise UsageError(
            f"{type(model).__name__} keeps its layers in an unknown place", "train a head instead of a draft"
        )
    old = getattr(base, stacks[0])
    layers = nn.ModuleList(old[i] for i in kept)
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", number)  # noqa: B010 (nn.Module declares no such attribute)
    setattr(base, stacks[0], layers)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    return model


class DraftTraining:
    """Loss and held-out figures of a pruned draft.

    Args:
        model: transformers' model of the target in float32, as loaded; it is pruned in place.
        head_weight: [V, h] the target's output head.
        kept: the target's layers to start from, see `spread_layers`.
        draft_ids: [D] draft vocabulary; None for the whole one.
    """

    learning_rate: ClassVar[float] = 5e-4

    def __init__(self, model: Any, head_weight: Tensor, kept: Sequence[int], draft_ids: Tensor | None = None) -> None:
        self.taps = (model.config.get_text_config().num_hidden_layers,)
        self.kept = tuple(kept)
        self.module = prune(model, kept)
        self.draft_ids = draft_ids
        # Embedding and output head are the target's and stay so.
        for table in (self.module.get_input_embeddings(), self.module.get_output_embeddings()):
            table.requires_grad_(False)
        self.head_weight = head_weight.float()
        self.rows = draft_rows(self.head_weight, draft_ids)
        self._low_rows: Tensor | None = None

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss over the places behind which the target wrote a token."""
        assert batch.states is not None, "the loop reads the taps that a method names"
        used = _predicts_written(batch)
        states = self._states(batch.ids)[used]
        labels = batch.ids.roll(-1, 1)[used]
        if self.draft_ids is not None:
            place = torch.searchsorted(self.draft_ids, labels).clamp(max=len(self.draft_ids) - 1)
            labels = torch.where(self.draft_ids[place] == labels, place, -1)
        rows = self._rows(states)
        return _Imitation.apply(states, rows, batch.states[used], labels, batch.progress >= _FINISH)

    def _states(self, ids: Tensor) -> Tensor:
        """[B, T, h] the draft's states behind its final norm. Padding stands behind the text, where nothing looks."""
        states: Tensor = self.module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def _rows(self, states: Tensor) -> Tensor:
        """The output rows in the type in which they are multiplied."""
        device = states.device.type
        if not torch.is_autocast_enabled(device):
            return self.rows
        if self._low_rows is None:
            self._low_rows = self.rows.to(torch.get_autocast_dtype(device))
        return self._low_rows

    @torch.inference_mode()
    def evaluate(self, batches: Iterable[Batch]) -> HeldOut:
        """Figures on held-out text, for drafts of up to PLACES tokens, each made from the tokens before it."""
        counts = PlaceCounts(PLACES)
        for batch in batches:
            assert batch.states is not None
            states, teacher = self._states(batch.ids).flatten(0, 1), batch.states.float().flatten(0, 1)
            best, guessed, shared = [], [], []
            for piece in slices(len(teacher), len(self.head_weight) + len(self.rows)):
                p = (teacher[piece] @ self.head_weight.T).softmax(-1)
                q = (states[piece] @ self.rows.T).softmax(-1)
                guess = q.argmax(-1)
                best.append(p.argmax(-1))
                guessed.append(guess if self.draft_ids is None else self.draft_ids[guess])
                shared.append(overlap(p, q, self.draft_ids))
            truth, guess, common = (torch.cat(x).view(batch.ids.shape) for x in (best, guessed, shared))
            counts.add(*_along_text(batch, truth, guess, common))
        return HeldOut(counts.acceptance(), counts.mean_overlap())

    def save(self, folder: Path, *, compact: bool = False, base_model: str | None = None) -> None:
        """Write a model folder for transformers, or `compact`: the layers alone, in int8."""
        if compact:
            base = self.module.base_model
            embedding = {id(p) for p in self.module.get_input_embeddings().parameters()}
            tensors = {name: p.detach() for name, p in base.named_parameters() if id(p) not in embedding}
            vocab, hidden = self.head_weight.shape
            save_pruned(folder, PrunedDraft(self.kept, hidden, vocab, tensors, self.draft_ids), base_model=base_model)
        else:
            self.module.save_pretrained(folder)


class _Imitation(torch.autograd.Function):
    """Mean imitation loss; a slice's logits and their gradient are computed at once and thrown away.

    Args of apply:
        states: [N, h] of the draft; rows: [D, h] output rows; teacher: [N, h] the target's states at the same places.
        labels: [N] the written tokens as row numbers, -1 for those without a row.
        finish: total variation in place of cross-entropies.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states: Tensor, rows: Tensor, teacher: Tensor, labels: Tensor, finish: bool
    ) -> Tensor:
        by_states = torch.empty_like(states)
        total = torch.zeros((), device=states.device)
        for piece in slices(len(states), 2 * len(rows)):
            p = (teacher[piece].to(rows.dtype) @ rows.T).float().softmax(-1)
            log_q = (states[piece].to(rows.dtype) @ rows.T).float().log_softmax(-1)
            q = log_q.exp()
            if finish:
                total += (1 - torch.minimum(p, q).sum(-1)).sum()
                # d min(p, q)/dq is 1 where q is the smaller; through the softmax: q · (g - Σ q g).
                gradient = -(q < p).float()
                by_logits = q * (gradient - (q * gradient).sum(-1, keepdim=True))
            else:
                known = labels[piece] >= 0
                written = labels[piece].clamp(min=0)[:, None]
                total += functional.kl_div(log_q, p, reduction="sum")
                total -= _WRITTEN * (log_q.gather(1, written)[:, 0] * known).sum()
                by_logits = q - p + _WRITTEN * q * known[:, None]
                by_logits.scatter_add_(1, written, -_WRITTEN * known[:, None].float())
            by_states[piece] = (by_logits.to(rows.dtype) @ rows).to(states.dtype)
        count = max(1, len(states))
        ctx.save_for_backward(by_states / count)
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (by_states,) = ctx.saved_tensors
        return by_states * gradient, None, None, None, None


def _ahead(x: Tensor, places: int) -> Tensor:
    """out[:, t] = x[:, t + places], zeros behind the end. [B, T] -> [B, T]."""
    return functional.pad(x[:, places:], (0, places))


def _predicts_written(batch: Batch) -> Tensor:
    """[B, T] whether the token behind a position was written by the target."""
    return _ahead(batch.mask, 1)


def _along_text(batch: Batch, truth: Tensor, guess: Tensor, shared: Tensor) -> tuple[Tensor, ...]:
    """Arguments of `PlaceCounts.add` for a drafter that reads the text itself: place i of the draft that starts
    behind t is what it says at t + i, if the text is greedy up to there. truth, guess, shared: [B, T]."""
    follows = torch.zeros_like(batch.mask)
    follows[:, :-1] = batch.ids[:, 1:] == truth[:, :-1]
    greedy = [torch.ones_like(follows)]
    for i in range(PLACES - 1):
        greedy.append(greedy[-1] & _ahead(follows, i))
    ahead = [[_ahead(x, i) for i in range(PLACES)] for x in (guess, truth, _predicts_written(batch), shared)]
    guesses, truths, valid, common = (torch.stack(x, -1).flatten(0, 1) for x in ahead)
    return guesses[..., None], truths, torch.stack(greedy, -1).flatten(0, 1), valid, common
