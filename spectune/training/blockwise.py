"""Training blockwise heads on a frozen target (Stern et al. 2018, section 6, "frozen base model")."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from spectune.heads.blockwise import BlockwiseConfig, BlockwiseHeads
from spectune.heads.medusa_layouts import save_blockwise
from spectune.training.parallel import ParallelTraining


class BlockwiseTraining(ParallelTraining):
    """New heads over a target, all predicting what its own head does until they learn.

    Args:
        head_weight: [V, h] the target's output head.
        last_tap: number of the target's layers.
        draft_ids: [D] draft vocabulary; None for the whole one.
        heads: k, tokens to predict behind the next one.
        inner_size: width of the network; None for 2 h.
    """

    module: BlockwiseHeads

    def __init__(
        self,
        head_weight: Tensor,
        last_tap: int,
        draft_ids: Tensor | None = None,
        *,
        heads: int = 4,
        inner_size: int | None = None,
    ) -> None:
        head_weight = head_weight.float()
        vocab_size, hidden_size = head_weight.shape
        config = BlockwiseConfig(hidden_size, vocab_size, inner_size or 2 * hidden_size, heads)
        module = BlockwiseHeads(config, draft_ids).to(head_weight.device)
        module.bind(head_weight, head_weight)
        super().__init__(module, head_weight, last_tap)

    def save(self, folder: Path, *, compact: bool = False) -> None:
        """Write the heads; see `save_blockwise`."""
        save_blockwise(folder, self.module, compact=compact)
