"""Rates, latencies and the parts of a round."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from synthetic_run import STEP, cell, request, rounds_of

from spectune.speedup.profile import profile
from spectune.speedup.timing import cell_timing, tpot
from spectune.sweeping.cell import RoundCount
from spectune.sweeping.figures import decode_rate, figures, tokens_and_seconds


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


def pass_of(*requests):
    done = cell(batch=2).passes[-1]
    return done.model_copy(update={"requests": requests, "mode": "speculative"})


def partly_full(name: str, rounds: int, kept: int, full_rounds: int, seconds: float = 1.0):
    """A request that kept so many tokens a round; every slot was busy in its first `full_rounds` rounds."""
    whole = request((RoundCount(drafted=4, accepted=kept, count=rounds),), rounds * seconds, name=name)
    full = {
        "full_rounds": full_rounds,
        "full_tokens": full_rounds * (kept + 1),
        "full_seconds": full_rounds * seconds,
    }
    return whole.model_copy(update=full)


def test_a_rate_is_that_of_slots_that_are_filled_again_whichever_row_ends_first():
    """Two slots, 15 tokens each: one row takes 5 rounds of 3, the other 15 of 1. Kept filled, they give 30 in 20."""
    done = pass_of(partly_full("quick", 5, 2, 5), partly_full("slow", 15, 0, 5))
    assert decode_rate([done], 2) == pytest.approx(2 * 30 / 20)
    assert tokens_and_seconds(done, full=True) == [(15, 5.0), (15, 15.0)]


def test_rounds_without_a_full_one_take_as_long_as_the_full_ones_of_the_pass():
    done = pass_of(partly_full("a", 4, 1, 4, 0.5), partly_full("late", 3, 0, 0))
    assert tokens_and_seconds(done, full=True) == [(8, 2.0), (3, 1.5)]


def test_idle_slots_count_as_they_were_where_nothing_was_full():
    done = pass_of(partly_full("a", 4, 1, 0), partly_full("b", 3, 0, 0))
    assert tokens_and_seconds(done, full=False) == [(8, 4.0), (3, 3.0)]
    assert tokens_and_seconds(done, full=True) == [(8, 0.0), (3, 0.0)]
    assert decode_rate([done], 2) is None


def test_files_without_a_number_of_full_rounds_keep_the_rate_over_these_rounds():
    old = [partly_full("quick", 5, 2, 5), partly_full("slow", 15, 0, 5)]
    done = pass_of(*(r.model_copy(update={"full_rounds": None}) for r in old))
    assert tokens_and_seconds(done, full=True) == [(15, 5.0), (5, 5.0)]


def test_short_passes_are_as_fast_on_average_as_long_ones():
    """Random rows over few slots: nothing depends on how many prompts there are per slot."""
    generator = random.Random(0)

    def simulated(prompts: int, slots: int, tokens: int = 16):
        waiting = [[f"p{i}", tokens, [], 0] for i in range(prompts)]
        busy, done = [], []
        while waiting or busy:
            while waiting and len(busy) < slots:
                busy.append(waiting.pop())
            full = len(busy) == slots
            for row in busy:
                kept = min(row[1], 9 if generator.random() < 0.1 else 1)
                row[1] -= kept
                row[2].append(kept)
                row[3] += full
            done += [row for row in busy if row[1] == 0]
            busy = [row for row in busy if row[1]]
        return pass_of(*(to_request(*row) for row in done))

    def to_request(name, _, kept, full):
        counts = tuple(RoundCount(drafted=8, accepted=n - 1, count=c) for n, c in Counter(kept).items())
        whole = request(counts, float(len(kept)), name=name)
        return whole.model_copy(
            update={"full_rounds": full, "full_tokens": sum(kept[:full]), "full_seconds": float(full)}
        )

    few = [simulated(8, 8) for _ in range(300)]
    many = [simulated(400, 8) for _ in range(6)]
    assert decode_rate(few, 8) == pytest.approx(decode_rate(many, 8), rel=0.02)

    def naive(passes):
        own = [r for p in passes for r in p.requests]
        return 8 * sum(r.full_tokens for r in own) / sum(r.full_seconds for r in own)

    assert naive(few) > 1.05 * decode_rate(many, 8)
