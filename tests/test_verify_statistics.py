"""The audit's tests hold their level, find the bias they promise to find, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spectune.verifying.statistics import (
    POWER,
    SetCount,
    chi_square_tail,
    kolmogorov,
    pair_test,
)

ALPHA = 1e-3


def test_kolmogorov_knows_the_tables():
    # Critical values of sqrt(n)·D for large n (Smirnov 1948): 1.3581 at 5 %, 1.6276 at 1 %, 1.9495 at 0.1 %.
    n = 1_000_000
    for critical, level in ((1.3581, 0.05), (1.6276, 0.01), (1.9495, 0.001)):
        shift = critical / math.sqrt(n)
        u = (np.arange(n) + 0.5) / n * (1 - shift)  # the largest distance is the shift, at the upper end
        assert kolmogorov(u)[1] == pytest.approx(level, rel=0.02)


def test_kolmogorov_rejects_uniform_samples_at_its_level():
    rng = np.random.default_rng(0)
    rejected = sum(kolmogorov(rng.random(300))[1] < 0.01 for _ in range(4000))
    assert 20 <= rejected <= 62  # 40 expected, standard deviation 6.3


def test_kolmogorov_of_nothing_finds_nothing():
    assert kolmogorov(np.empty(0)) == (0.0, 1.0)


def test_a_tolerance_excuses_its_own_size_and_no_more():
    u = np.sort(np.random.default_rng(1).random(20_000)) ** 1.2  # distance 0.067 from uniform
    distance, chance = kolmogorov(u)
    assert chance < 1e-12
    assert kolmogorov(u, tolerance=distance) == (distance, 1.0)
    assert kolmogorov(u, tolerance=distance / 2)[1] < 1e-3


@pytest.mark.parametrize(("degrees", "value", "tail"), [(2, 13.816, 1e-3), (8, 26.124, 1e-3), (48, 84.037, 1e-3)])
def test_chi_square_knows_the_tables(degrees, value, tail):
    assert chi_square_tail(value, degrees) == pytest.approx(tail, rel=1e-2)


def test_pairs_hold_their_level_and_show_a_coin_that_is_used_twice():
    rng = np.random.default_rng(2)
    chances = [pair_test(rng.random((900, 2))) for _ in range(500)]
    assert 0.005 < np.mean([p < 0.02 for p in chances]) < 0.045
    twice = rng.random(900)
    assert pair_test(np.stack([twice, twice], 1)) < 1e-12


def test_too_few_pairs_are_not_judged():
    assert pair_test(np.random.default_rng(0).random((89, 2))) is None
    assert pair_test(np.random.default_rng(0).random((90, 2))) is not None


def draw(rng, chances: np.ndarray, extra: float = 0.0) -> SetCount:
    """One sample of sets with these probabilities, of which `extra` are added to each."""
    seen = int((rng.random(len(chances)) < chances + extra).sum())
    return SetCount(len(chances), seen, float(chances.sum()), float((chances * (1 - chances)).sum()))


@pytest.mark.parametrize("size", [20, 300, 4000])
def test_sets_never_reject_above_their_level(size):
    rng = np.random.default_rng(3)
    chances = rng.random(size)
    level = np.mean([draw(rng, chances).p_value() < 0.01 for _ in range(3000)])
    assert level < 0.01


def test_one_surprise_in_a_near_certain_text_is_no_finding():
    count = SetCount(tokens=1000, seen=999, expected=999.999, variance=0.001)
    assert count.p_value() > 1e-3


@pytest.mark.parametrize("size", [300, 4000])
@pytest.mark.parametrize("highest", [0.1, 0.5, 0.8])
def test_the_detectable_bias_is_detected_with_the_stated_probability(size, highest):
    rng = np.random.default_rng(4)
    chances = rng.random(size) * highest
    bias = draw(rng, chances).detectable(ALPHA) / size
    found = np.mean([draw(rng, chances, bias).p_value() < ALPHA for _ in range(1000)])
    assert found > POWER - 0.02
    # Not far from it either: what is called detectable should not be twice what is needed.
    assert np.mean([draw(rng, chances, bias / 2).p_value() < ALPHA for _ in range(1000)]) < 0.5


def test_what_rounding_may_do_is_added_to_the_detectable_bias():
    count = SetCount(tokens=1000, seen=500, expected=500.0, variance=250.0)
    plain, loose = count.detectable(ALPHA), count.detectable(ALPHA, tolerance=0.02)
    assert plain + 20 <= loose <= plain + 22
    assert SetCount(1000, 520, 500.0, 250.0).p_value(0.02) == 1.0


def test_three_impossible_tokens_are_a_finding_and_none_is_none():
    assert SetCount(4000, 0, 0.0, 0.0).p_value() == 1.0
    assert SetCount(4000, 3, 0.0, 0.0).p_value() < 1e-4
