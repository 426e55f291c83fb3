"""The gate's error rates, simulated with the scatter of a committed run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spectune.gating.calibration import _cell, _seconds, read_runs, report, simulate
from spectune.gating.noise import Noise, measured_noise
from spectune.gating.timed import ALPHA

METHODS = Path(__file__).parent.parent / "reports" / "examples" / "smollm2-methods"
DOCUMENTED = {"repeats": 16, "prompts": 8}  # the sample size that docs/gate.md asks for


@pytest.fixture(scope="module")
def example():
    runs = read_runs([METHODS])
    return measured_noise(runs), runs[0].cells[0]


def test_noise_that_was_put_in_is_found():
    generator = np.random.default_rng(0)
    noise = Noise(generator.normal(0, 0.04, 1000), generator.normal(0, 0.02, 1000))
    like = read_runs([METHODS])[0].cells[0]
    made = (_cell(like, _seconds(noise, generator, 40, 10, 0.0)),)
    run = read_runs([METHODS])[0].model_copy(update={"cells": made})
    found = measured_noise([run])
    assert found.pass_deviation == pytest.approx(0.04, rel=0.25)
    assert found.request_deviation == pytest.approx(0.02, rel=0.15)


def test_the_committed_run_scatters_by_a_few_percent(example):
    noise, _ = example
    assert 0.02 < noise.pass_deviation < 0.08
    assert 0.01 < noise.request_deviation < 0.06
    assert abs(noise.passes.mean()) < 1e-9


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
    assert lines[0].startswith("measured scatter: ")
    assert sum(line.startswith("| ") for line in lines) == 1 + 2 * 4
