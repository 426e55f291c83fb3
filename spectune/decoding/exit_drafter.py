"""Drafting with a model whose output head names a part of the vocabulary only, such as a trained early exit.

A trained exit (`spectune.heads.exit`) is the target's first E layers with a way out of its own. It reads the verified
keys of those layers in the target's cache and writes its own behind them, as plain early exit does; the target's
later layers, its norm and its output head are not touched.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from spectune.decoding.adapter import CausalModel
from spectune.decoding.draft_choice import choose, widen
from spectune.decoding.drafter import Round
from spectune.decoding.lean import LeanModel
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.product import Product
from spectune.errors import UsageError
from spectune.heads.exit import ExitHead


class TrimmedDrafter(ModelDrafter):
    """A ModelDrafter for a model whose logits stand for the ids of a draft vocabulary.

    Args:
        model: its forward gives [B, q, D] logits; it reads ids of the whole vocabulary.
        draft_ids: [D] the target's ids, ascending, on the model's device; None: the first D ids.
        target_vocab: width of the target's distributions.
        shares_target_cache: as for ModelDrafter.
    """

    def __init__(
        self, model: CausalModel, draft_ids: Tensor | None, *, target_vocab: int, shares_target_cache: bool = False
    ) -> None:
        width = model.head_rows().shape[0]
        super().__init__(model, shared_vocab=width, target_vocab=target_vocab, shares_target_cache=shares_target_cache)
        self.draft_ids = draft_ids

    def _choose(self, logits: Tensor, before: list[Tensor], round_: Round, place: int) -> tuple[Tensor, Tensor | None]:
        """The draft's next token [B] and, where the rule needs it, its distribution [B, V]."""
        token, q = choose(logits, before, round_, self.draft_ids)
        return token, None if q is None else widen(q, self.draft_ids, self.target_vocab)


def exit_drafter(target: CausalModel, head: ExitHead) -> TrimmedDrafter:
    """A trained exit of a target, on the target's own cache.

    Args:
        head: as read from its file; it is bound to the target here.

    Raises:
        UsageError: an exit made for another target.
    """
    model = exit_model(target, head)
    return TrimmedDrafter(model, head.draft_ids, target_vocab=target.vocab_size, shares_target_cache=True)


def exit_model(target: CausalModel, head: ExitHead) -> CausalModel:
    """The target's first E layers with the exit's way out; its logits stand for the exit's draft vocabulary.

    Raises:
        UsageError: an exit made for another target, or a target whose layers end in an unknown way.
    """
    layer = head.config.layer
    if not 0 < layer < target.layers_count:
        raise UsageError(
            f"the exit stands behind {layer} layers, the target has {target.layers_count}",
            "use an exit trained for this target",
        )
    head.bind(target.embedding, target.head_rows())
    head = head.to(target.device, target.model.dtype).eval().requires_grad_(False)
    assert head.shared_head is not None
    body = target.subset(range(layer))
    _replace_output(body.model, head, head.shared_head)
    if isinstance(body, LeanModel):
        # An exit over the whole vocabulary shares the target's output rows, which are laid out already.
        product = body.head if head.draft_ids is None else Product(head.shared_head)
        return body.with_exit(body.model, head.exit_state, product)
    general = CausalModel(body.model, target.device)
    general.vocab_size = target.vocab_size  # of the ids it reads
    return general


def _replace_output(model: Any, head: ExitHead, rows: Tensor) -> None:
    """Put the exit and its output rows [D, h] where a model has its final norm and output head.

    `model` must be a copy of its own, such as `subset` makes: its children are replaced.
    """
    norms = [name for name, child in model.base_model.named_children() if type(child).__name__.endswith("Norm")]
    if len(norms) != 1:
        raise UsageError(
            f"{type(model).__name__} has {len(norms)} norms behind its layers, not one",
            "a trained exit cannot be attached to this architecture; use plain early-exit:N",
        )
    setattr(model.base_model, norms[0], _ExitState(head))
    output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    output.weight = nn.Parameter(rows, requires_grad=False)
    model.set_output_embeddings(output)


class _ExitState(nn.Module):
    """The exit up to its output rows, as a module."""

    def __init__(self, head: ExitHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head.exit_state(x)
