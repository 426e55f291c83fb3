"""Medusa heads (Cai et al. 2024, arXiv 2401.10774).

Head i is a few residual blocks x <- x + SiLU(W x + b) followed by an output head. W and b start at zero, so an
untrained head predicts exactly what the target's own head does. The output head is either the target's own, shared
and frozen (perhaps only the rows of a draft vocabulary), or a matrix per head as in the paper.

Tensor names are those of vLLM's layout: blocks.{head}.layers.{block}.{weight,bias}, lm_heads.{head}.weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from spectune.heads.parallel import ParallelHeads, RankAccuracy, draft_rows, linears


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    hidden_size: int
    vocab_size: int  # of the target
    heads: int = 4
    layers: int = 1  # residual blocks per head
    own_heads: bool = False  # an output matrix per head; else the target's rows, shared
    bias: bool = True  # in the residual blocks
    rank_accuracy: RankAccuracy | None = None


class ResidualBlocks(nn.Module):
    """x <- x + SiLU(W x + b), `count` times, starting as the identity."""

    def __init__(self, hidden_size: int, count: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x


class MedusaHeads(ParallelHeads):
    """n Medusa heads over one target.

    Args:
        config: sizes.
        draft_ids: [D] ids of the draft vocabulary, ascending; None for the whole one.
    """

    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config.heads, config.hidden_size, config.vocab_size, draft_ids, config.rank_accuracy)
        self.config = config
        self.blocks = nn.ModuleList(
            ResidualBlocks(config.hidden_size, config.layers, config.bias) for _ in range(config.heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, self.draft_size, bias=False)
            for _ in range(config.heads if config.own_heads else 0)
        )

    def start_from(self, head_weight: Tensor) -> None:
        """Untrained heads: their own output matrices start as the target's rows of [V, h]."""
        self.bind(head_weight, head_weight)
        with torch.no_grad():
            for head in linears(self.lm_heads):
                head.weight.copy_(draft_rows(head_weight, self.draft_ids))

    @property
    def shares_head(self) -> bool:
        return not self.config.own_heads

    def head_states(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks], -2)

    def head_weight(self) -> Tensor:
        if self.shares_head:
            return super().head_weight()
        return torch.stack([head.weight for head in linears(self.lm_heads)])
