"""Drafting with a pruned draft (`spectune.heads.pruned`): a language model of few layers on the target's own embedding
and output rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from spectune.decoding.adapter import ATTENTION, CausalModel
from spectune.decoding.exit_drafter import TrimmedDrafter
from spectune.decoding.lean import lean
from spectune.errors import UsageError
from spectune.heads.pruned import PrunedDraft, load_pruned


def pruned_drafter(target: CausalModel, draft: PrunedDraft) -> TrimmedDrafter:
    """A drafter with a cache of its own. Raises UsageError for a draft made for another target."""
    model = pruned_model(target, draft)
    ids = None if draft.draft_ids is None else draft.draft_ids.to(target.device)
    return TrimmedDrafter(model, ids, target_vocab=target.vocab_size)


def pruned_model(target: CausalModel, draft: PrunedDraft) -> CausalModel:
    """The draft as a model in the target's type, on its device; its logits stand for the draft vocabulary's ids.

    Raises:
        UsageError: a draft made for another target, or tensors that do not fit its layers.
    """
    if (draft.hidden_size, draft.vocab_size) != (target.hidden_size, target.vocab_size):
        raise UsageError(
            f"the draft was made for a target of width {draft.hidden_size} with {draft.vocab_size} ids, "
            f"this one has {target.hidden_size} and {target.vocab_size}",
            "use a draft trained for this target",
        )
    dtype = target.model.dtype
    model = _empty(target, len(draft.kept), dtype)
    base = model.base_model
    wanted = {name: x for name, x in base.state_dict().items() if name != _embedding_name(base)}
    if problem := _difference(wanted, draft.tensors):
        raise UsageError(f"the pruned draft does not fit this target: {problem}", "use a draft trained for this target")
    base.load_state_dict({name: x.to(dtype) for name, x in draft.tensors.items()}, strict=False)
    model = model.eval().requires_grad_(False).to(target.device)
    model.get_input_embeddings().weight = nn.Parameter(target.embedding, requires_grad=False)
    rows = target.head_rows(draft.draft_ids)
    output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    output.weight = nn.Parameter(rows, requires_grad=False)
    model.set_output_embeddings(output)
    causal = lean(CausalModel(model, target.device))
    causal.vocab_size = target.vocab_size  # of the ids it reads
    return causal


def load_pruned_model(target: CausalModel, folder: Path) -> CausalModel:
    """`pruned_model` of the draft in a folder."""
    return pruned_model(target, load_pruned(folder))


def _empty(target: CausalModel, layers: int, dtype: torch.dtype) -> Any:
    """A model like the target with so many layers and next to no vocabulary."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.vocab_size, config.pad_token_id, config.tie_word_embeddings = 1, None, False
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)


def _embedding_name(base: Any) -> str:
    embedding = base.get_input_embeddings()
    return next(name for name, parameter in base.named_parameters() if parameter is embedding.weight)


def _difference(wanted: dict[str, Any], found: Any) -> str | None:
    """The first tensor that is missing, unknown or of another shape."""
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is unknown"
        if wanted[name].shape != found[name].shape:
            return f"{name} has shape {list(found[name].shape)}, wanted {list(wanted[name].shape)}"
    return None
