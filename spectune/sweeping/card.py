"""The theory card in words: what memory bandwidth alone predicts, printed before anything is measured."""

from __future__ import annotations

from spectune.measuring.bytes_model import TheoryCard


def card_text(card: TheoryCard) -> str:
    """A few lines of plain text."""
    peak = card.peak_bytes_per_second
    lines = [
        f"theory  peak bandwidth {peak.value / 1e9:.1f} GB/s ({peak.source})"
        if peak.value is not None
        else f"theory  peak bandwidth unknown: {peak.reason}"
    ]
    for plain in card.batches:
        ceiling = plain.ceiling_tokens_per_second.value
        speed = "no ceiling known" if ceiling is None else f"at most {ceiling:.1f} tokens/s without drafts"
        lines.append(
            f"  batch {plain.batch}: a step reads {plain.weight_bytes / 1e6:.1f} MB of weights and "
            f"{plain.kv_bytes / 1e6:.1f} MB of context ({card.mean_context:.0f} tokens a row), {speed}"
        )
        drafts = [draft for draft in card.drafts if draft.batch == plain.batch]
        free = dict.fromkeys(draft.drafter for draft in drafts if draft.cost_ratio == 0)
        lines += [
            f"    {name}: drafting reads no weights; every accepted token pays where verifying costs one plain step"
            for name in free
        ]
        lines += [
            f"    {draft.drafter}, K {draft.k}: {_verdict(draft.cost_ratio, draft.break_even_acceptance)}"
            for draft in drafts
            if draft.drafter not in free
        ]
    return "\n".join(lines)


def _verdict(cost_ratio: float | None, needed: float | None) -> str:
    if cost_ratio is None:
        return "cost unknown"
    cost = f"a draft step reads {cost_ratio:.2f} of a target step"
    if needed is None:
        return f"{cost}: cannot pay"
    return f"{cost}: pays above {needed:.0%} acceptance per token"
