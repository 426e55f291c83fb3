"""Acceptance metrics: worked examples, and properties that hold for any counts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import cell, request, rounds_of

from spectune.speedup.acceptance import acceptance, miscounted
from spectune.speedup.profile import profile
from spectune.sweeping.cell import RequestResult, RoundCount


def of(k, *rounds):
    return acceptance(k, [request(rounds_of(*rounds), 1.0)])


def test_only_the_prefix_counts_and_each_round_emits_one_more():
    found = of(3, (3, 1), (3, 3))
    assert (found.accepted, found.drafted) == (4, 6)
    assert request(rounds_of((3, 1), (3, 3)), 1.0).output_tokens - 1 == 6
    assert found.acceptance_length == 3.0


@pytest.mark.parametrize(("kept", "rate"), [(0, 0.0), (2, 0.5), (4, 1.0)])
def test_the_bonus_token_is_never_in_the_rate(kept, rate):
    assert of(4, *[(4, kept)] * 10).acceptance_rate == rate


def test_full_acceptance_has_length_k_plus_one():
    assert of(4, *[(4, 4)] * 8).acceptance_length == 5.0


def test_the_length_of_a_suite_is_weighted_by_rounds_not_a_mean_of_means():
    good = request([RoundCount(drafted=4, accepted=4, count=8)], 1.0, name="good")
    bad = request([RoundCount(drafted=4, accepted=0, count=2)], 1.0, name="bad")
    found = acceptance(4, [good, bad])
    assert found.acceptance_length == pytest.approx(1 + 3.2)
    assert found.mean_request_acceptance_length == pytest.approx(1 + 2.0)


@pytest.mark.parametrize("tokens", range(1, 13))
def test_a_draft_cut_by_the_limit_is_not_a_rejection(tokens):
    left, rounds = tokens - 1, []
    while left > 0:
        drafted = min(4, left - 1)
        rounds.append((drafted, drafted))
        left -= drafted + 1
    found = of(4, *rounds)
    assert found.acceptance_rate in (1.0, None)
    assert (found.acceptance_rate is None) == (sum(d for d, _ in rounds) == 0)


def test_nothing_drafted_gives_null_and_not_zero():
    found = of(4, (0, 0), (0, 0))
    assert found.acceptance_rate is None
    assert found.conditional_acceptance == (None,) * 4
    assert found.acceptance_length == 1.0
    assert found.undrafted_rounds == 2


def test_no_round_at_all_gives_nulls():
    found = acceptance(2, [request((), 0.0)])
    assert found.acceptance_length is None
    assert found.joint_acceptance == (None, None)
    assert found.tokens_per_target_forward is None
    assert found.mean_request_acceptance_length is None


def test_undrafted_rounds_count_in_tokens_per_target_forward():
    assert of(4, (4, 4), (0, 0)).tokens_per_target_forward == 3.0


def test_an_early_stopping_drafter_is_said_to_draft_less_than_k():
    early = cell(k=8, rounds=(RoundCount(drafted=2, accepted=2, count=10),))
    found = profile(early)
    assert found.acceptance.acceptance_rate == 1.0
    assert found.acceptance.drafted_per_round == 2.0
    assert found.acceptance.below_k
    assert any(note.startswith("below-k: 2.00 tokens") for note in found.notes)
    assert not profile(cell(k=2)).acceptance.below_k


def test_counts_that_contradict_each_other_exclude_the_cell():
    wrong = request(rounds_of((4, 2)), 1.0).model_copy(update={"output_tokens": 9})
    assert miscounted(wrong) == "p0 has 9 tokens after 1 rounds with 2 accepted"
    good = cell()
    passes = tuple(p.model_copy(update={"requests": (wrong,)}) if p.mode == "speculative" else p for p in good.passes)
    found = profile(good.model_copy(update={"passes": passes}))
    assert "contradict" in found.excluded
    assert found.speedup.value is None


def test_a_last_round_cut_by_a_stop_token_is_no_contradiction():
    cut = request(rounds_of((4, 4), (4, 2)), 1.0).model_copy(update={"output_tokens": 1 + 5 + 2})
    assert miscounted(cut) is None


@st.composite
def requests(draw, k=5, full=False):
    rounds = []
    for _ in range(draw(st.integers(1, 8))):
        drafted = k if full else draw(st.integers(0, k))
        accepted = draw(st.integers(0, drafted))
        rounds.append(RoundCount(drafted=drafted, accepted=accepted, count=draw(st.integers(1, 9))))
    return request(rounds, 1.0)


def shares(found):
    every = (*found.joint_acceptance, *found.conditional_acceptance, *found.offered, found.acceptance_rate)
    return [share for share in every if share is not None]


@given(st.lists(requests(), min_size=1, max_size=5))
def test_shares_lie_between_zero_and_one_and_lengths_between_one_and_k_plus_one(many: list[RequestResult]):
    found = acceptance(5, many)
    assert all(0 <= share <= 1 for share in shares(found))
    assert 1 <= found.acceptance_length <= 6
    assert found.accepted <= found.drafted <= 5 * found.rounds
    assert all(miscounted(r) is None for r in many)


@given(st.lists(requests(), min_size=1, max_size=5))
def test_joint_acceptance_never_rises_along_the_draft(many: list[RequestResult]):
    joint = acceptance(5, many).joint_acceptance
    assert all(a >= b for a, b in pairwise(joint))


@given(st.lists(requests(full=True), min_size=1, max_size=5))
def test_joint_acceptance_adds_up_to_the_length_if_every_round_drafts_k(many: list[RequestResult]):
    found = acceptance(5, many)
    assert sum(found.joint_acceptance) == pytest.approx(found.acceptance_length - 1)
    assert found.acceptance_length == pytest.approx(1 + 5 * found.acceptance_rate)
    assert not found.below_k


@given(st.lists(requests(), min_size=1, max_size=5))
def test_the_order_of_requests_changes_nothing(many: list[RequestResult]):
    one, other = acceptance(5, many), acceptance(5, many[::-1])
    assert one.mean_request_acceptance_length == pytest.approx(other.mean_request_acceptance_length)
    assert one.joint_acceptance == other.joint_acceptance
    assert one.acceptance_length == other.acceptance_length
