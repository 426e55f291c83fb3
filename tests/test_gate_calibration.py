"""The gate's error rates, simulated with the scatter of a committed run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spectune.gating.calibration import _cell, _seconds, read_runs, report, simulate
from spectune.gating.noise import Noise, measured_noise
from spectune.gating.timed import ALPHA

METHODS = Path(__file__).parent.parent / "reports" / "examples" / "smollm2-scatter"
DOCUMENTED = {"repeats": 20, "prompts": 8}  # the sample size that docs/gate.md asks for


@pytest.fixture(scope="module")
def example():
    runs = read_runs([METHODS])
    return measured_noise(runs), runs[0].cells[0]


def test_noise_that_was_put_in_is_found():
    """Half of what a pass scatters is shared by the plain and the speculative pass of a repeat, so it cancels."""
    generator = np.random.default_rng(0)
    shared, own = generator.normal(0, 0.03, (1000, 1)), generator.normal(0, 0.03, (1000, 2))
    noise = Noise(shared + own, generator.normal(0, 0.02, 1000))
    example = read_runs([METHODS])[0]
    made = (_cell(example.cells[0], _seconds(noise, generator, 100, 10, 0.0)),)
    found = measured_noise([example.model_copy(update={"cells": made})])
    assert found.pass_deviation == pytest.approx(0.03 * 2**0.5, rel=0.15)
    assert found.speedup_deviation == pytest.approx(0.03 * 2**0.5, rel=0.15)
    assert found.request_deviation == pytest.approx(0.02, rel=0.1)


def test_the_same_cell_in_two_runs_is_repeated_and_their_difference_is_noise():
    generator = np.random.default_rng(0)
    quiet = Noise(np.zeros((1, 2)), generator.normal(0, 0.001, 1000))
    example = read_runs([METHODS])[0]
    runs = [
        example.model_copy(update={"cells": (_cell(example.cells[0], factor * _seconds(quiet, generator, 4, 8, 0.0)),)})
        for factor in (1.0, 1.1)
    ]
    assert measured_noise(runs[:1]).pass_deviation < 0.002
    assert measured_noise(runs).pass_deviation == pytest.approx(np.log(1.1) / 2, rel=0.1)


def test_the_committed_run_scatters_by_a_few_percent(example):
    """Its cells were not repeated; plain decoding was."""
    noise, _ = example
    assert 0.02 < noise.pass_deviation < 0.08
    assert 0.01 < noise.request_deviation < 0.06
    assert np.allclose(noise.repeats.mean(axis=0), 0)


def test_without_a_change_at_most_one_percent_of_1000_gates_alarm(example):
    noise, like = example
    rates = simulate(noise, like, cells=1, loss=0.0, trials=1000, seed=1, **DOCUMENTED)
    assert rates.regression <= 0.01
    assert rates.significant <= 2 * ALPHA


def test_a_loss_of_ten_percent_is_caught_in_95_percent_of_1000_gates(example):
    noise, like = example
    assert simulate(noise, like, cells=1, loss=0.10, trials=1000, seed=2, **DOCUMENTED).regression >= 0.95


def test_both_hold_for_a_gate_of_four_cells(example):
    noise, like = example
    assert simulate(noise, like, cells=4, loss=0.0, trials=200, seed=3, **DOCUMENTED).regression <= 0.01
    assert simulate(noise, like, cells=4, loss=0.10, trials=100, seed=4, **DOCUMENTED).regression >= 0.95


def test_the_report_is_a_table_of_all_sizes(example):
    lines = report(*example, trials=2).splitlines()
    assert lines[0].startswith("scatter: 4.4 % of a pass")
    assert sum(line.startswith("| ") for line in lines) == 1 + 2 * 4
