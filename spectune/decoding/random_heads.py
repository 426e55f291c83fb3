"""Untrained heads of the target's geometry, `eagle:shape`, `eagle3:shape` and `medusa:shape`: real costs, no skill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectune.decoding.adapter import CausalModel
from spectune.errors import UsageError
from spectune.heads.medusa import MedusaConfig, MedusaHeads

# Public EAGLE-3 heads for vocabularies of 128 000 and more propose 32 000 ids (e.g. EAGLE3-LLaMA3.1-Instruct-8B).
_DRAFT_VOCABULARY = 32_000
_LARGE_VOCABULARY = 64_000


def random_head(kind: str, target: CausalModel) -> Any:
    """A head of one decoder layer (EAGLE) or of four residual blocks on the target's output rows (Medusa).

    Raises:
        UsageError: a kind without such a head.
    """
    from spectune.training.eagle_start import start_head  # training builds on this room

    match kind:
        case "eagle":
            return start_head(target, 1)
        case "eagle3":
            return start_head(target, 3, _draft_ids(target))
        case "medusa":
            return MedusaHeads(MedusaConfig(target.hidden_size, target.vocab_size))
        case _:
            raise UsageError(f"no {kind} head can be made from a shape", "eagle, eagle3 and medusa can")


def _draft_ids(target: CausalModel) -> Tensor | None:
    if target.vocab_size < _LARGE_VOCABULARY:
        return None
    return torch.arange(_DRAFT_VOCABULARY, device=target.device)
