"""Intervals and verdicts."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_run import cell

from spectune.speedup.uncertainty import (
    RESAMPLES,
    Rates,
    cell_rates,
    estimate,
    over_batches,
    over_suites,
    verdict,
)


def rates(plain, speculative):
    return Rates(plain, speculative, np.full(10, plain), np.full(10, speculative), 8, 2)


def test_the_interval_holds_the_speedup_and_grows_with_the_spread_of_prompts():
    calm, noisy = (estimate(cell_rates(cell(speedup=1.5, noise=n))) for n in (1, 20))
    for found in (calm, noisy):
        assert found.low < found.value < found.high
    assert noisy.high - noisy.low > 5 * (calm.high - calm.low)
    assert RESAMPLES >= 1000


def test_the_same_cell_gives_the_same_interval():
    assert estimate(cell_rates(cell())) == estimate(cell_rates(cell()))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """40 cells with prompt noise of 10 %; a 95 % interval misses more than 8 with a chance below 1e-4."""
    generator = np.random.default_rng(3)
    missed = 0
    for _ in range(40):
        one = cell(prompts=20, noise=0)
        factors = generator.normal(1, 0.1, 20)
        passes = []
        for p in one.passes:
            requests = tuple(
                r.model_copy(update={"full_seconds": r.full_seconds * f}) if p.mode == "speculative" else r
                for r, f in zip(p.requests, factors, strict=True)
            )
            passes.append(p.model_copy(update={"requests": requests}))
        found = estimate(cell_rates(one.model_copy(update={"passes": tuple(passes)})))
        missed += not found.low < 2.0 < found.high
    assert missed <= 8


def test_drift_between_repeats_widens_the_interval():
    steady = estimate(cell_rates(cell(repeats=3)))
    drifting = estimate(cell_rates(cell(repeats=3, drift=lambda repeat: 0.3 * repeat)))
    assert drifting.high - drifting.low > 5 * (steady.high - steady.low)


@pytest.mark.parametrize(("speedup", "expected"), [(2.0, "FASTER"), (0.5, "SLOWER"), (1.0, "CAN'T TELL")])
def test_the_verdict_needs_the_whole_interval_on_one_side(speedup, expected):
    assert estimate(cell_rates(cell(speedup=speedup))).verdict == expected


def test_an_interval_that_touches_one_is_no_verdict():
    assert verdict(1.0, 1.2) == verdict(0.8, 1.0) == verdict(None, None) == "CAN'T TELL"


def test_one_prompt_has_a_speedup_without_an_interval_and_a_reason():
    found = estimate(cell_rates(cell(prompts=1)))
    assert found.value == pytest.approx(2.0)
    assert (found.low, found.high) == (None, None)
    assert found.verdict == "CAN'T TELL"
    assert "one prompt" in found.reason


def test_repeated_prompts_are_one_cluster():
    one = cell(prompts=3)
    passes = tuple(
        p.model_copy(
            update={
                "requests": tuple(
                    r.model_copy(update={"id": f"p0#{i}" if i else "p0", "repeats": "p0" if i else None})
                    for i, r in enumerate(p.requests)
                )
            }
        )
        for p in one.passes
    )
    assert cell_rates(one.model_copy(update={"passes": passes})).prompts == 1


def test_suites_add_up_their_times_and_speedups_are_not_averaged():
    # 100 tokens of each: 1 s + 10 s before, 0.25 s + 10 s after
    together = estimate(over_suites([rates(100, 400), rates(10, 10)]))
    assert together.value == pytest.approx(11 / 10.25)


def test_batches_weigh_the_same_time_of_plain_decoding():
    together = estimate(over_batches([rates(100, 210), rates(300, 360), rates(500, 400)]))
    assert together.value == pytest.approx(3 / (1 / 2.1 + 1 / 1.2 + 1 / 0.8))


def test_a_part_without_an_interval_leaves_the_whole_without_one():
    bare = Rates(10.0, 20.0, None, None, 1, 2, "one prompt only")
    found = estimate(over_suites([bare, rates(10, 20)]))
    assert found.value == pytest.approx(2.0)
    assert found.low is None
    assert found.reason == "one prompt only"
