"""Latency surfaces: known cost models are found again, and nothing far away is predicted unasked."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from spectune.errors import UsageError
from spectune.speedup.curve import AcceptanceCurve, CurvePoint, fit_curve
from spectune.speedup.prediction import RoundModel
from spectune.speedup.surface import Point, fit_form, fit_surface

RUNS = 200
NOISE = 0.03
PLACES = tuple(product((1, 4, 16, 64), (1, 3, 5, 9), (128, 512, 2048)))
DRAFT_PLACES = tuple(product((1, 4, 16, 64), (1,), (128, 512, 1024, 2048)))
TARGET = {"fixed": 2e-3, "kv": 2e-8, "token": 8e-5, "weights": 12e-3}
DRAFT = {"fixed": 5e-4, "kv": 4e-9, "token": 1e-5}
CURVE = AcceptanceCurve(0.85, 0.96, 0.0)
KS = range(1, 9)
OVERHEAD = 1e-3


def roofline(b, q, ctx, *, fixed, kv, token, weights):
    return fixed + ((weights + kv * b * ctx) ** 4 + (token * b * q) ** 4) ** 0.25


def linear(b, q, ctx, *, fixed, kv, token):
    return fixed + kv * b * ctx + token * b * q


def measured(truth, places, rng, noise=NOISE):
    return [Point(*place, truth(*place) * (1 + noise * rng.standard_normal())) for place in places]


def target_time(b, q, ctx):
    return roofline(b, q, ctx, **TARGET)


def draft_time(b, q, ctx):
    return linear(b, q, ctx, **DRAFT)


def speedup(k, b, ctx):
    seconds = k * draft_time(b, 1, ctx) + target_time(b, k + 1, ctx) + OVERHEAD
    return CURVE.length_at(k) * target_time(b, 1, ctx) / seconds


@pytest.fixture(scope="module")
def runs():
    """For each seed the two fitted surfaces, and the regret of the K chosen at two batches."""
    found = []
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        target = fit_form(measured(target_time, PLACES, rng), "roofline")
        draft = fit_form(measured(draft_time, DRAFT_PLACES, rng), "linear")
        lengths = [CurvePoint.at(k, CURVE.length_at(k) * (1 + NOISE * rng.standard_normal())) for k in KS]
        model = RoundModel(fit_curve(lengths), target, draft, overhead_seconds=OVERHEAD)
        regrets = []
        for batch, context in ((4, 512), (32, 512)):
            true = {k: speedup(k, batch, context) for k in KS} | {0: 1.0}
            chosen = model.optimum(KS, batch, context).k
            regrets.append(1 - true[chosen] / max(true.values()))
        found.append((target, draft, regrets))
    return found


@pytest.mark.parametrize(("which", "truth"), [(0, TARGET), (1, DRAFT)])
def test_intervals_hold_the_true_coefficients_in_nine_of_ten_noisy_runs(runs, which, truth):
    for i, name in enumerate(truth):
        coefficients = [run[which].coefficients[i] for run in runs]
        assert {c.name for c in coefficients} == {name}
        inside = sum(c.value is not None and c.low <= truth[name] <= c.high for c in coefficients)
        assert inside >= 0.9 * RUNS, name


def test_intervals_are_not_so_wide_that_they_say_nothing(runs):
    for target, _, _ in runs[:20]:
        weights = next(c for c in target.coefficients if c.name == "weights")
        assert (weights.high - weights.low) / 2 < 0.5 * TARGET["weights"]


def test_the_predicted_k_is_right_or_costs_less_than_one_percent_in_95_of_100_runs(runs):
    regrets = np.array([regret for *_, regret in runs])
    assert ((regrets < 0.01).mean(axis=0) >= 0.95).all()
    assert (regrets > 0).any()  # noise does move the choice: the test can fail


@pytest.mark.parametrize("form", ["linear", "roofline"])
def test_the_form_that_predicts_held_out_places_better_is_used_and_both_errors_are_kept(form):
    truth = target_time if form == "roofline" else lambda b, q, c: linear(b, q, c, fixed=8e-3, kv=2e-8, token=3e-5)
    found = fit_surface(measured(truth, PLACES, np.random.default_rng(1), noise=0.01))
    assert found.best.form == form
    errors = {s.form: s.held_out_median for s in found.tried}
    assert errors[form] == min(errors.values())
    assert len(found.best.residuals) == len(PLACES)


def test_a_few_disturbed_measurements_do_not_bend_the_surface():
    points = measured(target_time, PLACES, np.random.default_rng(2), noise=0.01)
    disturbed = [replace(p, seconds=3 * p.seconds) if i in (5, 17, 40) else p for i, p in enumerate(points)]
    found = fit_surface(disturbed).best
    assert found.seconds(4, 5, 512) == pytest.approx(target_time(4, 5, 512), rel=0.03)
    assert max(found.residuals) < 0.1
    assert sum(r < -0.5 for r in found.residuals) == 3  # and the residuals name them


def test_an_interval_holds_about_95_of_100_new_measurements():
    rng = np.random.default_rng(3)
    found = fit_surface(measured(target_time, PLACES, rng)).best
    inside = 0
    for p in measured(target_time, PLACES * 8, rng):
        there = found.predict(*p.place)
        inside += there.low <= p.seconds <= there.high
    assert 0.91 <= inside / (8 * len(PLACES)) <= 0.99


@pytest.mark.parametrize(
    ("place", "name"), [((129, 1, 512), "B"), ((0.4, 1, 512), "B"), ((1, 19, 512), "q"), ((1, 1, 4097), "ctx")]
)
def test_beyond_twice_the_measured_range_nothing_is_predicted_unasked(place, name):
    found = fit_surface(measured(target_time, PLACES, np.random.default_rng(4))).best
    with pytest.raises(UsageError, match=f"{name} = .* beyond twice the measured range"):
        found.predict(*place)
    assert found.predict(*place, extrapolate=True).extrapolated
    assert found.predict(128, 18, 4096).extrapolated
    assert not found.predict(8, 4, 1000).extrapolated


def test_experts_are_found_where_more_tokens_touch_more_weights():
    share = 1 / 16

    def truth(b, q, c):
        return linear(b, q, c, fixed=8e-3, kv=2e-8, token=3e-5) + 10e-3 * (1 - (1 - share) ** (b * q))

    points = measured(truth, PLACES, np.random.default_rng(5), noise=0.01)
    experts = fit_surface(points, expert_share=share).best
    assert next(c for c in experts.coefficients if c.name == "experts").value == pytest.approx(10e-3, rel=0.1)
    assert experts.held_out_median < 0.5 * fit_surface(points).best.held_out_median


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([], "0 places"),
        ([(1, 1, 128)] * 20, "1 places"),
        (list(product((4,), (1,), (128, 256, 512, 1024, 2048, 4096))), "sizes B·q"),
        (list(product((1, 2, 4, 8, 16, 32), (1,), (128,))), "do not vary independently"),
    ],
)
def test_points_that_cannot_tell_the_coefficients_apart_give_a_reason(places, reason):
    found = fit_surface(measured(target_time, places, np.random.default_rng(6)))
    assert found.best is None
    assert found.reason.startswith("not identifiable")
    assert reason in found.reason


def test_a_coefficient_that_another_can_replace_is_null_with_a_reason():
    """With few new tokens nothing is limited by compute, so `fixed` and `weights` are one number."""
    few = tuple(product((1, 2, 3), (1, 2), (128, 512, 2048)))
    found = fit_form(measured(target_time, few, np.random.default_rng(7), noise=0.01), "roofline")
    values = {c.name: c.value for c in found.coefficients}
    reasons = {c.name: c.reason for c in found.coefficients}
    assert (values["fixed"], values["weights"]) == (None, None)
    assert "other coefficients" in reasons["weights"]
    assert found.seconds(2, 2, 512) == pytest.approx(target_time(2, 2, 512), rel=0.02)


def test_zero_times_are_left_out():
    assert fit_surface([Point(*place, 0.0) for place in PLACES]).points == 0


def test_draws_stay_at_the_fitted_times_where_coefficients_can_replace_each_other():
    """As in a run of one K and nearly one context: each coefficient is uncertain, the time is not."""
    rng = np.random.default_rng(5)
    for truth, queries in ((target_time, (1, 5)), (draft_time, (1,))):
        places = [(b, q, ctx) for b in (1, 4) for q in queries for ctx in (100, 104, 108)]
        surface = fit_surface(measured(truth, places, rng, noise=0.05)).best
        here = np.array([(1, queries[0], 104), (4, queries[-1], 104)], dtype=float)
        drawn = surface.draws(rng, 2000, here)
        fitted = [surface.seconds(*place) for place in here]
        assert np.median(drawn, axis=0) == pytest.approx(fitted, rel=0.02)
        assert (drawn > 0).all()
        assert (drawn.std(axis=0) < 0.2 * np.array(fitted)).all()
