"""The grid, its order, and the lists of counts it is made of."""

from __future__ import annotations

import pytest
from fake_engine import model
from hypothesis import given
from hypothesis import strategies as st

from spectune.errors import UsageError
from spectune.suites.prompt import Prompt, Suite
from spectune.sweeping.cell import Sampling
from spectune.sweeping.counts import LARGEST, parse_counts
from spectune.sweeping.options import SweepOptions
from spectune.sweeping.plan import plan_cells


def suite(name: str) -> Suite:
    return Suite(name, "test", (Prompt("p1", "all", text=f"{name} one"), Prompt("p2", "all", text="two")))


def plan(options: SweepOptions, *names: str, sampling: Sampling | None = None):
    drafters = {name: None if name == "ngram" else model(name) for name in options.drafts}
    return plan_cells(
        options,
        model("target"),
        drafters,
        [suite(name) for name in names or ("code",)],
        sampling=sampling or options.sampling(Sampling()),
        chat_template=True,
    )


@given(st.lists(st.integers(1, LARGEST), min_size=1, max_size=20, unique=True))
def test_lists_of_counts_are_read_as_written(counts):
    assert parse_counts(",".join(map(str, counts)), "--k") == tuple(counts)
    assert parse_counts(" , ".join(map(str, counts)), "--k") == tuple(counts)
    assert parse_counts(counts, "--k") == tuple(counts)


@given(st.integers(1, 100), st.integers(0, 50))
def test_ranges_have_both_ends(first, more):
    assert parse_counts(f"{first}-{first + more}", "--k") == tuple(range(first, first + more + 1))


@given(st.text(max_size=12))
def test_any_text_gives_counts_or_a_usage_error(text):
    try:
        counts = parse_counts(text, "--k")
    except UsageError:
        return
    assert counts
    assert len(set(counts)) == len(counts)
    assert all(1 <= n <= LARGEST for n in counts)


@pytest.mark.parametrize(
    "value",
    ["", "0", "1,,2", "8-1", "1-4,3", "2,2", "-3", "1.5", "one", "1-99999999", "9" * 5000, [True], [0], []],
)
def test_wrong_counts_are_refused(value):
    with pytest.raises(UsageError, match="--k"):
        parse_counts(value, "--k")


def test_the_plan_is_the_full_grid_in_a_fixed_order():
    options = SweepOptions(drafts=("ngram", "small"), ks=(4, 1), batches=(1, 8))
    cells = plan(options, "code", "math")
    assert len(cells) == len({c.key for c in cells}) == 16
    assert [(c.suite, c.batch, c.drafter, c.k) for c in cells[:5]] == [
        ("code", 1, "ngram", 4),
        ("code", 1, "ngram", 1),
        ("code", 1, "small", 4),
        ("code", 1, "small", 1),
        ("code", 8, "ngram", 4),
    ]
    assert cells == plan(options, "code", "math")


def test_the_order_of_options_does_not_change_keys():
    here = plan(SweepOptions(drafts=("ngram", "small"), ks=(1, 2)), "code", "math")
    there = plan(SweepOptions(drafts=("small", "ngram"), ks=(2, 1)), "math", "code")
    assert {c.key for c in here} == {c.key for c in there}


def test_everything_that_changes_a_result_changes_the_key():
    usual = plan(SweepOptions(ks=(2,)))[0].key
    others = [
        SweepOptions(ks=(3,)),
        SweepOptions(ks=(2,), batches=(2,)),
        SweepOptions(ks=(2,), seed=1),
        SweepOptions(ks=(2,), max_new_tokens=64),
        SweepOptions(ks=(2,), ignore_eos=True),
        SweepOptions(ks=(2,), temperature=1.0),
        SweepOptions(ks=(2,), repeats=2),
        SweepOptions(ks=(2,), drafts=("small",)),
    ]
    assert usual not in {plan(options)[0].key for options in others}


@pytest.mark.parametrize(
    ("temperature", "rule", "chosen"),
    [
        (0.0, None, "greedy"),
        (0.0, "greedy", "greedy"),
        (0.0, "speculative", None),
        (0.0, "match", None),
        (0.7, None, "speculative"),
        (0.7, "block", "block"),
        (0.7, "match", "match"),
        (0.7, "greedy", None),
    ],
)
def test_the_rule_follows_the_temperature(temperature, rule, chosen):
    options = SweepOptions(ks=(2,), temperature=temperature, rule=rule)
    if chosen is None:
        with pytest.raises(UsageError, match=str(rule)):
            plan(options)
    else:
        assert plan(options)[0].rule == chosen


def test_two_suites_of_one_name_are_refused():
    with pytest.raises(UsageError, match="two suites are called 'code'"):
        plan(SweepOptions(), "code", "code")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"ks": ()}, "--k"),
        ({"batches": (0,)}, "--batch"),
        ({"drafts": ()}, "--draft"),
        ({"drafts": ("ngram", "ngram")}, "--draft"),
        ({"suites": ()}, "--suite"),
        ({"repeats": 0}, "--repeats"),
        ({"prompts": 0}, "--prompts"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"dtype": "int3"}, "int3"),
        ({"rule": "lucky"}, "lucky"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": 1e-9}, "greedy"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_k": -1}, "--top-k"),
        ({"peak_bandwidth": 0.0}, "--peak-bandwidth"),
    ],
)
def test_wrong_options_are_refused_by_name(wrong, named):
    with pytest.raises(UsageError, match=named):
        SweepOptions(**wrong)


def test_unspecified_sampling_comes_from_the_model():
    model_defaults = Sampling(temperature=0.6, top_k=20, top_p=0.95)
    assert SweepOptions(top_p=0.5).sampling(model_defaults) == Sampling(temperature=0.6, top_k=20, top_p=0.5)
    assert SweepOptions(temperature=0.0).sampling(model_defaults).greedy


def test_random_weights_decode_to_the_limit_and_rates_are_cut_to_k():
    grid = SweepOptions(
        drafts=("ngram", "eagle3:shape"), suites=("code",), ks=(1, 3), synthetic_acceptance="0.9,0.5,0.1"
    )
    drafters = {"ngram": None, "eagle3:shape": model("eagle3:shape")}
    cells = plan_cells(grid, model("target"), drafters, [suite("code")], sampling=Sampling(), chat_template=None)
    assert {cell.ignore_eos for cell in cells} == {True}
    assert {(cell.k, cell.synthetic) for cell in cells} == {(1, (0.9,)), (3, (0.9, 0.5, 0.1))}


@pytest.mark.parametrize(
    ("name", "random"),
    [
        ("shape:a", True),
        ("tree:shape:a", True),
        ("staged:ngram>shape:a", True),
        ("eagle3:shape", True),
        ("grown:shape:a:1:0", True),
        ("grown:smollm2:1:0", False),
        ("./shape", False),
        ("reshape:x", False),
        ("owner/shape", False),
    ],
)
def test_random_weights_are_known_by_name(name, random):
    from spectune.sweeping.drafter_names import has_random_weights

    assert has_random_weights(name) is random
