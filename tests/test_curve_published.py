"""Published acceptance curves and throughput tables, and the page that is written from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spectune.errors import UsageError
from spectune.reporting.reference import page
from spectune.speedup.constant import fit_constant_rate, fit_geometric
from spectune.speedup.curve import AcceptanceCurve, CurvePoint, fit_curve
from spectune.speedup.published import best_possible, choose_k, fit_line, read_table, study_curves, throughput_points
from spectune.speedup.throughput import Throughput, fit_throughput

REFERENCE = Path(__file__).parent / "data" / "reference"
WRITTEN = Path(__file__).parent.parent / "reports" / "reference-figures.md"
EXPERTS = 8 / 128


@pytest.fixture(scope="module")
def studies():
    return study_curves(read_table(REFERENCE / "golden_acceptance_length.csv"))


@pytest.fixture(scope="module")
def throughput():
    return throughput_points(read_table(REFERENCE / "throughput_by_k_and_batch.csv"))


def test_two_parameters_are_within_a_tenth_of_a_token_on_every_published_curve(studies):
    assert len(studies) == 11
    assert all(s.chosen.rmse <= 0.10 for s in studies)


def test_a_constant_acceptance_rate_is_rejected_on_every_published_curve(studies):
    assert all(s.constant.rejected for s in studies)
    assert min(s.constant.rmse for s in studies) > 0.4


def test_no_fit_is_better_than_the_best_curve_that_falls_off(studies):
    assert all(s.bound <= min(s.usual.rmse, s.chosen.rmse, s.geometric.rmse) + 1e-9 for s in studies)


def test_the_usual_decay_stays_where_the_late_one_is_not_clearly_better(studies):
    assert [s.name for s in studies if s.chosen.p == 2] == ["DeepSeek-V4-Pro-0813 DSpark, think"]
    assert all(s.chosen == s.usual for s in studies if s.chosen.p == 1)


def test_a_late_decay_is_found_again():
    truth = AcceptanceCurve(0.9, 0.93, 0.0, p=2)
    found = fit_curve([CurvePoint.at(k, truth.length_at(k)) for k in range(1, 9)])
    assert (found.p, found.a, found.g) == (2, pytest.approx(0.9, abs=1e-3), pytest.approx(0.93, abs=1e-3))


def test_the_best_possible_error_is_that_of_a_length_which_falls():
    assert best_possible([1.8, 2.4, 2.8]) == pytest.approx(0.0, abs=1e-9)
    # The nearest lengths that do not fall meet in the middle.
    assert best_possible([1.8, 2.0, 1.8]) > 0.05


def test_a_true_constant_rate_is_not_rejected():
    points = [CurvePoint.at(k, 1 + 0.5 * k + (-0.01, 0.01)[k % 2]) for k in (1, 2, 3, 4)]
    points += [CurvePoint.at(5, 1 + 0.5 * 5)]
    found = fit_constant_rate(points, fit_curve(points))
    assert (found.rate, found.rejected) == (pytest.approx(0.5, abs=0.01), False)


def test_too_few_lengths_do_not_judge_a_constant_rate():
    points = [CurvePoint.at(k, 1 + 0.5 * k) for k in (1, 2)]
    assert fit_constant_rate(points, fit_curve(points)).rejected is None
    assert fit_constant_rate([], None) is None


def test_one_k_is_enough_for_the_geometric_model():
    assert fit_geometric([CurvePoint.at(4, (1 - 0.7**5) / (1 - 0.7))]).alpha == pytest.approx(0.7, abs=1e-5)


@pytest.mark.parametrize("every", [1, 2])
def test_the_chosen_step_is_within_one_percent_of_each_batchs_best(throughput, every):
    batches = sorted({p.batch for p in throughput})
    chosen = choose_k(throughput, batches[::every], EXPERTS)
    assert [c.batch for c in chosen] == batches
    assert all(c.regret <= 0.01 for c in chosen)
    assert all(c.error < 0.08 for c in chosen)


def test_a_dense_model_misses_the_published_mixture_of_experts_by_far(throughput):
    dense = fit_throughput(throughput)
    experts = fit_throughput(throughput, expert_share=EXPERTS)
    assert max(map(abs, dense.residuals)) > 0.15 > 2 * max(map(abs, experts.residuals))


def test_a_table_with_two_steps_cannot_determine_the_model():
    assert fit_throughput([Throughput(k, b, 100.0 + k) for k in (1, 2) for b in (1, 2, 4, 8, 16)]) is None


def test_a_line_is_found_again():
    line = fit_line([1, 2, 8], [0.5 + 0.1 * x for x in (1, 2, 8)])
    assert (line.fixed, line.slope, line.worst) == tuple(map(pytest.approx, (0.5, 0.1, 0.0)))
    with pytest.raises(ValueError, match="two different places"):
        fit_line([1, 1], [2, 3])


def test_the_written_page_is_what_the_tables_give():
    """Up to what another version of the optimiser may change in the last digit."""
    number = re.compile(r"\d+(?:\.\d+)?")
    written, made = WRITTEN.read_text("utf-8"), page(REFERENCE)
    assert number.sub("#", written) == number.sub("#", made)
    assert list(map(float, number.findall(written))) == pytest.approx(
        list(map(float, number.findall(made))), rel=0.02, abs=0.002
    )


def test_the_page_shows_the_articles_tables_and_what_contradicts_the_formulas():
    text = page(REFERENCE)
    for row in ("| Llama-3.1-8B-Instruct | 0.82 | 0.114 | 2.0 |", "| 64 | 224.6 |", "| 4096 + 2048 | 5120 | 116.3 |"):
        assert row in text
    assert "No K ≥ 1 gives as little as was published for Llama-3.1-1B-Instruct, TinyLlama-1.1B" in text
    assert "The best line through the plain steps, 57 ms + 2.8 ms·B, is up to 10% off" in text


def test_a_table_without_a_source_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="does not name its source"):
        read_table(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "none.csv")
