"""The grammar of requirements and tolerances: what is read, what is refused, and on which side the boundary lies."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectune.errors import UsageError
from spectune.gating.metric import METRICS, STATISTICS, exceeds, worse_by
from spectune.gating.policy import make_policy, parse_tolerance
from spectune.gating.requirement import Requirement, parse_requirement
from spectune.gating.selector import Selector, parse_selector

NAMES = st.sampled_from(
    ["ngram", "tree:eagle3:demo", "staged:ngram>smollm2-4l", "layer-skip:12-15,a3,m7", "a[b]<c", "org/model-1.5B"]
)
SELECTORS = st.builds(
    Selector,
    suite=st.none() | st.sampled_from(["code", "my prompts", "a,b"]),
    drafter=st.none() | NAMES,
    rule=st.none() | st.sampled_from(["greedy", "speculative"]),
    k=st.none() | st.integers(0, 64),
    batch=st.none() | st.integers(1, 512),
)


@st.composite
def requirements(draw):
    m = draw(st.sampled_from([m for m in METRICS.values() if m.required]))
    return Requirement(
        m,
        draw(st.sampled_from(STATISTICS)) if m.by_request else None,
        draw(SELECTORS),
        draw(st.sampled_from([">", ">="] if m.better == "higher" else ["<", "<="])),
        draw(st.floats(0, 1e9).map(lambda x: float(f"{x:.10g}"))),
    )


@given(requirements())
def test_a_requirement_reads_back_as_it_is_written(required):
    assert parse_requirement(str(required)) == required


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_with_a_hint(text):
    error = None
    try:
        parse_requirement(text)
    except UsageError as caught:
        error = caught
    assert error is None or error.hint


@pytest.mark.parametrize(
    ("text", "metric", "statistic", "selector", "op", "number"),
    [
        ("speedup>=1.3", "speedup", None, Selector(), ">=", 1.3),
        ("acceptance_length[code]>=2.0", "acceptance_length", None, Selector(suite="code"), ">=", 2.0),
        ("tpot_ms.p95<30", "tpot_ms", "p95", Selector(), "<", 30),
        ("tpot_ms < 3e1", "tpot_ms", "median", Selector(), "<", 30),
        (
            " speedup [ drafter=layer-skip:1-2,a3 , k=4,batch=2 ] > 1 ",
            "speedup",
            None,
            Selector(drafter="layer-skip:1-2,a3", k=4, batch=2),
            ">",
            1,
        ),
    ],
)
def test_the_forms_of_a_requirement(text, metric, statistic, selector, op, number):
    assert parse_requirement(text) == Requirement(METRICS[metric], statistic, selector, op, number)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed>=1", "no metric 'speed'.*known are .*speedup"),
        ("speedup=1", "cannot read"),
        ("speedup>=", "cannot read"),
        ("speedup>=nan", "not a number"),
        ("speedup>=inf", "not a number"),
        ("speedup>=1%", "not a number"),
        ("speedup>=1_3", "not a number"),
        ("speedup<=1.3", "better when it is higher"),
        ("tpot_ms>30", "better when it is lower"),
        ("speedup.p95>1", "one value per cell"),
        ("tpot_ms.p50x<1", "known are mean"),
        ("outputs<=0.1", "with a baseline only"),
        ("speedup[]>1", "selector"),
        ("speedup[k=x]>1", "whole number"),
        ("speedup[k=1,k=2]>1", "twice"),
    ],
)
def test_a_requirement_that_means_nothing_is_refused_with_what_would(text, message):
    with pytest.raises(UsageError) as caught:
        parse_requirement(text)
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize(("op", "at"), [(">=", True), (">", False), ("<=", True), ("<", False)])
def test_at_the_number_itself_the_operator_decides(op, at):
    name = "speedup" if op[0] == ">" else "tpot_ms"
    required = parse_requirement(f"{name}{op}30")
    assert required.holds(30.0) is at
    assert not required.holds(float("nan"))


def test_a_change_of_exactly_the_tolerance_passes_and_more_does_not():
    m = METRICS["speedup"]
    assert not exceeds(worse_by(m, 100, 95), 0.05)
    assert exceeds(worse_by(m, 100, 94.999), 0.05)
    assert not exceeds(worse_by(METRICS["accepted"], 1000, 990), parse_tolerance("1%", "t"))
    assert exceeds(worse_by(METRICS["accepted"], 1000, 989), parse_tolerance("1%", "t"))


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.01", 0.01), ("0", 0), ("100%", 1)])
def test_a_tolerance_is_a_share(text, value):
    assert parse_tolerance(text, "t") == pytest.approx(value)


@pytest.mark.parametrize("text", ["5", "-1%", "nan", "", "a lot", "101%", "1_0%"])
def test_what_is_no_share_is_no_tolerance(text):
    with pytest.raises(UsageError, match="no tolerance"):
        parse_tolerance(text, "--tolerance")


def test_tolerances_by_metric_and_cell_and_the_last_one_holds(tmp_path):
    file = tmp_path / "gate.toml"
    file.write_text(
        '[sweep]\nk = "4"\n[gate]\ntolerance = "2%"\n'
        '[[gate.threshold]]\nmetric = "speedup"\ncells = "code"\ntolerance = 0.2\nlevel = "warn"\n'
        '[[gate.threshold]]\nmetric = "rounds"\nlevel = "warn"\n'
        '[[gate.require]]\ncheck = "speedup>=1"\nlevel = "warn"\n'
    )
    policy = make_policy(["speedup[batch=4]=30%"], ["speedup>=2"], file, None)
    code, chat = ("code", "ngram", "greedy", 4, 1), ("chat", "ngram", "greedy", 4, 4)
    limit = policy.limit(METRICS["speedup"], code)
    assert (limit.tolerance, limit.level, limit.stated) == (0.2, "warn", True)
    assert policy.limit(METRICS["speedup"], chat).tolerance == pytest.approx(0.3)
    rounds = policy.limit(METRICS["rounds"], code)
    assert (rounds.tolerance, rounds.level, rounds.stated) == (0.02, "warn", True)
    assert policy.limit(METRICS["tpot_ms"], code).stated is False
    assert [level for _, level in policy.requirements] == ["warn", "error"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no \\[gate\\] table"),
        ("[gate]\nx = 1", "no key 'x'.*known are"),
        ("[gate", "gate.toml: "),
        ("[gate]\nthreshold = 3", "list of tables"),
        ('[[gate.threshold]]\nmetric = "spedup"', "no metric 'spedup'.*known are"),
        ('[[gate.threshold]]\ntolerance = "1%"', "names no metric"),
        ('[[gate.threshold]]\nmetric = "lossless"\ntolerance = "1%"', "no tolerance"),
        ('[[gate.threshold]]\nmetric = "speedup"\nlevel = "fatal"', "choose from error, warn"),
        ('[[gate.threshold]]\nmetric = "speedup"\nlimit = 1', "no key 'limit'"),
        ('[[gate.threshold]]\nmetric = "speedup"\ncells = "code"', "changes nothing.*add tolerance"),
        ("[gate]\ntolerance = true", "in quotes"),
        ("[gate]\ntolerance = " + 5000 * "9", "gate.toml: .*digits"),
        ("[gate]\ntolerance = " + 10000 * "[", "gate.toml: .*recursion"),
        ("[[gate.require]]", "has no check"),
    ],
)
def test_a_file_of_thresholds_that_cannot_be_read_says_where(tmp_path, text, message):
    file = tmp_path / "gate.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        make_policy((), (), file, None)
    assert re.search(message, str(caught.value))


def test_a_selector_without_a_key_is_a_suite():
    assert parse_selector("code", "s") == Selector(suite="code")
    assert parse_selector("suite=code", "s") == Selector(suite="code")
