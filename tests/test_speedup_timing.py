"""Rates, latencies and the parts of a round."""

from __future__ import annotations

import pytest
from synthetic_run import STEP, cell, request, rounds_of

from spectune.speedup.profile import profile
from spectune.speedup.timing import cell_timing, tpot
from spectune.sweeping.figures import figures


def test_the_speedup_is_the_ratio_of_decode_rates_at_full_occupancy():
    found = profile(cell(speedup=2.0, noise=0))
    assert found.timing.plain_tokens_per_second == pytest.approx(1 / STEP)
    assert found.timing.speculative_tokens_per_second == pytest.approx(2 / STEP)
    assert found.speedup.value == pytest.approx(2.0)


def test_a_batch_decodes_as_many_times_faster():
    assert cell_timing(cell(batch=4)).plain_tokens_per_second == pytest.approx(4 / STEP)


def test_the_sweep_and_the_analysis_print_the_same_figures():
    one = cell(speedup=1.37, batch=4, drift=lambda repeat: 0.1 * repeat)
    found, swept = profile(one), figures(one)
    assert found.speedup.value == pytest.approx(swept.speedup)
    assert found.timing.plain_tokens_per_second == pytest.approx(swept.plain_tokens_per_second)
    assert found.acceptance.acceptance_length == swept.acceptance_length
    assert found.acceptance.acceptance_rate == swept.acceptance_rate


def test_each_repeat_is_compared_with_its_own_plain_pass():
    found = cell_timing(cell(speedup=2.0, noise=0, drift=lambda repeat: repeat))
    assert found.repeat_speedups == pytest.approx((2.0, 1.0))


def test_without_full_occupancy_all_rounds_are_used_and_a_note_says_so():
    found = profile(cell(full=False, speedup=2.0, noise=0))
    assert not found.timing.full_occupancy
    assert found.speedup.value == pytest.approx(2.0)
    assert any(note.startswith("no-full-occupancy") for note in found.notes)


def test_the_parts_of_a_round_are_told_apart():
    found = cell_timing(cell(k=4, speedup=1.5, cost_ratio=0.1, verify=1.2))
    assert found.target_step_seconds == pytest.approx(STEP)
    assert found.cost_ratio == pytest.approx(0.1)
    assert found.verify_inflation == pytest.approx(1.2)
    assert found.break_even_length == pytest.approx(3 / 1.5)
    assert found.overhead_share == pytest.approx((2.0 - 0.4 - 1.2) / 2.0)


def test_a_drafter_without_forwards_has_one_step_per_round():
    found = cell_timing(cell(k=8, steps=0, cost_ratio=0.05, drafter="ngram"))
    assert found.cost_ratio == pytest.approx(0.05)


def test_unknown_times_are_null_but_the_speedup_stays():
    found = profile(cell(timed=False, speedup=2.0))
    assert found.timing.cost_ratio is None
    assert found.timing.break_even_length is None
    assert found.timing.overhead_share is None
    assert found.speedup.value == pytest.approx(2.0, rel=0.01)


def test_time_per_token_needs_a_second_token():
    assert tpot(request((), 0.0)) is None
    assert tpot(request(rounds_of((4, 3)), 0.4)) == pytest.approx(0.1)


def test_a_run_of_single_tokens_has_no_speed():
    one = cell()
    single = request((), 0.0, full=False)
    passes = tuple(p.model_copy(update={"requests": (single,)}) for p in one.passes)
    found = profile(one.model_copy(update={"passes": passes}))
    assert found.speedup.value is None
    assert found.speedup.reason == "no token was decoded in a measurable time"
    assert found.timing.plain_tpot_seconds is None
    assert found.timing.plain_tokens_per_second is None
