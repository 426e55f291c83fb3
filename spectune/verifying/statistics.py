"""The tests behind the audit of a sampling rule, and how small a bias they find. Pure numpy.

A lossless rule emits each token with exactly the target's probability, given the tokens before it. Three things follow,
and each is tested on all emitted tokens of a run together:

- *Uniformity*. With F the target's distribution function in some order of the vocabulary, u = F(below x) + v·p(x) with
  v uniform is uniform and independent from token to token (Rosenblatt 1952, with randomised jumps as in Czado,
  Gneiting & Held 2009, doi:10.1111/j.1541-0420.2009.01191.x). Tested by Kolmogorov's statistic.
- *Independence*. Two neighbouring u are uniform on the square: chi-square over a grid.
- *Sets*. If a set of tokens is chosen by what was known before, its tokens occur as often as their probabilities sum
  to. For a bias that favours exactly the tokens of the set, the excess is the whole total-variation distance, so few
  draws show it; for any other bias it is a lower bound of that distance.

A bias up to the `tolerance` is allowed everywhere: the distance between two exact ways to compute the target's
distribution, which rounding makes different.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POWER_QUANTILE = 1.2816  # of the normal distribution at the stated power
POWER = 0.9
_ROUNDING_VARIANCE = 1e-6  # per token: what "impossible" means in float32

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SetCount:
    """How often tokens of a set occurred, over `tokens` draws of which each had its own set.

    `expected` and `variance` are the sums of π and π(1 - π), π the set's probability in a draw.
    """

    tokens: int
    seen: int
    expected: float
    variance: float

    @property
    def excess(self) -> float:
        return abs(self.seen - self.expected)

    def p_value(self, tolerance: float = 0.0) -> float:
        """A bound on the chance of such an excess, in either direction; valid for any number of draws.

        Bennett's inequality, for dependent draws Freedman's (1975, doi:10.1214/aop/1176996452).
        """
        return _tail(max(0.0, self.excess - tolerance * self.tokens), self._variance)

    def detectable(self, alpha: float, tolerance: float = 0.0) -> float:
        """The excess that a test at level `alpha` finds with the probability `POWER`.

        The critical excess, and a margin of POWER_QUANTILE standard deviations of the biased count.
        """
        critical = _solve(lambda x: _tail(x, self._variance) <= alpha, self.tokens + 1.0)
        critical += tolerance * self.tokens
        z = POWER_QUANTILE
        # A biased set's variance is at most this variance plus the excess y: y = critical + z·sqrt(variance + y).
        return critical + z * z / 2 + z * math.sqrt(critical + self._variance + z * z / 4)

    @property
    def _variance(self) -> float:
        return self.variance + _ROUNDING_VARIANCE * self.tokens


def _tail(excess: float, variance: float) -> float:
    """2·exp(-V·h(x/V)), h(r) = (1 + r)·ln(1 + r) - r."""
    if excess <= 0 or variance <= 0:
        return 1.0
    r = excess / variance
    return min(1.0, 2 * math.exp(-variance * ((1 + r) * math.log1p(r) - r)))


def kolmogorov(u: Numbers, tolerance: float = 0.0) -> tuple[float, float]:
    """Kolmogorov's distance of a sample from the uniform distribution, and its p-value.

    The limit law with Stephens's correction for the sample size (1970, doi:10.1111/j.2517-6161.1970.tb00821.x).
    """
    n = len(u)
    if n == 0:
        return 0.0, 1.0
    ordered = np.sort(u)
    rank = np.arange(1, n + 1)
    distance = float(max((rank / n - ordered).max(), (ordered - (rank - 1) / n).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * max(0.0, distance - tolerance)
    if scaled < 0.3:  # there the series needs many terms to say 1
        return distance, 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, 2 * sum(terms)))


def pair_test(pairs: Numbers) -> float | None:
    """p-value of the chi-square test that pairs [n, 2] are uniform on the unit square.

    The grid is as fine as ten pairs in a cell allow, with an odd side: the degrees of freedom are then even and the
    p-value is a finite sum. None for fewer than 90 pairs.
    """
    side = next((s for s in (9, 7, 5, 3) if len(pairs) >= 10 * s * s), None)
    if side is None:
        return None
    cells = np.minimum((pairs * side).astype(np.int64), side - 1)
    counts = np.bincount(cells[:, 0] * side + cells[:, 1], minlength=side * side)
    expected = len(pairs) / side**2
    return chi_square_tail(float(((counts - expected) ** 2).sum() / expected), side**2 - 1)


def chi_square_tail(value: float, degrees: int) -> float:
    """P(chi-square > value) for an even number of degrees of freedom."""
    half = value / 2
    term = total = 1.0
    for i in range(1, degrees // 2):
        term *= half / i
        total += term
    return min(1.0, math.exp(-half) * total)


def _solve(holds: Callable[[float], bool], high: float) -> float:
    """The smallest x in [0, high] from which on `holds`; `high` where it never does."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
