"""From logits to the distribution that tokens are drawn from.

Order as in transformers: repetition penalty, temperature, top-k, top-p, min-p. Everything runs in float32 (float64
stays float64). The same settings shape the target's p and the draft's q, and q is exactly what the draft drew from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectune.sweeping.cell import Sampling

NEGLIGIBLE_TEMPERATURE = 1e-5  # below this, dividing logits overflows; decoding is greedy to any precision


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < NEGLIGIBLE_TEMPERATURE


def penalize(logits: Tensor, seen: Tensor | None, penalty: float) -> Tensor:
    """Repetition penalty of CTRL (Keskar et al. 2019): seen tokens' scores move towards "less likely".

    Args:
        logits: [..., V].
        seen: bool, broadcastable to logits; None or penalty 1.0 leaves the logits unchanged.
    """
    if seen is None or penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Distribution to draw from, for temperature > 0. [..., V] -> [..., V], rows sum to 1."""
    x = logits.float() if logits.dtype != torch.float64 else logits
    x = x / sampling.temperature
    if 0 < sampling.top_k < x.shape[-1]:
        kth = x.topk(sampling.top_k).values[..., -1:]
        x = x.masked_fill(x < kth, -torch.inf)
    if sampling.top_p < 1.0:
        ascending, order = x.sort(dim=-1, stable=True)  # equal logits keep the order of their ids, in every shape
        tail = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        tail[..., -1].fill_(False)  # the most likely token always stays
        x = x.masked_fill(tail.scatter(-1, order, tail), -torch.inf)
    if sampling.min_p > 0.0:
        p = x.softmax(-1)
        x = x.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), -torch.inf)
    return x.softmax(-1)


class History:
    """Which tokens each row has seen: the repetition penalty's memory. Nothing is kept where there is no penalty."""

    def __init__(self, rows: int, vocab_size: int, penalty: float, device: torch.device) -> None:
        self.penalty = penalty
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device) if penalty != 1.0 else None

    @classmethod
    def of(cls, seen: Tensor | None, penalty: float) -> History:
        """Rows that have seen what `seen` [B, V] says."""
        history = cls(0, 0, 1.0, torch.device("cpu"))
        history.seen, history.penalty = seen, penalty
        return history

    def reset(self, row: int, token_ids: list[int]) -> None:
        if self.seen is not None:
            self.seen[row] = False
            self.add(row, token_ids)

    def add(self, row: int, token_ids: list[int]) -> None:
        if self.seen is not None:
            self.seen[row, torch.tensor(token_ids, device=self.seen.device)] = True

    def move(self, source: int, destination: int) -> None:
        if self.seen is not None:
            self.seen[destination] = self.seen[source]

    def after(self, rows: int, block: list[Tensor]) -> Tensor:
        """[B, V] what the first `rows` rows will have seen behind a block of drafted tokens, each [B]."""
        assert self.seen is not None
        seen = self.seen[:rows].clone()
        for tokens in block:
            seen.scatter_(1, tokens[:, None].to(seen.device), True)
        return seen

    def apply_block(self, logits: Tensor, block: Tensor) -> Tensor:
        """Penalize the logits of a block of new tokens, each place with its own past.

        Args:
            logits: [B, q, V]; place i follows the row's history and the first i drafted tokens.
            block: [B, q - 1] drafted tokens.
        """
        if self.seen is None:
            return logits
        seen = self.seen[: logits.shape[0], None, : logits.shape[-1]].repeat(1, logits.shape[1], 1)
        for i in range(block.shape[1]):
            seen[:, i + 1 :].scatter_(2, block[:, i, None, None].expand(-1, seen.shape[1] - i - 1, 1), True)
        return penalize(logits, seen, self.penalty)

    def apply_tree(self, logits: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """As `apply_block` for a tree: each node's past is its row's history and its own path.

        Args:
            logits: [B, K + 1, V], node 0 the root.
            tokens: [B, K] drafted tokens, node j + 1 each; parents: [B, K] their parent nodes.
        """
        if self.seen is None:
            return logits
        rows = torch.arange(logits.shape[0], device=logits.device)
        past = [self.seen[: len(rows), : logits.shape[-1]]]
        for j in range(tokens.shape[1]):
            seen = torch.stack(past, 1)[rows, parents[:, j]]
            past.append(seen.scatter(1, tokens[:, j, None], True))
        return penalize(logits, torch.stack(past, 1), self.penalty)
