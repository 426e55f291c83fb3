"""Acceptance by position with intervals over prompts, and how many prompts a precision needs."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_run import cell, request

from spectune.errors import UsageError
from spectune.speedup.acceptance import acceptance, speculative_requests
from spectune.speedup.positions import Measured, acceptance_length, fit_positions
from spectune.speedup.precision import parse_precision, plan_sample
from spectune.sweeping.cell import RoundCount

K = 6


def drawn(chances, prompts, rounds, seed, *, spread=0.0, k=K):
    """A cell whose drafts are kept at position i with chances[i-1], shifted for each prompt by its own amount."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(prompts):
        own = np.clip(np.array(chances[:k]) + spread * rng.standard_normal(), 0, 1)
        kept = (rng.random((rounds, k)) < own).cumprod(axis=1).sum(axis=1)
        counts = [
            RoundCount(drafted=k, accepted=int(a), count=int(n))
            for a, n in zip(*np.unique(kept, return_counts=True), strict=True)
        ]
        made.append(request(counts, 1.0, name=f"p{i}"))
    template = cell(k=k, repeats=1)
    passes = tuple(p.model_copy(update={"requests": tuple(made)}) for p in template.passes)
    return template.model_copy(update={"passes": passes})


def decay(a, g, k=K):
    return [min(1.0, a * g**i) for i in range(k)]


def test_conditionals_are_those_of_the_pooled_rounds_and_a_and_g_are_found():
    made = drawn(decay(0.85, 0.95), prompts=40, rounds=100, seed=0)
    found = fit_positions([made])
    counted = acceptance(K, speculative_requests(made))
    assert [p.conditional.value for p in found.positions] == pytest.approx(counted.conditional_acceptance)
    assert found.curve.length_at(K) == pytest.approx(counted.acceptance_length, abs=0.03)
    assert (found.a.value, found.g.value) == (pytest.approx(0.85, abs=0.03), pytest.approx(0.95, abs=0.02))
    assert found.a.low < 0.85 < found.a.high
    assert found.g.low < 0.95 < found.g.high


def test_rounds_of_other_k_are_pooled():
    two = drawn(decay(0.8, 0.9), 20, 50, seed=1, k=2)
    six = drawn(decay(0.8, 0.9), 20, 50, seed=2)
    found = fit_positions([two, six])
    assert found.positions[0].reached == 2 * 20 * 50
    assert found.positions[2].reached == fit_positions([six]).positions[2].reached
    assert found.prompts == 20


def test_intervals_hold_the_truth_in_nine_of_ten_suites_although_prompts_differ():
    """Treating rounds as independent would give intervals that are far too narrow here."""
    inside = {"first": 0, "length": 0}
    lengths = [acceptance_length(drawn(decay(0.7, 1.0), 30, 40, seed, spread=0.12)) for seed in range(1000, 1040)]
    truth = np.mean([found.value for found in lengths])
    for seed in range(60):
        made = drawn(decay(0.7, 1.0), 30, 40, seed, spread=0.12)
        first = fit_positions([made], resamples=300).positions[0].conditional
        length = acceptance_length(made, resamples=300)
        inside["first"] += first.low <= 0.7 <= first.high
        inside["length"] += length.low <= truth <= length.high
    assert min(inside.values()) >= 0.85 * 60


def test_more_prompts_narrow_the_interval_as_the_square_root():
    few, many = (acceptance_length(drawn(decay(0.7, 1.0), n, 40, 3, spread=0.1)) for n in (25, 400))
    assert few.half_width / many.half_width == pytest.approx(4, rel=0.35)


def test_one_prompt_has_values_but_no_intervals():
    found = fit_positions([drawn(decay(0.8, 0.9), 1, 200, 4)])
    assert found.curve is not None
    assert found.a.low is None
    assert found.positions[0].conditional.low is None
    assert acceptance_length(drawn(decay(0.8, 0.9), 1, 200, 4)).half_width is None


@pytest.mark.parametrize(
    ("rounds", "reason"),
    [
        ((RoundCount(drafted=0, accepted=0, count=9),), "nothing drafted"),
        ((RoundCount(drafted=4, accepted=0, count=9),), "no draft reached a second position"),
        ((RoundCount(drafted=1, accepted=1, count=9),), "no draft reached a second position"),
    ],
)
def test_what_no_draft_reached_is_null_and_says_why(rounds, reason):
    found = fit_positions([cell(k=4, rounds=rounds)])
    assert (found.curve, found.a) == (None, None)
    assert reason in found.reason
    assert found.positions[3].conditional is None


def test_two_suites_are_not_pooled():
    with pytest.raises(ValueError, match="one suite"):
        fit_positions([cell(), cell(suite="math")])


def test_the_plan_asks_for_as_many_prompts_as_the_width_needs():
    found = Measured(3.0, 2.88, 3.12)  # ± 4 %
    plan = plan_sample(found, prompts=20, precision=0.02)
    assert (plan.enough, plan.prompts, plan.half_width) == (False, 80, pytest.approx(0.04))
    assert plan_sample(found, 20, 0.0401).enough
    assert plan_sample(found, 20, 0.001).prompts == 80  # in steps: the width itself is a guess
    assert plan_sample(found, 3, 0.5).prompts == 6  # too few prompts to believe the width
    assert plan_sample(Measured(3.0, None, None), 1, 0.02).prompts == 5
    assert not plan_sample(None, 8, 0.02).enough


def test_following_the_plan_reaches_the_precision():
    prompts, sizes = 5, []
    while True:
        made = drawn(decay(0.75, 0.97), prompts, 30, seed=6, spread=0.08)
        plan = plan_sample(acceptance_length(made), prompts, 0.03)
        sizes.append(prompts)
        if plan.enough:
            break
        prompts = plan.prompts
    assert plan.half_width <= 0.03
    assert 1 < len(sizes) < 10
    assert prompts < 600


@pytest.mark.parametrize(("text", "value"), [("2%", 0.02), ("0.02", 0.02), (" 1.5 % ", 0.015)])
def test_a_precision_is_read(text, value):
    assert parse_precision(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "0", "100%", "1", "-2%", "2", "nan", "two"])
def test_other_precisions_are_refused(text):
    with pytest.raises(UsageError, match="precision"):
        parse_precision(text)
