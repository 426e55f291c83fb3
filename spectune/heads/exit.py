"""A trained early exit: what turns the state in the middle of the target into a prediction of the next token.

    y = RMSNorm(x);  logits = head(y + U D y)        D: h -> r, U: r -> h

x is the state that enters layer E. The norm starts as the target's own and U at zero, so an untrained exit is the
plain one of LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710): the model's norm and head behind E layers. The
output head is the target's, perhaps only the rows of a draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from spectune.heads.parallel import check_fit, draft_rows


@dataclass(frozen=True, slots=True)
class ExitConfig:
    layer: int  # E: layers 0 … E - 1 run before the exit
    hidden_size: int
    vocab_size: int  # of the target
    rank: int = 64
    eps: float = 1e-5  # of the norm; the target's


class ExitHead(nn.Module):
    """Exit behind layer E - 1.

    Args:
        config: sizes.
        draft_ids: [D] ids of the draft vocabulary, ascending; None for the whole one.
    """

    draft_ids: Tensor | None
    shared_head: Tensor | None  # [D, h]

    def __init__(self, config: ExitConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.down = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.up = nn.Linear(config.rank, config.hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("shared_head", None, persistent=False)

    def bind(self, embedding: Tensor, head_weight: Tensor) -> None:
        """Take the output head's rows from the target's head_weight [V, h]; the embedding is not used.

        Raises:
            UsageError: an exit made for another target.
        """
        check_fit(self.config.hidden_size, self.config.vocab_size, self.draft_ids, head_weight)
        self.shared_head = draft_rows(head_weight, self.draft_ids)

    def exit_state(self, x: Tensor) -> Tensor:
        """The state that goes through the output head. [..., h] -> [..., h]."""
        y = functional.rms_norm(x, (self.config.hidden_size,), self.norm.weight, self.config.eps)
        change: Tensor = self.up(self.down(y))
        return y + change

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token over the draft vocabulary. [..., h] -> [..., D]."""
        assert self.shared_head is not None, "bind() gives the exit its output rows"
        return self.exit_state(x) @ self.shared_head.T
