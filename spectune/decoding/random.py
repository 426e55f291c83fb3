"""Counter-based random numbers: a coin is a pure function of (seed, stream, position, index).

Nothing is drawn from a shared generator, so a request's coins depend neither on its batch mates nor on how many
coins other rows used. The mixer is the finaliser of SplitMix64 (Steele, Lea & Flood 2014), applied once per key.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Stream(IntEnum):
    """What a coin decides. Streams are independent: one coin never decides two things."""

    DRAFT = 1  # which token the drafter proposes
    ACCEPT = 2  # whether a drafted token is kept
    TARGET = 3  # which token is drawn from the target, or from what is left of it after a rejection
    STAGE = 4  # a seed of its own for each inner round of a staged drafter
    SYNTHETIC = 5  # whether a drafted token is kept where acceptance is synthetic


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical shift: `>>` alone copies the sign


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def uniform(seed: Tensor, stream: Stream, position: Tensor, index: Tensor) -> Tensor:
    """Coins in the open interval (0, 1), float64, on the device of the arguments.

    `seed`, `position` and `index` are int64 and broadcast against each other; the result has their common shape.
    """
    # 52 random bits and half a step: never exactly 0 (which would accept p = 0) and never 1.
    return (_shift(fork(seed, stream, position, index), 12).double() + 0.5) * 2.0**-52


def fork(seed: Tensor, stream: Stream, position: Tensor, index: Tensor) -> Tensor:
    """Seeds, int64: the coins of one are independent of those of `seed` and of every other fork. Shapes as above."""
    x = _mix((seed + _GOLDEN) ^ _STREAM_KEYS[stream])
    for key in (position, index):
        x = _mix((x + _GOLDEN) ^ _mix(key + _GOLDEN))
    return x


# Numbers and not tensors: a tensor made on the way would have to be copied to the device.
_STREAM_KEYS = {stream: int(_mix(torch.tensor(stream.value) + _GOLDEN)) for stream in Stream}


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """Draw one index per row by inverting the cumulative sum.

    Args:
        weights: [..., V], non-negative, each row with a positive sum; need not be normalised.
        u: [...], coins in (0, 1).

    Returns:
        [...] int64; an index of zero weight is never returned.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[..., -1]
    # Strictly below the total, so that rounding can never step onto trailing zero weights.
    threshold = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)
    return found.clamp(max=weights.shape[-1] - 1)  # of weights that are not numbers, any index


class Coins(Protocol):
    """The random decisions of one round. Tests inject their own to enumerate every outcome."""

    def below(self, thresholds: Tensor) -> Tensor:
        """[B, K] acceptance probabilities -> [B, K] bool."""

    def draw(self, weights: Tensor) -> Tensor:
        """[B, V] weights -> [B] token ids, for the token that ends the round."""


class CounterCoins:
    """Coins of one round of B rows.

    Coins are keyed by the first position the round can emit, which no other round of the request shares, and by the
    place in the draft: a place tested again in a later round gets a fresh coin, which block verification needs
    because it reads coins behind the kept prefix.
    """

    def __init__(self, seeds: Tensor, positions: Tensor) -> None:
        self.seeds = seeds  # [B]
        self.positions = positions  # [B] position of the first token this round can emit

    def below(self, thresholds: Tensor) -> Tensor:
        place = torch.arange(thresholds.shape[1], device=thresholds.device)
        u = uniform(self.seeds[:, None], Stream.ACCEPT, self.positions[:, None], place[None])
        return u < thresholds

    def draw(self, weights: Tensor) -> Tensor:
        zero = torch.zeros_like(self.positions)
        return pick(weights, uniform(self.seeds, Stream.TARGET, self.positions, zero))
