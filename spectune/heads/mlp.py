"""The MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124; IBM's accelerators).

A small recurrent network over the drafted tokens. Its state s starts as the target's state behind the final norm;
step i reads the newest token y:

    s <- GELU(ln_i(proj_i s + (e / w) emb_i(y)));   logits = head_i(s)
    w = 0.5^(0.5 / n_predict),  e = sqrt((1 - w²) inner / 2)

With `scale_input` the first state is normalised and divided by sqrt(2) before. With `tie_weights` all steps share one
set of weights, except that the first projection, whose input is the target's state, is its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from spectune.heads.parallel import check_fit

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MlpConfig:
    hidden_size: int  # of the target; `emb_dim` in files
    inner_size: int
    vocab_size: int
    steps: int  # n_predict: most tokens drafted
    tie_weights: bool = False
    scale_input: bool = False


class ScaleShiftNorm(nn.Module):
    """x / rms(x) * weight + bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, _EPS) + self.bias


class MlpSpeculator(nn.Module):
    """Drafts up to `config.steps` tokens, each conditional on those before it. It has its own vocabulary matrices."""

    draft_ids: Tensor | None = None  # always the whole vocabulary

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.config = config
        sets = 1 if config.tie_weights else config.steps
        first = nn.Linear(config.hidden_size, config.inner_size, bias=False)
        others = min(config.steps - 1, 1) if config.tie_weights else config.steps - 1
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, config.inner_size) for _ in range(sets))
        self.proj = nn.ModuleList(
            [first, *(nn.Linear(config.inner_size, config.inner_size, bias=False) for _ in range(others))]
        )
        self.ln = nn.ModuleList(ScaleShiftNorm(config.inner_size) for _ in range(sets))
        self.head = nn.ModuleList(nn.Linear(config.inner_size, config.vocab_size, bias=False) for _ in range(sets))
        self.state_weight = 0.5 ** (0.5 / config.steps)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * config.inner_size / 2)

    def bind(self, embedding: Tensor, head_weight: Tensor) -> None:
        """Check that the target fits; nothing is taken from it.

        Raises:
            UsageError: a speculator made for another target.
        """
        check_fit(self.config.hidden_size, self.config.vocab_size, None, head_weight)

    def part(self, modules: nn.ModuleList, index: int) -> nn.Module:
        """Step `index`'s module of one kind; tied steps share the last."""
        return modules[min(index, len(modules) - 1)]

    def start(self, x: Tensor) -> Tensor:
        """The first state from the target's. [..., h] -> [..., h]."""
        if not self.config.scale_input:
            return x
        return functional.rms_norm(x, (self.config.hidden_size,), None, _EPS) / math.sqrt(2)

    def advance(self, index: int, state: Tensor, tokens: Tensor) -> Tensor:
        """State behind one more token. state [..., h or inner], tokens [...] -> [..., inner]."""
        projected = self.part(self.proj, index)(state)
        mixed = projected + self.token_weight / self.state_weight * self.part(self.emb, index)(tokens)
        return functional.gelu(self.part(self.ln, index)(mixed))

    def logits(self, index: int, state: Tensor) -> Tensor:
        """Logits of the token that follows. [..., inner] -> [..., V]."""
        logits: Tensor = self.part(self.head, index)(state)
        return logits
