"""Timing rounds of several K in one run of the decoder: what a round costs, without decoding a suite for it.

The rounds come in turns: each turn has one round of every K, and every other turn runs backwards. A machine that is
slower for a while is so for whole turns, whose speed is taken out of their times (`timings`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from spectune.decoding.cache import send
from spectune.decoding.drafter import Draft, Kept, Round, Row
from spectune.decoding.generation import RoundTrace
from spectune.engines.engine import RoundTiming

TURNS = 6
_UNSEEN_NOISE = 0.1  # of a time that nothing was compared with


class Turns:
    """K of each round in turn; asked once a round."""

    def __init__(self, ks: Sequence[int]) -> None:
        self.order = [k for turn in range(TURNS) for k in (ks if turn % 2 == 0 else reversed(ks))]
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


def timings(ks: Sequence[int], order: Sequence[int], trace: Sequence[RoundTrace]) -> tuple[RoundTiming, ...]:
    """Medians by K over the turns, of the rounds with every slot busy, with the speed of each turn taken out.

    A turn's speed is the median over its rounds of (a round's time / the median time of its K).

    Args:
        ks: of a turn.
        order: K of each round.
    """
    by_k: dict[int, dict[int, RoundTrace]] = {}  # and by turn
    for number, (k, t) in enumerate(zip(order, trace, strict=False)):
        if t.full:
            by_k.setdefault(k, {})[number // len(ks)] = t
    usual = {k: median(map(_seconds, own.values())) for k, own in by_k.items()}
    slowness = {
        turn: median(_seconds(own[turn]) / usual[k] for k, own in by_k.items() if turn in own)
        for turn in set().union(*by_k.values())
    }
    noise = _noise([[_seconds(t) / slowness[turn] / usual[k] for turn, t in own.items()] for k, own in by_k.items()])

    def steady(own: Mapping[int, RoundTrace], seconds: Callable[[RoundTrace], float]) -> float:
        return median(seconds(t) / slowness[turn] for turn, t in own.items())

    return tuple(
        RoundTiming(
            k=k,
            rounds=len(own),
            drafted=fmean(t.drafted / t.rows for t in own.values()),
            draft_seconds=steady(own, lambda t: t.draft_seconds),
            verify_seconds=steady(own, lambda t: t.verify_seconds),
            overhead_seconds=steady(own, lambda t: t.overhead_seconds),
            # The median of n normal numbers is less certain than their mean by √(π/2).
            error=noise * math.sqrt(math.pi / 2 / len(own)),
        )
        for k, own in sorted(by_k.items())
    )


def _seconds(t: RoundTrace) -> float:
    return t.draft_seconds + t.verify_seconds + t.overhead_seconds


def _noise(ratios: Sequence[Sequence[float]]) -> float:
    """The spread of a single time, from each K's (time / its median)."""
    freedom = sum(len(own) - 1 for own in ratios)
    if freedom <= 0:
        return _UNSEEN_NOISE
    return math.sqrt(sum((r - fmean(own)) ** 2 for own in ratios for r in own) / freedom)
