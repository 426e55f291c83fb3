"""What Medusa and blockwise heads have in common: several coming tokens predicted from one state of the target.

Both read the target's state behind its final norm (what its output head sees) and send changed copies of it through
an output head, one per coming token. With x the state at position t, the target's own head names token t + 1 and
head i (from 0) names token t + 2 + i. The target is not touched, so its own predictions stay what they were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from spectune.errors import UsageError

RankAccuracy = tuple[tuple[float, ...], ...]  # [heads][ranks]: how often head i's r-th guess is the target's choice


class ParallelHeads(nn.Module, ABC):
    """Base of the parallel heads.

    Args:
        heads: n, tokens predicted behind the one that the target itself names.
        hidden_size: h of the target.
        vocab_size: V of the target.
        draft_ids: [D] ids of the draft vocabulary, ascending; None for all V.
        rank_accuracy: measured once on held-out text; a static tree is grown from it.
    """

    draft_ids: Tensor | None
    shared_head: Tensor | None  # [D, h] rows of the output head that all heads share

    def __init__(
        self,
        heads: int,
        hidden_size: int,
        vocab_size: int,
        draft_ids: Tensor | None,
        rank_accuracy: RankAccuracy | None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.rank_accuracy = rank_accuracy
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("shared_head", None, persistent=False)

    @property
    def draft_size(self) -> int:
        """D, the width of a head's logits."""
        return self.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def bind(self, embedding: Tensor, head_weight: Tensor) -> None:
        """Take from the target what the heads do not bring themselves: the output head's rows.

        Args:
            embedding: [V, h], not used here.
            head_weight: [V, h] of the target.

        Raises:
            UsageError: heads made for another target.
        """
        check_fit(self.hidden_size, self.vocab_size, self.draft_ids, head_weight)
        if self.shares_head:
            rows = draft_rows(head_weight, self.draft_ids)
            # A file may bring a copy of the target's rows: one in memory is enough.
            if self.shared_head is None or torch.equal(self.shared_head.to(rows), rows):
                self.shared_head = rows

    @property
    def shares_head(self) -> bool:
        """Whether all heads use the same output rows."""
        return True

    @abstractmethod
    def head_states(self, x: Tensor) -> Tensor:
        """The state each head sends through the output head. [..., h] -> [..., n, h]."""

    def head_weight(self) -> Tensor:
        """[D, h], or [n, D, h] where every head has its own output rows."""
        assert self.shared_head is not None, "bind() gives the heads their output rows"
        return self.shared_head

    def forward(self, x: Tensor) -> Tensor:
        """Logits over the draft vocabulary. [..., h] -> [..., n, D]."""
        return head_logits(self.head_states(x), self.head_weight())


def linears(modules: nn.ModuleList) -> list[nn.Linear]:
    """The list's modules, all linear layers, under their own type."""
    return [module for module in modules if isinstance(module, nn.Linear)]


def head_logits(states: Tensor, weight: Tensor) -> Tensor:
    """[..., n, h] with a shared [D, h] or own [n, D, h] weight -> [..., n, D]."""
    if weight.dim() == 2:
        return states @ weight.T
    return torch.einsum("...nh,ndh->...nd", states, weight)


def draft_rows(head_weight: Tensor, draft_ids: Tensor | None) -> Tensor:
    """The output head's rows of the draft vocabulary. [V, h] -> [D, h]; the whole weight is not copied."""
    return head_weight if draft_ids is None else head_weight[draft_ids.to(head_weight.device)]


def check_fit(hidden_size: int, vocab_size: int, draft_ids: Tensor | None, head_weight: Tensor) -> None:
    """Heads must have been made for a target of these sizes.

    Raises:
        UsageError: another hidden size, or ids that the target's vocabulary [V, h] lacks.
    """
    rows, width = head_weight.shape
    if hidden_size != width:
        raise UsageError(
            f"the heads read states of width {hidden_size}, the target's are {width} wide",
            "use heads trained for this target",
        )
    largest = vocab_size if draft_ids is None else int(draft_ids.max()) + 1
    if largest > rows:
        raise UsageError(
            f"the heads propose token ids up to {largest - 1}, the target's vocabulary has {rows}",
            "use heads trained for this target",
        )
