"""Timing rounds of several K in one run of the decoder: what a round costs, without decoding a suite for it.

Rounds come in blocks of one K, and every K has two blocks, the second in reverse order, so that drift hits all alike.
Times are medians: what the first round of a block costs beyond the others does not move them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

import torch
from torch import Tensor

from spectune.decoding.cache import send
from spectune.decoding.drafter import Draft, Kept, Round, Row
from spectune.decoding.generation import RoundTrace
from spectune.engines.engine import RoundTiming

BLOCK = 3  # rounds


class Blocks:
    """K of each round in turn; asked once a round."""

    def __init__(self, ks: Sequence[int]) -> None:
        self.order = [k for half in (ks, tuple(reversed(ks))) for k in half for _ in range(BLOCK)]
        self.largest = max(ks)
        self._next = iter(self.order)

    def at(self, rows: int) -> int:
        return next(self._next)


class FullWidth:
    """Offers the newest token again and again, as many times as it may: drafts nothing, but fills the verification."""

    device: torch.device | None = None
    taps: tuple[int, ...] = ()

    def start(self, rows: int, capacity: int) -> None: ...

    def admit(self, index: int, row: Row, states: Tensor | None) -> None: ...

    def propose(self, round_: Round) -> Draft | None:
        places = round_.places(round_.limits)
        tokens = send([[row.tokens[-1]] * places for row in round_.rows], round_.device)
        return Draft(tokens, round_.numbers(round_.device).limits.clone(), None, 0)

    def keep(self, rows: Sequence[Row], kept: Kept) -> None: ...

    def move(self, source: int, destination: int) -> None: ...


def timings(order: Sequence[int], trace: Sequence[RoundTrace]) -> tuple[RoundTiming, ...]:
    """Medians by K, over the rounds with every slot busy."""
    done = sorted(((k, t) for k, t in zip(order, trace, strict=False) if t.full), key=lambda pair: pair[0])
    found = []
    for k, pairs in groupby(done, key=lambda pair: pair[0]):
        own = [t for _, t in pairs]
        found.append(
            RoundTiming(
                k,
                len(own),
                median(t.draft_seconds for t in own),
                median(t.verify_seconds for t in own),
                median(t.overhead_seconds for t in own),
            )
        )
    return tuple(found)
