"""The table that holds the fast plan against a full grid."""

from __future__ import annotations

import numpy as np
import pytest
import test_pooled
from synthetic_run import cell, write_run
from test_fast_plan import probe

from spectune.errors import UsageError
from spectune.reporting.plan_check import check, page, perfect_loss
from spectune.speedup.run import load_run
from spectune.sweeping.fast_plan import Prediction
from spectune.sweeping.fast_record import FastRecord
from spectune.sweeping.figures import figures

END = "2026-01-01T00:00:10+00:00"  # ten seconds after the beginning
SPEEDUPS = {("code", 1): {2: 1.5, 4: 2.0, 8: 1.9}, ("code", 4): {2: 0.9, 4: 0.8, 8: 0.7}}


def grid(factor: float = 1.0):
    made = [
        cell(suite=suite, batch=batch, k=k, speedup=factor * value)
        for (suite, batch), own in SPEEDUPS.items()
        for k, value in own.items()
    ]
    return [c.model_copy(update={"finished_at": END}) for c in made]


def runs(tmp_path, kept, factor: float = 1.0):
    full = grid()
    fast = [c for c in grid(factor) if (c.spec.batch, c.spec.k) in kept]
    return load_run(write_run(tmp_path / "fast", fast)), load_run(write_run(tmp_path / "full", full))


def test_a_choice_is_worth_what_the_grid_measured_there_and_off_is_a_choice(tmp_path):
    fast, full = runs(tmp_path, {(1, 8), (4, 8)})
    predictions = tuple(Prediction(key=c.key, acceptance_length=2.0, speedup=1.1) for c in full.cells)
    probes = (probe(None, 1, 0, 0.01).model_copy(update={"cost_seconds": 5.0}),)
    found = check(fast, full, FastRecord(grid_cells=6, probes=probes, predictions=predictions))
    one, four = found.measured.choices
    assert (one.chosen.k, one.best.k) == (8, 4)
    assert one.value == pytest.approx(1.9, rel=0.01)
    assert one.loss == pytest.approx(0.05, abs=0.01)
    assert (four.chosen, four.best, four.loss) == (None, None, 0.0)
    assert (found.fast_seconds, found.full_seconds) == (25.0, 60.0)
    expected = sorted(abs(1.1 / value - 1) for value in (1.5, 2.0, 0.9, 0.8))
    assert list(found.measured.errors) == pytest.approx(expected, rel=0.02)
    lengths = sorted(abs(2.0 / length - 1) for length in (2.0, 3.0, 2.0, 3.0))  # K 2 and 4 of both suites
    assert sorted(found.length_errors) == pytest.approx(lengths)
    text = page(found, fast, full)
    assert "acceptance lengths alone are off by 16.7% and 33.3%" in text
    assert "2 of 6 cells" in text
    assert "(41.7%; 41.7% had each" in text
    assert "within 3% of the grid's best in 1 of 2 places, the worst 5." in text
    assert "| code | 4 | OFF | 1.00 | OFF | 1.00 | 0.0% |" in text


def test_a_machine_that_was_slower_in_the_fast_run_is_left_out_of_its_share_of_the_time(tmp_path):
    full = grid()
    slow = [c.model_copy(update={"finished_at": "2026-01-01T00:00:20+00:00"}) for c in full[:2]]
    probes = (probe(None, 1, 0, 0.01).model_copy(update={"cost_seconds": 8.0}),)
    fast, whole = load_run(write_run(tmp_path / "fast", slow)), load_run(write_run(tmp_path / "full", full))
    found = check(fast, whole, FastRecord(grid_cells=6, probes=probes))
    assert found.share_at_one_pace == pytest.approx((48 / 60) * (20 / 40))
    assert "(80.0%; 40.0% had each of its cells taken as long as in the grid)" in page(found, fast, whole)


def test_its_own_noise_may_mislead_the_fast_plan_and_costs_what_the_grid_says(tmp_path):
    fast, full = runs(tmp_path, {(4, 2)}, factor=1.3)  # 0.9 was measured as 1.17
    found = check(fast, full, FastRecord(grid_cells=6))
    four = found.measured.choices[1]
    assert four.value == pytest.approx(0.9, rel=0.01)
    assert four.loss == pytest.approx(0.1, abs=0.01)


def test_a_grid_of_other_cells_is_refused(tmp_path):
    fast, _ = runs(tmp_path, {(1, 8)})
    other = load_run(write_run(tmp_path / "other", [cell(suite="math")]))
    with pytest.raises(UsageError, match="lacks 1 cells"):
        check(fast, other, FastRecord(grid_cells=1))


def test_noise_alone_makes_a_perfect_choice_lose_in_a_noisy_grid(tmp_path):
    assert perfect_loss([1.5, 1.2], 0.0) == 0
    assert perfect_loss([0.5, 0.4], 0.01) == 0
    # OFF is known exactly: only what exceeds 1 misleads. Were it as noisy as the others, 0.0100 would be lost.
    assert perfect_loss([0.9] * 8, 0.05) == pytest.approx(0.0024, rel=0.2)
    alike = perfect_loss([1.5] * 8, 0.05)
    # The mean of 1 - x1 / max(x1..x8) for independent x of 5% spread: about 1.42 standard deviations.
    assert alike == pytest.approx(1.42 * 0.05, rel=0.1)
    assert perfect_loss([1.5] * 8, 0.1) > 1.5 * alike


def test_the_choice_is_judged_on_pooled_costs_too_and_both_are_told(tmp_path):
    noisy = test_pooled.grid(0.08)
    best = max((c for c in noisy if c.spec.batch == 1 and c.spec.suite == "code"), key=test_pooled.true_speedup)
    full = load_run(write_run(tmp_path / "full", [c.model_copy(update={"finished_at": END}) for c in noisy]))
    fast = load_run(write_run(tmp_path / "fast", [best.model_copy(update={"finished_at": END})]))
    found = check(fast, full, FastRecord(grid_cells=len(noisy)))
    one = next(c for c in found.pooled.choices if (c.suite, c.batch) == ("code", 1))
    assert one.chosen == best.spec
    assert one.value == found.steady.speedups[best.key]
    assert one.loss < 0.03
    assert found.perfect_loss > 0.03
    text = page(found, fast, full)
    assert text.index("## As measured") < text.index("## With the costs pooled")
    assert f"would lose {found.perfect_loss:.1%} on average" in text
    assert f"off by {0.6745 * found.steady.noise:.1%} in the median and {1.6449 * found.steady.noise:.1%} at" in text
    assert np.isclose(found.steady.noise, 0.113, rtol=0.25)


def test_the_grid_s_own_largest_measurements_are_judged_on_pooled_costs_beside_it(tmp_path):
    noisy = [c.model_copy(update={"finished_at": END}) for c in test_pooled.grid(0.08)]
    full = load_run(write_run(tmp_path / "full", noisy))
    fast = load_run(write_run(tmp_path / "fast", noisy[:1]))
    found = check(fast, full, FastRecord(grid_cells=len(noisy)))
    place = [c for c in noisy if (c.spec.suite, c.spec.batch) == ("code", 1)]
    largest = max(place, key=lambda c: figures(c).speedup)
    one = next(c for c in found.full_pooled.choices if (c.suite, c.batch) == ("code", 1))
    assert one.chosen == largest.spec
    assert one.value == found.steady.speedups[largest.key]
    assert max(found.full_pooled.losses) > 0.03
    within = sum(loss <= 0.03 for loss in found.full_pooled.losses)
    told = f"What the whole grid measured as fastest lies, judged alike, within 3% of the grid's best in {within} of"
    assert f"{told} {len(found.full_pooled.losses)} places, the worst {max(found.full_pooled.losses):.1%}" in page(
        found, fast, full
    )
