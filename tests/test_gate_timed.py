"""Timed checks: a loss must be both large and significant, and what cannot be seen is never a pass."""

from __future__ import annotations

import pytest
from gate_helpers import check, judged, side, slower, spread, timed_cell, with_requests
from synthetic_run import cell

from spectune.gating.gate import gate
from spectune.gating.metric import METRICS
from spectune.gating.policy import make_policy
from spectune.gating.timed import effect
from spectune.speedup.profile import profile

TIMED = make_policy((), (), None, "timed")


@pytest.mark.parametrize(
    ("now", "width", "verdict"),
    [
        (0.97, 0.06, "PASS"),  # -3 %, spread 6 %
        (0.80, 0.02, "REGRESSION"),  # -20 %, spread 2 %
        (0.80, 0.30, "CANNOT JUDGE"),  # -20 %, spread 30 %
        (1.00, 0.30, "CANNOT JUDGE"),  # nothing, but nothing could have been seen
        (1.20, 0.02, "PASS"),
    ],
)
def test_five_repeats_judged_by_size_and_scatter(tmp_path, now, width, verdict):
    outcome = judged(tmp_path, [timed_cell(2.0, width)], [timed_cell(2.0 * now, width)], TIMED)
    found = check(outcome, "speedup")
    assert found.verdict == verdict
    assert found.change == pytest.approx(now - 1, abs=0.002)
    assert found.low < found.change < found.high
    assert outcome.exit_code == {"PASS": 0, "REGRESSION": 1, "CANNOT JUDGE": 3}[verdict]
    if verdict != "REGRESSION":
        assert "would have been seen" in found.message


MIRRORED = [
    ("speedup", lambda c, f: slower(c, "speculative", f), 1.8 / 1.1),
    ("tokens_per_second", lambda c, f: slower(c, "speculative", f), 100 / 60),
    ("plain_tokens_per_second", lambda c, f: slower(c, "plain", f), 100 / 60),
    ("tpot_ms", lambda c, f: slower(c, "speculative", f), 100 / 60),
    (
        "ttft_ms",
        lambda c, f: with_requests(c, lambda r: r.model_copy(update={"ttft_seconds": r.ttft_seconds * f})),
        80 / 50,
    ),
]


@pytest.mark.parametrize(("name", "change", "factor"), MIRRORED, ids=[m[0] for m in MIRRORED])
def test_worse_fails_and_better_passes_for_each_metric(tmp_path, name, change, factor):
    base = timed_cell(1.8)
    assert check(judged(tmp_path / "w", [base], [change(base, factor)], TIMED), name).verdict == "REGRESSION"
    assert check(judged(tmp_path / "b", [base], [change(base, 1 / factor)], TIMED), name).verdict == "PASS"


def test_absolute_times_warn_unless_asked_to_fail(tmp_path):
    base = timed_cell(1.8)
    late = with_requests(base, lambda r: r.model_copy(update={"ttft_seconds": 0.08}))
    assert judged(tmp_path / "a", [base], [late], TIMED).exit_code == 0
    file = tmp_path / "gate.toml"
    file.write_text('[[gate.threshold]]\nmetric = "ttft_ms"\nlevel = "error"\n')
    assert judged(tmp_path / "b", [base], [late], make_policy((), (), file, "timed")).exit_code == 1


def test_the_threshold_decides_what_is_large_by_cell(tmp_path):
    base, now = timed_cell(2.0), timed_cell(1.8)
    lax = make_policy(["speedup[code]=12%"], (), None, "timed")
    assert judged(tmp_path / "a", [base], [now], lax).verdict == "PASS"
    assert judged(tmp_path / "b", [base], [now], TIMED).verdict == "REGRESSION"


@pytest.mark.parametrize("repeats", [(1, 5), (5, 1), (1, 1)])
def test_one_repeat_has_no_scatter_and_cannot_be_judged(tmp_path, repeats):
    before, after = (cell(speedup=2.0, drift=spread(0.02), repeats=n) for n in repeats)
    outcome = judged(tmp_path, [before], [after], TIMED)
    assert outcome.exit_code == 3
    assert "--repeats" in check(outcome, "speedup").message


def test_times_of_another_machine_are_not_compared(tmp_path):
    there = {"environment": {"cpu": "another processor", "torch": "2.9", "gpus": []}}
    outcome = judged(tmp_path, [timed_cell(2.0)], [timed_cell(2.0)], TIMED, **there)
    assert outcome.exit_code == 3
    assert "cpu a processor -> another processor" in check(outcome, "speedup").message


def test_a_wrong_result_has_no_speed(tmp_path):
    outcome = judged(tmp_path, [timed_cell(2.0)], [timed_cell(2.0, identical=False)])
    assert outcome.exit_code == 1
    assert check(outcome, "lossless").verdict == "REGRESSION"
    assert check(outcome, "speedup").verdict == "CANNOT JUDGE"


def test_a_baseline_without_times_is_no_pass_for_times(tmp_path):
    base = side(tmp_path / "before", timed_cell(2.0))
    exact_only = base.model_copy(update={"cells": tuple(c.model_copy(update={"times": None}) for c in base.cells)})
    run = side(tmp_path / "after", timed_cell(2.0))
    assert gate(run, exact_only, make_policy((), (), None, None)).exit_code == 3
    assert gate(run, exact_only, make_policy((), (), None, "exact")).exit_code == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_what_is_not_a_positive_number_has_no_effect(bad):
    good = [1.0, 1.1, 0.9]
    m = METRICS["speedup"]
    assert effect(m, good, good) is not None
    assert effect(m, good, [1.0, bad, 1.0]) is None
    assert effect(m, [1.0, bad, 1.0], good) is None
    assert effect(m, [bad, bad], [bad, bad]) is None


def test_untimed_cells_cannot_be_judged(tmp_path):
    def stopped(c):
        zero = {"full_seconds": 0.0, "decode_seconds": 0.0, "full_tokens": 0}
        for mode in ("plain", "speculative"):
            c = with_requests(c, lambda r: r.model_copy(update=zero), mode)
        return c

    outcome = judged(tmp_path, [timed_cell(2.0)], [stopped(timed_cell(2.0))], TIMED)
    assert check(outcome, "speedup").verdict == "CANNOT JUDGE"
    assert outcome.exit_code == 3


def required(tmp_path, text, *cells, **changes):
    return gate(side(tmp_path, *cells, **changes), None, make_policy((), [text], None, None))


def test_a_required_speed_is_judged_with_the_interval_that_recommend_shows(tmp_path):
    measured = timed_cell(2.0, 0.06)
    expected = profile(measured).speedup
    found = check(required(tmp_path / "a", "speedup>=1.3", measured), "speedup>=1.3")
    assert found.verdict == "PASS"
    assert (found.now, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high), rel=1e-4)
    inside = (expected.low + expected.high) / 2
    assert required(tmp_path / "b", f"speedup>={inside}", measured).exit_code == 3
    assert required(tmp_path / "c", f"speedup>={expected.high + 0.01}", measured).exit_code == 1
    assert required(tmp_path / "d", f"speedup>{expected.low - 0.01}", measured).exit_code == 0


def test_a_required_latency_uses_its_statistic(tmp_path):
    measured = timed_cell(2.0)
    low = check(required(tmp_path / "a", "tpot_ms.min<1000", measured), "tpot_ms.min<1000")
    high = check(required(tmp_path / "b", "tpot_ms.p95<1000", measured), "tpot_ms.p95<1000")
    assert 0 < low.now < high.now < 1000
    assert required(tmp_path / "c", "tpot_ms.p95<0.001", measured).exit_code == 1
    assert required(tmp_path / "d", "ttft_ms<100", measured).exit_code == 0


def test_one_prompt_has_no_interval_and_no_verdict(tmp_path):
    assert required(tmp_path, "speedup>=1.1", timed_cell(2.0, prompts=1)).exit_code == 3


def test_a_required_count_is_what_it_is(tmp_path):
    measured = timed_cell(2.0)  # two of four tokens kept in every round
    for n, (text, code) in enumerate(
        [
            ("acceptance_length>=3", 0),
            ("acceptance_length>3", 1),
            ("acceptance_rate[code]>=0.5", 0),
            ("acceptance_length[k=4,drafter=draft]>=3.1", 1),
        ]
    ):
        assert required(tmp_path / str(n), text, measured).exit_code == code


def test_requirements_hold_in_every_selected_cell_or_not_at_all(tmp_path):
    fast, slow = timed_cell(2.0), timed_cell(1.1, suite="chat", suite_digest="s1")
    assert required(tmp_path / "a", "speedup>=1.5", fast, slow).exit_code == 1
    assert required(tmp_path / "b", "speedup[code]>=1.5", fast, slow).exit_code == 0


def test_requirements_on_failed_unfinished_and_unknown_cells(tmp_path):
    from synthetic_run import failed, spec

    from spectune.errors import UsageError

    done = timed_cell(2.0)
    broken = failed(batch=8, repeats=5)
    assert required(tmp_path / "a", "speedup>=1", done, failures=[broken]).exit_code == 4
    todo = spec(batch=16, repeats=5)
    assert required(tmp_path / "b", "speedup>=1", done, plan=(done.spec, todo)).exit_code == 3
    with pytest.raises(UsageError, match=r"no cell is suite=math.*suite code"):
        required(tmp_path / "c", "speedup[math]>=1", done)


def test_a_null_count_is_no_pass(tmp_path):
    from spectune.sweeping.cell import RoundCount

    idle = cell(rounds=(RoundCount(drafted=0, accepted=0, count=20),), k=0)
    assert required(tmp_path, "acceptance_rate>=0", idle).exit_code == 3
