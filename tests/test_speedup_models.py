"""Acceptance curves and the two speedup models."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import cell

from spectune.speedup.curve import AcceptanceCurve, CurvePoint, fit_curve
from spectune.speedup.models import card_speedup, fit
from spectune.speedup.profile import profile
from spectune.sweeping.cell import RoundCount

# Acceptance lengths at K = 1…8, bonus included, of public models on coding prompts; noise about 0.1 to 0.2.
# The third curve falls at K = 8, which no acceptance curve can.
MEASURED = (
    (1.79, 2.27, 2.49, 2.54, 2.55, 2.55, 2.54, 2.58),
    (1.92, 2.61, 2.97, 3.00, 3.10, 3.16, 3.00, 3.11),
    (1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47),
    (1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06),
    (1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71, 3.77),
    (1.80, 2.33, 2.75, 3.06, 3.25, 3.43, 3.46, 3.51),
    (1.84, 2.45, 2.87, 3.22, 3.44, 3.54, 3.78, 3.88),
    (1.78, 2.38, 2.83, 3.11, 3.35, 3.45, 3.53, 3.74),
    (1.84, 2.52, 2.93, 3.41, 3.59, 3.57, 3.85, 4.06),
    (1.79, 2.39, 2.78, 3.02, 3.21, 3.30, 3.52, 3.51),
    (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21),
)


def curve_of(lengths):
    return fit_curve([CurvePoint.at(k, length) for k, length in enumerate(lengths, 1)])


def test_two_parameters_describe_measured_curves_within_a_tenth_of_a_token():
    errors = [curve_of(lengths).rmse for lengths in MEASURED]
    assert max(errors) <= 0.10
    assert median(errors) < 0.05


def test_a_constant_acceptance_rate_misses_measured_curves_by_half_a_token():
    k = np.arange(1, 9)
    for lengths in MEASURED:
        excess = np.array(lengths) - 1
        beta = (excess @ k) / (k @ k)
        assert np.sqrt(np.mean((beta * k - excess) ** 2)) > 4 * curve_of(lengths).rmse


@settings(max_examples=25)
@given(st.floats(0.05, 0.98), st.floats(0.5, 1.0))
def test_a_curve_without_noise_is_found_again(a, g):
    truth = AcceptanceCurve(a, g, 0.0)
    found = fit_curve([CurvePoint.at(k, truth.length_at(k)) for k in (1, 2, 4, 8)])
    for k in range(1, 9):
        assert found.length_at(k) == pytest.approx(truth.length_at(k), abs=0.005)


def test_g_of_one_is_the_geometric_case():
    assert AcceptanceCurve(0.8, 1.0, 0.0).length_at(4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_the_fit_uses_the_tokens_really_drafted():
    always = CurvePoint.at(2, 1 + 0.5 + 0.25)
    half = CurvePoint((0.5, 0.5, 0.5, 0.5), 1 + 0.5 * (0.5 + 0.25 + 0.125 + 0.0625))
    found = fit_curve([always, half, CurvePoint.at(1, 1.5)])
    assert (found.a, found.g) == (pytest.approx(0.5, abs=0.01), pytest.approx(1.0, abs=0.01))


@pytest.mark.parametrize(
    "points", [[], [CurvePoint.at(4, 2.0)], [CurvePoint.at(4, 2.0)] * 3, [CurvePoint((0.0, 0.0), 1.0)] * 2]
)
def test_one_number_of_drafted_tokens_cannot_identify_a_curve(points):
    assert fit_curve(points) is None


def test_one_k_is_not_identifiable_and_says_so():
    found = fit([profile(cell(k=4))])
    assert found.curves[0].curve is None
    assert "not identifiable" in found.curves[0].reason
    assert found.predictions[0].full is None
    assert "not identifiable" in found.predictions[0].full_reason
    assert found.predictions[0].card is not None
    assert found.better is None


def test_zero_drafts_and_zero_times_give_nulls_with_reasons():
    nothing = tuple(cell(k=k, rounds=(RoundCount(drafted=0, accepted=0, count=9),)) for k in (1, 2))
    found = fit([profile(c) for c in nothing])
    assert found.curves[0].reason == "not identifiable: nothing was drafted"
    assert found.predictions[0].card_reason == "nothing was drafted"
    untimed = fit([profile(cell(k=k, timed=False)) for k in (1, 2, 4)])
    assert untimed.predictions[0].card is None
    assert "unknown or zero" in untimed.predictions[0].card_reason
    assert "unknown or zero" in untimed.predictions[0].full_reason


def test_the_card_is_exact_where_its_assumptions_hold():
    """A draft that always matches four tokens and then misses; T_d/T_t = 0.1."""
    cells = []
    for k, expected in ((2, 2.50), (4, 3.57), (8, 2.78)):
        kept = min(k, 4)
        made = profile(
            cell(
                k=k,
                rounds=(RoundCount(drafted=k, accepted=kept, count=10),),
                cost_ratio=0.1,
                speedup=(1 + kept) / (1 + 0.1 * k),
                noise=0,
            )
        )
        assert fit([made]).predictions[0].card == pytest.approx(expected, abs=0.005)
        assert fit([made]).predictions[0].extra_steps == pytest.approx(0, abs=1e-9)
        cells.append(made)
    rates = [p.acceptance.acceptance_rate for p in cells]
    assert rates == [1.0, 1.0, 0.5]
    assert [p.acceptance.tokens_per_target_forward for p in cells] == [3.0, 5.0, 5.0]


def overheaded(overhead):
    """Cells whose true speedup is (1 + 0.9 K) / (1 + 0.1 K + overhead)."""
    cells = []
    for k in range(1, 9):
        rounds = tuple(
            RoundCount(drafted=k, accepted=a, count=n) for a, n in ((k, 9), (0, 1))
        )  # nine of ten drafts are kept whole: β = 0.9 at every K
        cells.append(
            cell(k=k, rounds=rounds, cost_ratio=0.1, speedup=(1 + 0.9 * k) / (1 + 0.1 * k + overhead), noise=0)
        )
    return [profile(c) for c in cells]


def test_overhead_makes_the_card_poor_and_is_reported():
    found = fit(overheaded(1.0))
    assert found.card.poor
    assert found.better == "full"
    for prediction in found.predictions:
        assert prediction.card > prediction.measured
        assert prediction.extra_steps == pytest.approx(1.0, abs=0.01)
        assert prediction.overhead_steps == pytest.approx(1.0, abs=0.01)


def test_without_overhead_the_card_is_good():
    found = fit(overheaded(0.0))
    assert found.card.poor is False
    assert found.card.rmse == pytest.approx(0.0, abs=0.01)


def test_an_ngram_draft_costs_one_step_whatever_its_k():
    made = profile(cell(k=8, steps=0, cost_ratio=0.1, drafter="ngram"))
    assert fit([made]).predictions[0].card == pytest.approx(5 / 1.1)
    assert card_speedup(0.5, 8, 0.1, steps=1) == pytest.approx(5 / 1.1)


def test_held_out_predictions_come_from_the_other_cells():
    found = fit(overheaded(0.5))
    assert found.held_out.cells == 8
    assert all(p.held_out is not None for p in found.predictions)
    assert fit(overheaded(0.5)[:2]).held_out.cells == 0


def test_wrong_results_do_not_shape_the_curve():
    good = [profile(cell(k=k)) for k in (2, 4)]
    wrong = profile(cell(k=8, identical=False, rounds=(RoundCount(drafted=8, accepted=8, count=9),)))
    assert fit([*good, wrong]).curves[0].curve == fit(good).curves[0].curve
    assert fit([*good, wrong]).predictions[2].measured is None
