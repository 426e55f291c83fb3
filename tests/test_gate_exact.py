"""Exact checks: counts and outputs against a baseline, with and without a stated tolerance."""

from __future__ import annotations

import pytest
from gate_helpers import accepting, check, judged, side, timed_cell, with_requests
from synthetic_run import cell, failed

from spectune.errors import UsageError
from spectune.gating.exact import COMPARED
from spectune.gating.gate import gate
from spectune.gating.policy import make_policy
from spectune.sweeping.cell import RoundCount

EXACT = make_policy((), (), None, "exact")


def exact(*tolerances: str):
    return make_policy(tolerances, (), None, "exact")


def counted(*rounds: tuple[int, int, int], **changes):
    return cell(rounds=tuple(RoundCount(drafted=d, accepted=a, count=n) for d, a, n in rounds), **changes)


def test_the_same_run_passes_every_check(tmp_path):
    outcome = judged(tmp_path, [counted((4, 2, 20))], [counted((4, 2, 20))], EXACT)
    assert outcome.verdict == "PASS"
    assert outcome.exit_code == 0
    names = {c.what for c in outcome.checks}
    assert names == {"lossless", "counts_add_up", "outputs", "joint_acceptance", *COMPARED}


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_a_loss_of_one_percent_of_the_accepted_tokens_is_always_caught(tmp_path, repeats):
    """200 accepted tokens, two fewer: caught whatever the number of repeats, at tolerance 0 and at 0.5 %."""
    before = counted((4, 2, 100), repeats=repeats)
    after = counted((4, 2, 98), (4, 1, 2), (4, 0, 1), repeats=repeats)
    for n, policy in enumerate((EXACT, exact("0.5%"))):
        outcome = judged(tmp_path / str(n), [before], [after], policy)
        assert outcome.exit_code == 1
        assert check(outcome, "accepted").verdict == "REGRESSION"
        assert check(outcome, "accepted").change == pytest.approx(-0.01)


def test_one_percent_passes_at_a_tolerance_of_one_percent(tmp_path):
    before, after = counted((4, 2, 100)), counted((4, 2, 98), (4, 1, 2), (4, 0, 1))
    outcome = judged(tmp_path, [before], [after], exact("1%", "acceptance_length=2%", "outputs=100%"))
    assert check(outcome, "accepted").verdict == "PASS"


def test_better_acceptance_passes_and_worse_does_not(tmp_path):
    """Directions come from the table: fewer rounds and more accepted tokens for the same output are no alarm."""
    low, high = counted((4, 2, 20)), counted((4, 4, 12))
    assert judged(tmp_path / "up", [low], [high], EXACT).verdict == "PASS"
    down = judged(tmp_path / "down", [high], [low], EXACT)
    assert down.verdict == "REGRESSION"
    for name in ("rounds", "acceptance_length", "acceptance_rate", "tokens_per_target_forward", "joint_acceptance"):
        assert check(down, name).verdict == "REGRESSION"


def test_changed_outputs_are_a_regression_even_where_all_counts_are_better(tmp_path):
    low, high = counted((4, 2, 20)), counted((4, 4, 12))
    changed = with_requests(high, lambda r: r.model_copy(update={"output_digest": "other"}))
    outcome = judged(tmp_path, [low], [changed], EXACT)
    assert [c.what for c in outcome.troubles] == ["outputs"]
    assert check(outcome, "outputs").change == 1.0


def test_tolerated_is_the_share_of_changed_outputs(tmp_path):
    changed = with_requests(
        counted((4, 2, 20)), lambda r: r.model_copy(update={"output_digest": "x" if r.id in ("p0", "p1") else "same"})
    )
    assert judged(tmp_path / "a", [counted((4, 2, 20))], [changed], exact("outputs=25%")).verdict == "PASS"
    assert judged(tmp_path / "b", [counted((4, 2, 20))], [changed], exact("outputs=24%")).verdict == "REGRESSION"


def test_accepted_tokens_that_no_output_has_are_a_miscount(tmp_path):
    """The bonus counted as accepted: more accepted, nothing better, and no metric worse."""
    right = accepting((4, 2), (4, 4), (4, 0), (4, 2))
    wrong = with_requests(
        right,
        lambda r: r.model_copy(
            update={"rounds": accepting((4, 3), (4, 4), (4, 1), (4, 3)).passes[1].requests[0].rounds}
        ),
    )
    outcome = judged(tmp_path, [right], [wrong], EXACT)
    assert [c.what for c in outcome.troubles] == ["counts_add_up"]
    assert outcome.exit_code == 1


def test_a_cut_last_round_is_no_miscount(tmp_path):
    cut = with_requests(
        accepting((4, 2), (4, 4)), lambda r: r.model_copy(update={"output_tokens": r.output_tokens - 1})
    )
    assert judged(tmp_path, [cut], [cut], EXACT).verdict == "PASS"


def test_outputs_that_differ_from_plain_decoding_fail_without_a_baseline(tmp_path):
    run = side(tmp_path / "run", cell(identical=False))
    outcome = gate(run, None, make_policy((), ["acceptance_length>=1"], None, None))
    assert check(outcome, "lossless").verdict == "REGRESSION"


ELSEWHERE = {"environment": {"cpu": "another processor", "torch": "2.9", "gpus": []}}


def test_on_another_machine_only_a_stated_tolerance_is_judged(tmp_path):
    before = [counted((4, 2, 20))]
    silent = judged(tmp_path / "a", before, before, EXACT, **ELSEWHERE)
    assert silent.exit_code == 3
    assert "a processor -> another processor" in check(silent, "accepted").message
    assert "--tolerance 1%" in check(silent, "accepted").message
    assert judged(tmp_path / "b", before, before, exact("0"), **ELSEWHERE).verdict == "PASS"
    assert judged(tmp_path / "c", before, [counted((4, 1, 30))], exact("1%"), **ELSEWHERE).verdict == "REGRESSION"


def test_other_versions_of_libraries_are_named_and_compared(tmp_path):
    newer = {"environment": {"cpu": "a processor", "torch": "2.10", "gpus": []}}
    outcome = judged(tmp_path, [counted((4, 2, 20))], [counted((4, 2, 20))], EXACT, **newer)
    assert outcome.verdict == "PASS"
    assert outcome.notes == ("software differs: torch 2.9 -> 2.10",)


@pytest.mark.parametrize(
    "change",
    [
        {"target_digest": "t1"},
        {"drafter_digest": "d1"},
        {"suite_digest": "s1"},
        {"dtype": "bfloat16"},
        {"seed": 1},
        {"max_new_tokens": 9},
        {"ignore_eos": True},
    ],
)
def test_other_weights_prompts_or_settings_cannot_be_judged(tmp_path, change):
    outcome = judged(tmp_path, [counted((4, 2, 20))], [counted((4, 2, 20), **change)])
    assert outcome.exit_code == 3
    assert next(iter(change)) in check(outcome, "settings").message


def test_fewer_repeats_are_the_same_cell(tmp_path):
    outcome = judged(tmp_path, [counted((4, 2, 20), repeats=5)], [counted((4, 2, 20), repeats=1)], EXACT)
    assert outcome.verdict == "PASS"


def test_repeats_that_differ_among_themselves_need_a_stated_tolerance(tmp_path):
    shaky = counted((4, 2, 20))
    last = shaky.passes[-1 if shaky.passes[-1].mode == "speculative" else -2]
    other = tuple(r.model_copy(update={"output_digest": "other"}) for r in last.requests)
    passes = tuple(p.model_copy(update={"requests": other}) if p is last else p for p in shaky.passes)
    shaky = shaky.model_copy(update={"passes": passes})
    assert judged(tmp_path / "a", [counted((4, 2, 20))], [shaky], EXACT).exit_code == 3
    assert judged(tmp_path / "b", [counted((4, 2, 20))], [shaky], exact("0", "outputs=0")).verdict == "PASS"


def test_nothing_drafted_is_null_and_never_compared_with_a_number(tmp_path):
    drafted, none = counted((4, 2, 20)), counted((0, 0, 60))
    outcome = judged(tmp_path / "a", [drafted], [none], EXACT)
    assert check(outcome, "acceptance_rate").verdict == "CANNOT JUDGE"
    assert outcome.exit_code == 1  # and the acceptance length fell to 1
    both = judged(tmp_path / "b", [none], [none], EXACT)
    assert both.verdict == "PASS"
    assert "acceptance_rate" not in {c.what for c in both.checks}


def test_cells_missing_failed_or_unknown_are_never_a_pass(tmp_path):
    one, two = counted((4, 2, 20)), counted((4, 2, 20), drafter="ngram", drafter_digest="none")
    missing = judged(tmp_path / "a", [one, two], [one], EXACT)
    assert missing.exit_code == 3
    assert "not in the run" in missing.troubles[0].message
    extra = judged(tmp_path / "b", [one], [one, two], EXACT)
    assert extra.verdict == "PASS"
    assert "not in the baseline" in extra.notes[0]
    apart = judged(tmp_path / "c", [one], [two], EXACT)
    assert apart.exit_code == 3
    broken = judged(tmp_path / "d", [one, two], [one], EXACT, failures=[failed(drafter="ngram", drafter_digest="none")])
    assert broken.exit_code == 4
    empty = judged(tmp_path / "e", [one], [], EXACT)
    assert empty.exit_code == 3


def test_a_cell_that_was_never_to_fit_matters_only_where_the_baseline_has_it(tmp_path):
    one = counted((4, 2, 20))
    too_big = failed(reason="infeasible", batch=512)
    assert judged(tmp_path / "a", [one], [one], EXACT, failures=[too_big]).verdict == "PASS"
    big = counted((4, 2, 20), batch=512)
    assert judged(tmp_path / "b", [one, big], [one], EXACT, failures=[too_big]).exit_code == 4


def test_a_tolerance_for_cells_that_are_nowhere_is_wrong_use(tmp_path):
    with pytest.raises(UsageError, match=r"no cell is suite=cod.*suite code"):
        judged(tmp_path, [counted((4, 2, 20))], [counted((4, 2, 20))], exact("rounds[cod]=1%"))


def test_a_warning_does_not_fail_and_warnings_alone_do_not_pass(tmp_path):
    file = tmp_path / "gate.toml"
    file.write_text('[[gate.threshold]]\nmetric = "target_forwards"\nlevel = "warn"\n')
    before = counted((4, 2, 20))
    after = before.model_copy(
        update={"passes": tuple(p.model_copy(update={"target_forwards": p.target_forwards + 5}) for p in before.passes)}
    )
    warned = judged(tmp_path / "a", [before], [after], make_policy((), (), file, "exact"))
    assert warned.verdict == "PASS"
    assert [(c.what, c.level) for c in warned.troubles] == [("target_forwards", "warn")]
    names = [
        "lossless",
        "counts_add_up",
        "outputs",
        "joint_acceptance",
        *COMPARED,
    ]
    file.write_text("".join(f'[[gate.threshold]]\nmetric = "{n}"\nlevel = "warn"\n' for n in names))
    assert judged(tmp_path / "b", [before], [counted((4, 1, 30))], make_policy((), (), file, "exact")).exit_code == 3


def in_portions(whole, first: int):
    """The same cell measured in two portions of its prompts, as a sweep to a precision does."""
    passes = []
    for n, part in enumerate((slice(None, first), slice(first, None))):
        for p in whole.passes:
            some = p.requests[part]
            forwards = sum(c.count for r in some for c in r.rounds)
            passes.append(
                p.model_copy(
                    update={
                        "requests": some,
                        "repeat": p.repeat + n * whole.spec.repeats,
                        "order": len(passes),
                        "target_forwards": forwards,
                    }
                )
            )
    return whole.model_copy(update={"passes": tuple(passes)})


def test_prompts_taken_in_portions_are_one_cell(tmp_path):
    whole = counted((4, 2, 20), repeats=3)
    parts = in_portions(whole, 5)
    outcome = judged(tmp_path / "a", [whole], [parts])
    assert outcome.verdict == "PASS"
    assert check(outcome, "speedup").change == pytest.approx(0, abs=1e-6)
    worse = judged(tmp_path / "b", [whole], [in_portions(counted((4, 1, 30), repeats=3), 5)], EXACT)
    assert check(worse, "target_forwards").now == 8 * 30


def test_other_requests_cannot_be_compared(tmp_path):
    outcome = judged(tmp_path, [counted((4, 2, 20), prompts=8)], [counted((4, 2, 20), prompts=6)])
    assert outcome.exit_code == 3
    assert "8 -> 6 requests" in check(outcome, "settings").message


def test_a_run_that_was_stopped_names_its_cells_and_no_other_plan(tmp_path):
    before, cells = [timed_cell(2.0)], [timed_cell(2.0, k=8)]
    outcome = judged(tmp_path, before, cells, plan=(before[0].spec, cells[0].spec))
    assert outcome.verdict == "CANNOT JUDGE"
    (trouble,) = outcome.troubles
    assert trouble.message == "the cell was not run; sweep with --resume"
