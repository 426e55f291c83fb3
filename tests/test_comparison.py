"""Two runs against each other: which cells are partners, and what their intervals say."""

from __future__ import annotations

import pytest
from synthetic_run import cell, strict_json, write_run

from spectune.reporting.document import report_document
from spectune.reporting.summary import as_json, summarise
from spectune.speedup.comparison import compare
from spectune.speedup.profile import profile


def profiles(*cells):
    return [profile(c) for c in cells]


def test_the_ratio_of_two_runs_is_known_and_much_surer_than_either_speedup():
    # The same prompts are slow in both runs, so the spread over prompts cancels.
    a, b = profiles(cell(speedup=1.5, noise=10)), profiles(cell(speedup=1.8, noise=10, dtype="bfloat16"))
    (pair,) = compare(a, b).pairs
    assert pair.rate.value == pytest.approx(1.2)
    assert pair.rate.verdict == "FASTER"
    width = pair.rate.high - pair.rate.low
    assert width < 0.2 * (a[0].speedup.high - a[0].speedup.low)
    assert pair.speedup.value == pytest.approx(1.2)
    assert pair.acceptance_length.value == 0


def test_what_has_one_value_in_each_run_is_compared_and_what_varies_is_paired():
    a = profiles(*(cell(k=k, dtype="float32") for k in (1, 2, 4)))
    b = profiles(*(cell(k=k, dtype="bfloat16") for k in (2, 4, 8)))
    found = compare(a, b)
    assert found.differs == {"dtype": ("float32", "bfloat16")}
    assert [(p.a.spec.k, p.b.spec.k) for p in found.pairs] == [(2, 2), (4, 4)]
    assert [s.k for s in found.only_a] == [1]
    assert [s.k for s in found.only_b] == [8]


def test_two_drafts_are_compared_at_equal_places():
    found = compare(profiles(cell(drafter="old", k=2)), profiles(cell(drafter="new", k=2)))
    assert found.differs == {"drafter": ("old", "new")}
    assert len(found.pairs) == 1


def test_new_weights_under_the_same_name_are_partners_and_are_named(tmp_path):
    a = write_run(tmp_path / "a", [cell(drafter_digest="d0")])
    b = write_run(tmp_path / "b", [cell(drafter_digest="d1", repeats=3)])
    document = strict_json(as_json(report_document(summarise(a), [summarise(b)])))
    (found,) = document["comparisons"]
    assert len(found["pairs"]) == 1
    assert found["other_weights"] == ["draft"]


def test_other_prompts_are_no_partners():
    found = compare(profiles(cell(suite_digest="s0")), profiles(cell(suite_digest="s1")))
    assert not found.pairs
    assert len(found.only_a) == len(found.only_b) == 1


def test_a_wrong_result_has_no_ratio_and_says_why():
    (pair,) = compare(profiles(cell()), profiles(cell(identical=False))).pairs
    assert pair.rate.value is None
    assert "differ from plain decoding" in pair.rate.reason


def test_one_prompt_gives_a_ratio_without_an_interval():
    (pair,) = compare(profiles(cell(prompts=1)), profiles(cell(prompts=1, speedup=4.0))).pairs
    assert pair.rate.value == pytest.approx(2.0)
    assert pair.rate.low is None
    assert pair.rate.verdict == "CAN'T TELL"
