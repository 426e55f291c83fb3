"""How long the prompts of a suite are, counted in words: no tokenizer is known yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from spectune.suites.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Lengths:
    """Words of a prompt: smallest, quartiles, mean and largest over a suite."""

    min: int
    p25: float
    median: float
    p75: float
    max: int
    mean: float


def words(prompt: Prompt) -> int:
    """Words separated by white space, over all messages."""
    said = [prompt.text or "", *(message.content for message in prompt.messages or ())]
    return sum(len(text.split()) for text in said)


def lengths(prompts: Sequence[Prompt]) -> Lengths:
    """The spread over at least one prompt."""
    counts = sorted(words(prompt) for prompt in prompts)
    p25, median, p75 = quantiles(counts * 2 if len(counts) == 1 else counts, n=4, method="inclusive")
    return Lengths(counts[0], p25, median, p75, counts[-1], fmean(counts))


def categories(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Prompts of each category, in the order they first appear."""
    return dict(Counter(prompt.category for prompt in prompts))
