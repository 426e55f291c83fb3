"""The loss of all heads here: cross-entropy against the target's own distribution, in bounded memory.

Logits over a vocabulary are far larger than the states they come from: 2,000 tokens, 4 heads and 8,000 ids take
256 MB, and a backward pass holds several copies. Here a slice's loss and its gradient are computed at once, as in
Liger's fused cross-entropy, and only the gradient by the states (and by the weight, if trained) is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LOGITS_AT_ONCE = 1 << 23  # 32 MB in float32


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor, scale: Tensor
    ) -> Tensor:
        own = weight.dim() == 3
        by_states = torch.empty_like(states)
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=states.device)
        for piece in slices(len(states), states.shape[1] * weight.shape[-2]):
            x = states[piece]  # [c, n, h]
            p = (teacher[piece] @ teacher_weight.T).float().softmax(-1)  # [c, D]
            logits = torch.einsum("cnh,ndh->cnd", x, weight) if own else x @ weight.T
            log_q = logits.float().log_softmax(-1)
            share = scale[piece]
            total -= (torch.einsum("cd,cnd->cn", p, log_q) * share).sum()
            # d/dlogits of -sum p log softmax(logits) is q - p.
            by_logits = log_q.exp_().sub_(p[:, None]).mul_(share[..., None]).to(x.dtype)
            by_states[piece] = torch.einsum("cnd,ndh->cnh", by_logits, weight) if own else by_logits @ weight
            if by_weight is not None:
                by_weight += torch.einsum("cnd,cnh->ndh" if own else "cnd,cnh->dh", by_logits, x)
        ctx.save_for_backward(by_states, by_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        by_states, by_weight = ctx.saved_tensors
        return by_states * gradient, None if by_weight is None else by_weight * gradient, None, None, None


def soft_cross_entropy(
    states: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor, scale: Tensor
) -> Tensor:
    """Scaled sum of cross-entropies -Σ_v p(v) log q(v).

    p is the target's distribution over the draft vocabulary, renormalised to it; q is a head's.

    Args:
        states: [N, n, h] what n heads send through their output weight.
        weight: [D, h], or [n, D, h] for a weight per head.
        teacher: [N, h] the target's states behind the final norm at the same places.
        teacher_weight: [D, h] the target's output rows.
        scale: [N, n] weight of every term; 0 leaves it out.

    Returns:
        scalar; differentiable by states and weight.
    """
    loss: Tensor = _Distillation.apply(states, weight, teacher, teacher_weight, scale)  # type: ignore[no-untyped-call]
    return loss


def slices(rows: int, logits_per_row: int) -> list[slice]:
    """Cut `rows` so that a slice's logits stay in bounds."""
    step = max(1, _LOGITS_AT_ONCE // max(1, logits_per_row))
    return [slice(start, start + step) for start in range(0, rows, step)]
