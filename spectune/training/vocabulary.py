"""The draft vocabulary: the few thousand ids that nearly all of a target's text is made of.

In a small model the output head is a fifth of all weights, in a draft head nearly everything; a head over the ids
that are really used costs a fraction and misses little (FR-Spec, Zhao et al. 2025; EAGLE-3's d2t).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from spectune.errors import UsageError
from spectune.training.text import Text


def count_written(texts: Iterable[Text]) -> Counter[int]:
    """How often the target wrote each id."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.ids[text.prompt :])
    return counts


def draft_vocabulary(counts: Counter[int], size: int, vocab_size: int, forced: Collection[int] = ()) -> Tensor:
    """The `size` most frequent ids, ascending; `forced` ones are always in, unused places go to the lowest ids.

    Raises:
        UsageError: a size below that of `forced` or above the vocabulary's.
    """
    inside = {i for i in forced if 0 <= i < vocab_size}
    if not len(inside) < size <= vocab_size:
        raise UsageError(
            f"a draft vocabulary of {size} ids does not fit: {len(inside)} special ids must be in it, "
            f"the target has {vocab_size}",
            f"choose --draft-vocab between {len(inside) + 1} and {vocab_size}",
        )
    frequent = sorted((i for i in counts if i not in inside), key=lambda i: (-counts[i], i))
    chosen = inside | set(frequent[: size - len(inside)])
    unused = (i for i in range(vocab_size) if i not in chosen)
    chosen |= {next(unused) for _ in range(size - len(chosen))}
    return torch.tensor(sorted(chosen))


def coverage(counts: Counter[int], draft_ids: Tensor) -> float:
    """Share of the written tokens whose id is in the draft vocabulary."""
    inside = set(draft_ids.tolist())
    return sum(n for i, n in counts.items() if i in inside) / max(1, counts.total())
