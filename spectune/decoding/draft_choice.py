"""How a draft head's logits become a token: penalty, temperature, coins, and the way back from a draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectune.decoding.drafter import Draft, Round
from spectune.decoding.random import pick
from spectune.decoding.sampling import is_greedy, penalize, probabilities


def penalize_draft(logits: Tensor, before: Sequence[Tensor], round_: Round, draft_ids: Tensor | None) -> Tensor:
    """Apply the run's repetition penalty to draft logits.

    Args:
        logits: [B, D] or, with one past for all places, [B, n, D].
        before: the round's drafted tokens so far, [B] each.
        draft_ids: [D] ids of the draft vocabulary; None: the first D ids.
    """
    if round_.history.seen is None:
        return logits
    seen = round_.history.after(round_.count, list(before))
    seen = seen[:, : logits.shape[-1]] if draft_ids is None else seen[:, draft_ids.to(seen.device)]
    seen = seen.to(logits.device).view(len(seen), *(1,) * (logits.dim() - 2), -1)
    return penalize(logits, seen, round_.history.penalty)


def choose(
    logits: Tensor, before: Sequence[Tensor], round_: Round, draft_ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The next token of a chain, and the distribution it was drawn from where the rule needs that.

    Args:
        logits: [B, D] over the draft vocabulary, whose ids ascend: only then does the target's coin (`match`) pick a
            like token.
        before: the round's drafted tokens so far, [B] each, as target ids.

    Returns:
        [B] target ids; [B, D] or None.
    """
    logits = penalize_draft(logits, before, round_, draft_ids)
    q = None
    if is_greedy(round_.sampling) or round_.rule == "typical":
        index = logits.argmax(-1)
    else:
        q = probabilities(logits, round_.sampling)
        index = pick(q, round_.draft_coins(len(before), logits.device))
    token = index if draft_ids is None else draft_ids[index]
    return token, None if round_.rule == "match" else q


def chain(
    tokens: Sequence[Tensor],
    distributions: Sequence[Tensor | None],
    limits: Tensor,
    round_: Round,
    draft_ids: Tensor | None,
    target_vocab: int,
    steps: int,
) -> Draft:
    """The round's draft from a chain's tokens [B] and distributions [B, D]; rows keep to their limits [B]."""
    drafted = torch.stack(list(tokens), 1).to(round_.device)
    counts = torch.minimum(limits, round_.counts_before_stop(drafted))
    known = [q for q in distributions if q is not None]
    q_all = widen(torch.stack(known, 1).to(round_.device), draft_ids, target_vocab) if known else None
    return Draft(drafted, counts, q_all, steps)


def widen(q: Tensor, draft_ids: Tensor | None, target_vocab: int) -> Tensor:
    """Distributions over the draft vocabulary as ones over the target's. [..., D] -> [..., V]."""
    if draft_ids is None:
        return torch.nn.functional.pad(q, (0, target_vocab - q.shape[-1]))
    wide = torch.zeros(*q.shape[:-1], target_vocab, dtype=q.dtype, device=q.device)
    wide[..., draft_ids.to(q.device)] = q
    return wide
