"""Acceptance lengths at a smaller K than the one that was measured."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectune.speedup.shorter import cut_length_at, length_at

TOKENS = 100_000


def decode(good: list[bool], k: int) -> Counter:
    """Rounds of k over a text in which the draft is right at these places."""
    counts: Counter = Counter()
    at = 0
    while at + k < len(good):
        accepted = next((i for i in range(k) if not good[at + i]), k)
        counts[k, accepted] += 1
        at += accepted + 1
    return counts


def copied_passages() -> list[bool]:
    """Passages that are all right between passages that nothing predicts."""
    generator = random.Random(1)
    good: list[bool] = []
    while len(good) < TOKENS:
        good += [True] * generator.randint(5, 40) + [False] * generator.randint(5, 40)
    return good


def chain(after_right: float, after_wrong: float) -> list[bool]:
    generator = random.Random(2)
    good = [True]
    while len(good) < TOKENS:
        good.append(generator.random() < (after_right if good[-1] else after_wrong))
    return good


TEXTS = {
    "copied passages": copied_passages(),
    "long runs": chain(0.9, 0.2),
    "short runs": chain(0.7, 0.3),
    "equal chances, poor": chain(0.3, 0.3),
    "equal chances, good": chain(0.8, 0.8),
}


@pytest.mark.parametrize("text", TEXTS)
def test_lengths_at_smaller_k_are_those_of_decoding_with_that_k(text):
    good = TEXTS[text]
    for largest, tolerance in ((8, 0.02), (4, 0.04)):
        long = decode(good, largest)
        for k in range(1, largest + 1):
            truth = length_at(decode(good, k), k)
            assert length_at(long, k) == pytest.approx(truth, rel=tolerance)


def test_cutting_each_round_would_forget_what_a_run_is_good_for():
    long = decode(TEXTS["copied passages"], 8)
    cut = 1 + sum(min(a, 2) * n for (_, a), n in long.items()) / long.total()
    assert cut < 0.85 * length_at(decode(TEXTS["copied passages"], 2), 2)


def test_rounds_that_drafted_less_stay_what_they_are():
    counts = Counter({(0, 0): 10, (8, 8): 10, (2, 2): 5, (2, 1): 5})
    assert length_at(counts, 8) == pytest.approx((10 + 90 + 15 + 10) / 30)
    assert length_at(counts, 2) == pytest.approx((10 + 90 + 15 + 10) / (10 + 30 + 5 + 5))
    assert length_at(Counter({(0, 0): 7}), 3) == 1.0


@given(
    st.dictionaries(st.tuples(st.integers(0, 8), st.integers(0, 8)), st.integers(1, 50), min_size=1), st.integers(1, 8)
)
def test_lengths_lie_between_one_and_k_plus_one(found, k):
    counts = Counter({(max(d, a), min(d, a)): n for (d, a), n in found.items()})
    assert 1 <= length_at(counts, k) <= k + 1 + 1e-9


@given(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=6))
def test_rounds_whose_positions_have_rates_of_their_own_are_cut(rates):
    """Counts in proportion to the chances; 1 + Σ Π rates is exact at every K."""
    counts: Counter = Counter()
    reached = 1.0
    for position, rate in enumerate(rates):
        counts[len(rates), position] += reached * (1 - rate)
        reached *= rate
    counts[len(rates), len(rates)] += reached
    for k in range(1, len(rates) + 1):
        expected = 1 + sum(math.prod(rates[: i + 1]) for i in range(k))
        assert cut_length_at(counts, k) == pytest.approx(expected)
