"""The theory card in words: what memory bandwidth alone predicts, printed before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence

from spectune.measuring.bytes_model import DraftTheory, TheoryCard


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
        for name in dict.fromkeys(draft.drafter for draft in drafts if draft.drafter not in free):
            lines.append(f"    {name}: {_verdict([draft for draft in drafts if draft.drafter == name])}")
    return "\n".join(lines)


def _verdict(drafts: Sequence[DraftTheory]) -> str:
    """Of one drafter at all K."""
    if (ratio := drafts[0].cost_ratio) is None:
        return "cost unknown"
    cost = f"a draft step reads {ratio:.2f} of a target step"
    needed = [(draft.break_even_acceptance, draft.k) for draft in drafts if draft.break_even_acceptance is not None]
    if not needed:
        return f"{cost}: cannot pay"
    (least, first), (most, last) = min(needed), max(needed)
    if f"{least:.0%}" == f"{most:.0%}":
        return f"{cost}: pays above {least:.0%} acceptance per token"
    return f"{cost}: pays above {least:.0%} acceptance per token at K {first}, above {most:.0%} at K {last}"
