"""Acceptance rules for a chain of drafted tokens.

Notation (Leviathan et al. 2023): `p` is the target's distribution, `q` the distribution the draft token was really
drawn from. A round drafts up to K tokens; a rule keeps the first `accepted` of them and names one more token: the
correction after a rejection, or the bonus token after full acceptance. All rules here are lossless: the emitted
tokens have exactly the law of plain decoding.

Rows may draft fewer than K tokens (`counts`); what stands behind a row's count is padding and never looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spectune.decoding.random import Coins


class Verdict(NamedTuple):
    accepted: Tensor  # [B] how many drafted tokens are kept
    token: Tensor  # [B] the token that follows them


def _prefix(keep: Tensor, counts: Tensor) -> Tensor:
    """Length of the leading run of True within each row's count. [B, K], [B] -> [B]."""
    place = torch.arange(keep.shape[1], device=keep.device)
    return (keep & (place < counts[:, None])).long().cumprod(1).sum(1)


def _row(x: Tensor, place: Tensor) -> Tensor:
    """x[b, place[b]] for every row b. [B, n, V], [B] -> [B, V]."""
    return x[torch.arange(x.shape[0], device=x.device), place]


def _at(x: Tensor, tokens: Tensor) -> Tensor:
    """x[..., tokens[...]]. [B, K, V], [B, K] -> [B, K]."""
    return x.gather(-1, tokens[..., None]).squeeze(-1)


def match(tokens: Tensor, counts: Tensor, choices: Tensor) -> Verdict:
    """Keep drafted tokens while they equal the target's own choice.

    With choices = argmax this is greedy decoding; with choices drawn from p it is sample-then-match, lossless for any
    drafter that does not see the target's coins.

    Args:
        tokens: [B, K] drafted tokens.
        counts: [B] how many of them are real.
        choices: [B, K + 1] the target's choice at each place.
    """
    accepted = _prefix(tokens == choices[:, :-1], counts)
    return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def one_hot(tokens: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """q of a drafter that does not sample. [B, K] -> [B, K, V]."""
    return torch.nn.functional.one_hot(tokens, vocab_size).to(dtype)


def speculative(tokens: Tensor, counts: Tensor, p: Tensor, q: Tensor, coins: Coins) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

    Keep token i with probability min(1, p_i/q_i); after a rejection draw from relu(p_i - q_i), after full acceptance
    from p.

    Args:
        tokens: [B, K]; counts: [B].
        p: [B, K + 1, V] target distributions; q: [B, K, V] draft distributions.
        coins: the round's random decisions.
    """
    p_token, q_token = _at(p[:, :-1], tokens), _at(q, tokens)
    ratio = torch.where(q_token > 0, p_token / q_token, 0.0)
    accepted = _prefix(coins.below(ratio.clamp(max=1.0)), counts)
    return Verdict(accepted, coins.draw(_residual(p, q, accepted, counts, torch.ones_like(ratio[:, :1]))))


def block(tokens: Tensor, counts: Tensor, p: Tensor, q: Tensor, coins: Coins) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): decides on the block as a whole.

    Never keeps fewer tokens than `speculative` on average. Arguments as there.
    """
    rows, width = tokens.shape
    p_token, q_token = _at(p[:, :-1], tokens), _at(q, tokens)
    ratio = torch.where(q_token > 0, p_token / q_token, 0.0)
    # w[i] = min(1, w[i-1] * ratio[i]): how likely the first i tokens are under the target, capped at every place.
    weights = [torch.ones_like(ratio[:, 0])] if width else []
    for i in range(width):
        weights.append((weights[-1] * ratio[:, i]).clamp(max=1.0))
    w = torch.stack(weights[1:], 1) if width else ratio  # [B, K], w after place i
    # After the last drafted token the threshold is w itself; before it, the mass left over by the next q.
    threshold = w.clone()
    if width > 1:
        left = (w[:, :-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)  # [B, K - 1]
        denominator = left + 1 - w[:, :-1]
        inner = torch.where(denominator > 0, left / denominator, 1.0)
        is_last = torch.arange(1, width, device=counts.device) == counts[:, None]
        threshold[:, :-1] = torch.where(is_last, w[:, :-1], inner)
    place = torch.arange(1, width + 1, device=counts.device)
    passed = coins.below(threshold) & (place <= counts[:, None])
    accepted = (passed * place).amax(1) if width else counts
    one = torch.ones(rows, 1, dtype=p.dtype, device=p.device)
    w_accepted = torch.cat([one, w], 1).gather(1, accepted[:, None])
    return Verdict(accepted, coins.draw(_residual(p, q, accepted, counts, w_accepted)))


def _residual(p: Tensor, q: Tensor, accepted: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Weights of the closing draw: p after full acceptance, else relu(weight * p - q). -> [B, V]."""
    p_next = _row(p, accepted)
    if q.shape[1] == 0:
        return p_next
    q_next = _row(q, accepted.clamp(max=q.shape[1] - 1))
    left = (weight * p_next - q_next).clamp(min=0)
    # A residual that sums to nothing means p equals q to rounding: p itself is then the right law.
    use_p = (accepted >= counts) | (left.sum(-1) <= 0)
    return torch.where(use_p[:, None], p_next, left)
