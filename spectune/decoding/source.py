"""Where a model comes from: its module on the device, before anything is made faster or checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from spectune.sweeping.cell import WeightOrigin


@dataclass(frozen=True, slots=True)
class Source:
    """A causal language model in evaluation mode, without gradients."""

    model: PreTrainedModel
    tokenizer: Any | None  # None where the folder has none
    digest: str  # pins the weights
    weights: WeightOrigin
