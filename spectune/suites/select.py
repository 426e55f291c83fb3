"""Choosing prompts of a suite: by category, the first N, or a seeded sample of N."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from difflib import get_close_matches

from spectune.errors import UsageError
from spectune.suites.prompt import Prompt


def select(
    prompts: Sequence[Prompt],
    *,
    categories: Sequence[str] = (),
    limit: int | None = None,
    sample_seed: int | None = None,
) -> tuple[Prompt, ...]:
    """The chosen prompts, in the order of the file.

    Raises UsageError for an unknown category, a limit below 1, and a seed without a limit.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"a limit of {limit} prompts leaves nothing to measure", "use a limit of at least 1")
    if limit is None and sample_seed is not None:
        raise UsageError("a sample needs its size", "give a limit beside the seed")
    kept = [p for p in prompts if not categories or p.category in _known(categories, prompts)]
    if limit is None:
        return tuple(kept)
    if sample_seed is None:
        return tuple(kept[:limit])
    # Ranks by hash: the same prompts on every Python version, whatever random.sample does there.
    drawn = {p.id for p in sorted(kept, key=lambda p: _rank(sample_seed, p.id))[:limit]}
    return tuple(p for p in kept if p.id in drawn)


def _known(categories: Sequence[str], prompts: Sequence[Prompt]) -> Sequence[str]:
    known = list(dict.fromkeys(p.category for p in prompts))
    for name in categories:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"no category {name!r}", f"{meant}the categories are {', '.join(known)}")
    return categories


def _rank(seed: int, prompt_id: str) -> str:
    return hashlib.sha256(f"{seed}:{prompt_id}".encode()).hexdigest()
