"""What is recommended, and when the answer is OFF."""

from __future__ import annotations

import itertools

import pytest
from synthetic_run import cell, failed, write_run

from spectune.recommending.choice import pooled, recommend
from spectune.speedup.profile import Config, profiles
from spectune.speedup.run import load_run
from spectune.speedup.uncertainty import estimate
from spectune.sweeping.cell import RoundCount

BY_BATCH = {1: 2.1, 4: 1.2, 8: 0.8}


@pytest.fixture
def advise(tmp_path):
    numbers = itertools.count()

    def run(cells, failures=()):
        loaded = load_run(write_run(tmp_path / f"run{next(numbers)}", cells, failures), allow_empty=True)
        return recommend(loaded, profiles(loaded))

    return run


def draft(k, drafter="draft", rule="greedy"):
    return Config(drafter, rule, k)


def said(advice):
    return " ".join(advice.why)


def test_speculation_that_helps_at_batch_1_and_hurts_at_8_is_off_at_8(advise):
    found = advise([cell(k=k, batch=b, speedup=s - 0.01 * k) for b, s in BY_BATCH.items() for k in (2, 4)])
    by_batch = {a.batch: a for a in found.by_batch}
    assert by_batch[1].choice == draft(2)
    assert by_batch[4].choice == draft(2)
    assert by_batch[8].choice is None
    assert by_batch[8].verdict == "SLOWER"
    assert by_batch[8].best == draft(2)
    assert by_batch[8].speedup.value < 1


def test_the_overall_answer_weighs_all_batches_and_warns_where_it_loses(advise):
    found = advise([cell(batch=b, speedup=s, noise=0.1) for b, s in BY_BATCH.items()])
    assert found.overall.choice == draft(4)
    assert found.overall.speedup.value == pytest.approx(3 / (1 / 2.1 + 1 / 1.2 + 1 / 0.8), rel=0.01)
    assert "At batch 8 it is slower than plain decoding" in said(found.overall)


def test_a_gain_at_batch_1_alone_does_not_carry_the_overall_answer(advise):
    found = advise([cell(batch=b, speedup=s) for b, s in {1: 1.3, 8: 0.7, 16: 0.6}.items()])
    assert found.overall.choice is None
    assert found.by_batch[0].choice is not None


def test_a_run_of_batch_1_says_that_larger_batches_are_unknown(advise):
    assert "Only batch 1 was measured" in said(advise([cell()]).overall)
    both = advise([cell(), cell(batch=4)])
    assert not any("Only batch 1" in said(a) for a in (both.overall, *both.by_batch, *both.by_place))


def test_an_interval_around_one_is_off_but_not_called_slower(advise):
    found = advise([cell(speedup=1.001)]).overall
    assert (found.choice, found.verdict) == (None, "CAN'T TELL")


def test_prompts_that_share_all_their_rounds_tell_nothing_of_how_sure_a_speedup_is(advise):
    found = advise([cell(speedup=1.4, noise=0.0)]).overall
    assert (found.choice, found.verdict, found.speedup.low) == (None, "CAN'T TELL", None)
    assert "nothing varies" in said(found)


def test_without_an_accepted_token_nothing_is_faster(advise):
    nothing = (RoundCount(drafted=4, accepted=0, count=10),)
    found = advise([cell(rounds=nothing, speedup=1.06, noise=0.1)]).overall
    assert (found.choice, found.verdict) == (None, "CAN'T TELL")
    assert "exceeds the acceptance length 1.00" in said(found)
    assert advise([cell(rounds=nothing, speedup=0.9, noise=0.1)]).overall.verdict == "SLOWER"


def test_one_prompt_is_not_enough_to_recommend_anything(advise):
    found = advise([cell(speedup=3.0, prompts=1)]).overall
    assert (found.choice, found.verdict) == (None, "CAN'T TELL")
    assert "one prompt" in said(found)


def test_in_a_flat_optimum_the_smallest_k_is_taken_and_the_others_are_named(advise):
    speeds = {2: 1.50, 4: 1.592, 6: 1.60, 8: 1.599}
    found = advise([cell(k=k, speedup=s) for k, s in speeds.items()]).overall
    assert found.choice == draft(4)
    assert {c.k for c in found.flat} == {4, 6, 8}
    assert [o.config.k for o in found.ranking] == [6, 8, 4, 2]
    assert "Within 1 % of the best" in said(found)


def test_a_faster_drafter_is_not_traded_for_a_smaller_k_of_another(advise):
    cells = [cell(k=8, speedup=1.60), cell(k=2, speedup=1.595, drafter="ngram", drafter_digest="")]
    assert advise(cells).overall.choice == draft(8)


def test_ranking_by_speed_and_not_by_acceptance_rate(advise):
    cells = [
        cell(
            k=k,
            rounds=(RoundCount(drafted=k, accepted=min(k, 4), count=10),),
            speedup=(1 + min(k, 4)) / (1 + 0.1 * k),
        )
        for k in (2, 4, 8)
    ]
    found = advise(cells).overall
    assert found.choice == draft(4)
    assert [o.config.k for o in found.ranking] == [4, 8, 2]


def test_the_measured_speed_decides_where_the_model_is_wrong(advise):
    """β = 0.9 and T_d/T_t = 0.1 promise 4.6 at K = 8; an overhead of eight steps makes it a loss."""
    cells = [
        cell(
            k=k,
            rounds=(RoundCount(drafted=k, accepted=k, count=9), RoundCount(drafted=k, accepted=0, count=1)),
            cost_ratio=0.1,
            speedup=(1 + 0.9 * k) / (1 + 0.1 * k + 8),
        )
        for k in range(1, 9)
    ]
    found = advise(cells).overall
    assert (found.choice, found.verdict) == (None, "SLOWER")
    assert "Overhead takes" in said(found)


def test_the_fastest_but_uncertain_configuration_is_named_and_not_taken(advise):
    cells = [cell(k=2, speedup=1.3), cell(k=8, speedup=1.5, drift=lambda repeat: -0.6 + 1.2 * repeat)]
    found = advise(cells).overall
    assert found.ranking[0].config == draft(8)
    assert "draft, K 8 measured 1.50" in said(found)
    assert found.choice == draft(2)


def test_a_wrong_result_has_no_speed(advise):
    found = advise([cell(k=2, speedup=1.2), cell(k=8, speedup=9.0, identical=False)])
    assert found.overall.choice == draft(2)
    assert [e.spec.k for e in found.excluded] == [8]
    assert all(o.config.k != 8 for o in found.overall.ranking)


def test_only_wrong_results_leave_nothing_to_choose(advise):
    found = advise([cell(identical=False)])
    assert (found.overall.choice, found.overall.verdict) == (None, "CAN'T TELL")
    assert "no cell has a usable speed" in said(found.overall)


def test_sampled_cells_without_an_identity_promise_take_part(advise):
    assert advise([cell(identical=None, rule="speculative")]).overall.choice == draft(4, rule="speculative")


def test_a_configuration_must_be_measured_everywhere_to_be_an_overall_answer(advise):
    cells = [cell(batch=b, speedup=1.3) for b in (1, 4)] + [cell(k=8, batch=1, speedup=3.0)]
    found = advise(cells)
    assert found.overall.choice == draft(4)
    assert found.by_batch[0].choice == draft(8)
    assert "1 configuration was left out" in said(found.overall)


def test_without_a_configuration_that_was_measured_everywhere_the_places_choices_are_pointed_at(advise):
    found = advise([cell(k=2, batch=1, speedup=1.3), cell(k=8, batch=4, speedup=1.5)])
    assert (found.overall.choice, found.overall.verdict) == (None, "CAN'T TELL")
    assert "no configuration was measured everywhere: see the choices by suite and batch" in said(found.overall)
    assert [a.choice for a in found.by_place] == [draft(2), draft(8)]


def test_places_where_every_cell_failed_are_named(advise):
    found = advise([cell()], [failed(batch=16)])
    assert "code at batch 16" in said(found.overall)
    at_16 = next(a for a in found.by_batch if a.batch == 16)
    assert (at_16.choice, at_16.verdict) == (None, "CAN'T TELL")


def test_suites_are_pooled_by_time(advise):
    cells = [
        cell(suite="chat", suite_digest="a", speedup=4.0, noise=0),
        cell(suite="code", suite_digest="b", speedup=1.0, noise=0),
    ]
    found = advise(cells)
    assert found.overall.speedup.value == pytest.approx(2 / (1 / 4 + 1), rel=1e-6)
    assert [a.suite for a in found.by_suite] == ["chat", "code"]


def test_pooling_one_cell_changes_nothing(tmp_path):
    run = load_run(write_run(tmp_path / "run", [cell(speedup=1.7)]))
    (only,) = profiles(run)
    assert estimate(pooled([only])) == only.speedup


def test_the_reasons_are_made_of_measured_numbers(advise):
    text = said(advise([cell(k=4, speedup=1.5, cost_ratio=0.1, verify=1.2)]).overall)
    for fact in (
        "draft, K 4 decodes 1.50",
        "Acceptance length 3.00",
        "costs 0.10 of a target step",
        "costs 1.20 plain steps",
        "Overhead takes 20% of a round",
        "A round costs 2.00 plain rounds",
    ):
        assert fact in text


def test_nothing_finished_gives_an_answer_without_a_choice(advise):
    found = advise([], [failed()])
    assert found.overall.choice is None
    assert found.by_place[0].why[0] == "no cell has a usable speed."
