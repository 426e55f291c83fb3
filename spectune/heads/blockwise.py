"""Blockwise parallel decoding heads (Stern et al. 2018, arXiv 1811.03115).

One feed-forward network reads the state x and writes a change of x for every coming token; the changed states share
the vocabulary projection:

    y = W2 act(W1 x + b1) + b2, seen as k vectors;  head i's logits = head(x + y_i)

In the paper the base prediction passes through the network too, which changes the model. Here the base keeps its
state, so decoding stays lossless; the k vectors are those of tokens t + 2 … t + 1 + k. W2 and b2 start at zero: an
untrained head predicts what the target's own head does. The activation is SiLU, the paper's is ReLU.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from spectune.heads.parallel import ParallelHeads, RankAccuracy


@dataclass(frozen=True, slots=True)
class BlockwiseConfig:
    hidden_size: int
    vocab_size: int  # of the target
    inner_size: int  # width of the network
    heads: int = 4
    rank_accuracy: RankAccuracy | None = None


class BlockwiseHeads(ParallelHeads):
    """k blockwise heads over one target.

    Args:
        config: sizes.
        draft_ids: [D] ids of the draft vocabulary, ascending; None for the whole one.
    """

    def __init__(self, config: BlockwiseConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config.heads, config.hidden_size, config.vocab_size, draft_ids, config.rank_accuracy)
        self.config = config
        self.inner = nn.Linear(config.hidden_size, config.inner_size)
        self.outer = nn.Linear(config.inner_size, config.heads * config.hidden_size)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def head_states(self, x: Tensor) -> Tensor:
        change: Tensor = self.outer(functional.silu(self.inner(x)))
        return x.unsqueeze(-2) + change.view(*x.shape[:-1], self.heads, self.hidden_size)
