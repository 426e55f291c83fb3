"""Training Medusa heads on a frozen target ("Medusa-1", Cai et al. 2024, section 2.2.1)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from spectune.heads.medusa import MedusaConfig, MedusaHeads
from spectune.heads.medusa_layouts import save_medusa
from spectune.training.parallel import ParallelTraining


class MedusaTraining(ParallelTraining):
    """New heads over a target, all predicting what its own head does until they learn.

    Args:
        head_weight: [V, h] the target's output head.
        last_tap: number of the target's layers.
        draft_ids: [D] draft vocabulary; None for the whole one.
        heads: tokens to predict behind the next one.
        layers: residual blocks per head.
        own_heads: train an output matrix per head; else the target's frozen rows serve all.
        base_model: the target's name, noted in the files.
    """

    module: MedusaHeads

    def __init__(
        self,
        head_weight: Tensor,
        last_tap: int,
        draft_ids: Tensor | None = None,
        *,
        heads: int = 4,
        layers: int = 1,
        own_heads: bool = False,
        base_model: str | None = None,
    ) -> None:
        head_weight = head_weight.float()
        vocab_size, hidden_size = head_weight.shape
        module = MedusaHeads(MedusaConfig(hidden_size, vocab_size, heads, layers, own_heads), draft_ids)
        module.to(head_weight.device)
        module.start_from(head_weight)
        super().__init__(module, head_weight, last_tap)
        self.base_model = base_model

    def save(self, folder: Path, *, compact: bool = False) -> None:
        """Write the heads; see `save_medusa`."""
        save_medusa(folder, self.module, compact=compact, base_model=self.base_model)
