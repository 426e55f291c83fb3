"""`--precision`: prompts are measured until the acceptance length is known well enough."""

from __future__ import annotations

from fake_engine import FakeEngine
from test_sweep_measure import measure, spec

from spectune.speedup.positions import acceptance_length
from spectune.speedup.profile import profile
from spectune.suites.prompt import Prompt, Suite
from spectune.sweeping.cell import CellSpec
from spectune.sweeping.warning import cell_warnings

SUITE = Suite("code", "test", tuple(Prompt(f"p{n}", "all", text="x") for n in range(60)))


def prompts(cell) -> list[list[str]]:
    """Of each speculative pass."""
    return [[r.prompt_id for r in p.requests] for p in cell.passes if p.mode == "speculative"]


def test_more_prompts_are_measured_until_the_interval_is_that_tight():
    whole = measure(spec(), FakeEngine(), SUITE)
    counted = {}
    for precision in (0.2, 0.05, 0.03):
        cell = measure(spec(precision=precision), FakeEngine(), SUITE)
        known = acceptance_length(cell)
        counted[precision] = sum(map(len, prompts(cell)))
        assert known.half_width <= precision
        assert not any("precision" in warning for warning in cell.warnings)
        assert known.low <= acceptance_length(whole).value <= known.high
    assert counted[0.2] == 8
    assert 8 < counted[0.05] < counted[0.03] < 60, counted


def test_no_prompt_is_measured_twice_and_all_cells_begin_with_the_same_ones():
    cells = [measure(spec(precision=0.05, k=k), FakeEngine(), SUITE) for k in (2, 4, 8)]
    orders = [[name for some in prompts(cell) for name in some] for cell in cells]
    for order in orders:
        assert len(set(order)) == len(order)
        shortest = min(len(order), *map(len, orders))
        assert order[:shortest] == orders[0][:shortest]
    assert orders[0][:8] != [f"p{n}" for n in range(8)]  # a suite may be sorted by difficulty


def test_too_few_prompts_are_said_and_all_are_used():
    cell = measure(spec(precision=0.001), FakeEngine(), SUITE)
    assert sum(map(len, prompts(cell))) == 60
    (warning,) = [w for w in cell.warnings if w.startswith("precision-not-reached")]
    assert "after all 60 prompts, asked for was ±0.1%; measure 240 next" in warning


def test_every_portion_fills_the_batch_and_is_paired_with_plain_decoding():
    cell = measure(spec(precision=0.03, batch=16, repeats=2), FakeEngine(), SUITE)
    assert all(len(p.requests) >= 16 for p in cell.passes)
    assert len(cell.passes) > 4
    for repeat in {p.repeat for p in cell.passes}:
        plain, drafted = ({r.id for r in p.requests} for p in cell.passes if p.repeat == repeat)
        assert plain == drafted
    assert [p.order for p in cell.passes] == list(range(len(cell.passes)))
    found = profile(cell)
    assert (found.rates.prompts, found.rates.repeats) == (len({name for some in prompts(cell) for name in some}), 2)
    assert found.speedup.low <= found.speedup.value <= found.speedup.high


def test_the_precision_is_part_of_the_key_and_its_absence_is_not():
    plain = spec()
    assert "precision" not in plain.model_dump()
    assert plain.key != spec(precision=0.02).key != spec(precision=0.03).key
    assert CellSpec.model_validate_json(spec(precision=0.02).model_dump_json()) == spec(precision=0.02)


def test_portions_of_other_prompts_are_not_taken_for_unstable_repeats(monkeypatch):
    monkeypatch.setattr("spectune.sweeping.warning.UNSTABLE", 0.01)
    cell = measure(spec(precision=0.03), FakeEngine(), SUITE)
    assert not any(warning.startswith("unstable") for warning in cell.warnings)
    same_prompts = cell_warnings(spec(repeats=len(cell.passes)), cell.passes, None)
    assert any(warning.startswith("unstable: speculative") for warning in same_prompts)
