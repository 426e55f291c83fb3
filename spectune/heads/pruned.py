"""A pruned draft: a few decoder layers that were trained to imitate the whole target, without what the target has.

Its embedding and its output head are the target's own, the head perhaps only with the rows of a draft vocabulary. The
file therefore holds the layers and the final norm alone: config.json says

    {"spectune_head": "pruned-draft", "layers": n, "kept": [0, 14, 29], "hidden_size": h, "vocab_size": V}

(`kept` are the target's layers that the draft's started from), model.safetensors has `layers.{i}.*` and `norm.weight`
under the names they have inside the target's decoder, and `token_map` [D], the draft vocabulary's ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spectune.errors import UsageError
from spectune.heads.checkpoint import read_config, read_tensors, save_tensors

FAMILY = "pruned-draft"
_TOKEN_MAP = "token_map"


@dataclass(frozen=True, slots=True)
class PrunedDraft:
    """Weights of a pruned draft, under the names of the target's decoder.

    Args:
        kept: the target's layers that the draft's layers started from.
        tensors: `layers.{i}.*` for i = 0 … len(kept) - 1, and `norm.weight`.
        draft_ids: [D] ids of the draft vocabulary, ascending; None for the whole one.
    """

    kept: tuple[int, ...]
    hidden_size: int
    vocab_size: int  # of the target
    tensors: Mapping[str, Tensor]
    draft_ids: Tensor | None


def save_pruned(folder: Path, draft: PrunedDraft, *, base_model: str | None = None) -> None:
    """Write a pruned draft with int8 matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(draft.tensors)
    if draft.draft_ids is not None:
        tensors[_TOKEN_MAP] = draft.draft_ids
    config = {
        "spectune_head": FAMILY,
        "layers": len(draft.kept),
        "kept": list(draft.kept),
        "hidden_size": draft.hidden_size,
        "vocab_size": draft.vocab_size,
    }
    if base_model is not None:
        config["base_model_name_or_path"] = base_model
    save_tensors(folder / "model.safetensors", tensors, int8=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_pruned(folder: Path) -> bool:
    """Whether a folder holds a pruned draft. Raises UsageError where its config.json cannot be read."""
    return read_config(folder).get("spectune_head") == FAMILY


def load_pruned(folder: Path) -> PrunedDraft:
    """Read a pruned draft.

    Raises:
        UsageError: another kind of head, or a damaged or incomplete file.
    """
    config = read_config(folder)
    if config.get("spectune_head") != FAMILY:
        raise UsageError(f"{folder} holds no pruned draft", "make one with `spectune train draft --compact`")
    kept, hidden, vocab = config.get("kept"), config.get("hidden_size"), config.get("vocab_size")
    sizes_known = isinstance(kept, list) and all(isinstance(layer, int) for layer in kept) and kept
    if not sizes_known or not isinstance(hidden, int) or not isinstance(vocab, int):
        raise UsageError(f"{folder / 'config.json'} lacks the draft's sizes", "the file is damaged; fetch it again")
    tensors = read_tensors(folder)
    draft_ids = tensors.pop(_TOKEN_MAP, None)
    if "norm.weight" not in tensors:
        raise UsageError(f"{folder}: norm.weight is missing", "the file is damaged; fetch it again")
    if draft_ids is not None:
        draft_ids = draft_ids.long()
        if draft_ids.dim() != 1 or not len(draft_ids) or bool((draft_ids.diff() <= 0).any()) or int(draft_ids[0]) < 0:
            raise UsageError(f"{folder}: {_TOKEN_MAP} is no ascending list of ids", "the file is damaged")
        if int(draft_ids[-1]) >= vocab:
            raise UsageError(f"{folder}: {_TOKEN_MAP} names id {int(draft_ids[-1])} of {vocab}", "the file is damaged")
    floats = {name: x if x.is_floating_point() else x.to(torch.float32) for name, x in tensors.items()}
    return PrunedDraft(tuple(config["kept"]), hidden, vocab, floats, draft_ids)
