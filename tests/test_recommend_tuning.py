"""Objective, mix, Pareto set, schedule, crossover, regret and advice, from runs whose answers are put in by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from synthetic_run import STEP, bandwidth, cell, failed, model, write_run

from spectune.errors import UsageError
from spectune.recommending.choice import recommend
from spectune.recommending.mix import parse_mix
from spectune.recommending.objective import ServiceLevel, parse_objective, parse_slo
from spectune.recommending.pareto import pareto_set
from spectune.recommending.tuning import tune
from spectune.speedup.crossing import Crossing, crossing
from spectune.speedup.profile import Config, profiles
from spectune.speedup.run import load_run
from spectune.sweeping.cell import Memory, MemoryPlan, Reading, RoundCount


@pytest.fixture
def tuned(tmp_path):
    numbers = itertools.count()

    def run(cells, failures=(), mix=None, objective="throughput", slo=None, **changes):
        loaded = load_run(write_run(tmp_path / f"run{next(numbers)}", cells, failures, **changes))
        return tune(loaded, profiles(loaded), mix=mix, objective=objective, slo=slo)

    return run


def named(tuning, name):
    return [f for f in tuning.advice if f.name == name]


def suites(**speeds):
    return [cell(suite=s, suite_digest=s, speedup=v, noise=0.1) for s, v in speeds.items()]


# An answer that is OFF


def test_a_best_configuration_that_is_slower_is_called_slower_whatever_the_others_are(tmp_path):
    unsure = cell(k=8, speedup=0.85, drift=lambda repeat: -0.4 + 0.8 * repeat)
    run = load_run(write_run(tmp_path / "run", [cell(k=2, speedup=0.9), unsure]))
    found = recommend(run, profiles(run)).overall
    assert (found.choice, found.verdict) == (None, "SLOWER")
    assert "1 other configuration measured lower still" in " ".join(found.why)


# Mix


def test_a_mix_weighs_suites_by_their_share_of_the_tokens(tmp_path):
    run = load_run(write_run(tmp_path / "run", suites(code=4.0, chat=0.8, math=9.0)))
    found = recommend(run, profiles(run), mix={"code": 0.75, "chat": 0.25})
    assert found.overall.speedup.value == pytest.approx(1 / (0.75 / 4 + 0.25 / 0.8), rel=1e-3)
    assert [a.suite for a in found.by_suite] == ["chat", "code", "math"]


def test_a_mix_can_turn_the_answer_off(tmp_path):
    run = load_run(write_run(tmp_path / "run", suites(code=3.0, chat=0.5)))
    assert recommend(run, profiles(run), mix={"code": 0.9, "chat": 0.1}).overall.choice == Config("draft", "greedy", 4)
    assert recommend(run, profiles(run), mix={"code": 0.1, "chat": 0.9}).overall.choice is None


def test_shares_are_scaled_and_mistakes_are_refused():
    assert parse_mix("code=3, chat=1", ["code", "chat"]) == {"code": 0.75, "chat": 0.25}
    for wrong in ("code", "code=x", "code=0", "code=-1", "code=nan", "code=1,code=2", "maths=1", "", "code=inf"):
        with pytest.raises(UsageError):
            parse_mix(wrong, ["code", "chat"])


# Objective


def by_batch(rate=1.0, **changes):
    return cell(speedup=rate, noise=0.1, **changes)


def test_latency_and_throughput_choose_different_batches(tuned):
    cells = [by_batch(2.0, batch=1), by_batch(1.5, batch=8), by_batch(0.8, batch=32)]
    latency, throughput = (tuned(cells, objective=o).answers[0] for o in ("latency", "throughput"))
    assert (latency.choice.batch, latency.gain.verdict) == (1, "FASTER")
    assert latency.choice.value.value == pytest.approx(2 / STEP, rel=0.01)
    # Plain decoding at batch 32 has a rate of 32; speculation at 8 has 12.
    assert (throughput.choice.config, throughput.choice.batch) == (None, 32)
    assert throughput.gain.verdict == "SLOWER"
    assert throughput.gain.value == pytest.approx(0.8, rel=0.01)


def test_goodput_counts_only_requests_within_the_service_level(tuned):
    cells = [by_batch(2.0, batch=1), by_batch(1.25, batch=8)]
    # Per token: plain 10 ms; speculative 5 ms at batch 1 and 8 ms at batch 8.
    loose = tuned(cells, objective="goodput", slo=ServiceLevel(tpot=0.009)).answers[0]
    assert loose.choice.batch == 8
    assert loose.choice.value.value == pytest.approx(8 * 1.25 / STEP, rel=0.01)
    assert loose.gain.verdict == "FASTER"  # no plain request meets it
    tight = tuned(cells, objective="goodput", slo=ServiceLevel(tpot=0.006)).answers[0]
    assert tight.choice.batch == 1
    nothing = tuned(cells, objective="goodput", slo=ServiceLevel(ttft=0.01)).answers[0]
    assert (nothing.choice, nothing.reason) == (None, "no request meets the service level")


def test_goodput_is_the_share_of_tokens_in_time_times_the_rate(tuned):
    # NOISE spreads the prompts: half of the eight lie above the middle.
    answer = tuned([cell(speedup=2.0)], objective="goodput", slo=ServiceLevel(tpot=STEP / 2)).answers[0]
    best = answer.ranking[0]
    assert 0.4 < best.value.value / best.in_all.value < 0.7


def test_the_objective_takes_the_smallest_k_within_one_percent(tuned):
    speeds = {2: 1.50, 4: 1.592, 6: 1.60, 8: 1.599}
    answer = tuned([cell(k=k, speedup=s) for k, s in speeds.items()]).answers[0]
    assert answer.choice.config.k == 4
    assert sorted(c.config.k for c in answer.flat) == [4, 6, 8]


def slowed(measured, factor):
    """A cell as a machine would have measured it that was slower by this factor all along."""

    def slow(request):
        return request.model_copy(
            update={name: factor * getattr(request, name) for name in ("full_seconds", "decode_seconds")}
        )

    passes = tuple(p.model_copy(update={"requests": tuple(map(slow, p.requests))}) for p in measured.passes)
    return measured.model_copy(update={"passes": passes})


def test_a_cell_that_was_measured_in_a_slow_spell_is_not_beaten_for_it(tuned):
    others = [cell(k=k, speedup=1.05, noise=0.1) for k in (4, 8)]
    answer = tuned([slowed(cell(k=2, speedup=1.2, noise=0.1), 1.3), *others]).answers[0]
    assert answer.choice.config.k == 2
    off = next(c for c in answer.ranking if c.config is None)
    assert answer.choice.value.value / off.value.value == pytest.approx(answer.gain.value)
    assert off.value.value == pytest.approx(1 / STEP)  # the usual pace, however slow a single cell was


def test_goodput_is_judged_at_the_pace_that_the_rates_are_told_at(tuned):
    # In the cell that was slower by 1.3 a token took 13 ms, speculatively 6.5; at the others' pace 10 and 5.
    cells = [slowed(cell(k=2, speedup=2.0, noise=0.1), 1.3), *(cell(k=k, speedup=0.8, noise=0.1) for k in (4, 8))]
    for limit, in_time in ((0.0115, True), (0.0055, True), (0.0045, False)):
        answer = tuned(cells, objective="goodput", slo=ServiceLevel(tpot=limit)).answers[0]
        own = next(c for c in answer.ranking if c.config is not None and c.config.k == 2)
        assert own.per_user.value == pytest.approx(2 / STEP, rel=0.01)
        assert (own.value.value == pytest.approx(2 / STEP, rel=0.01)) is in_time
    assert tuned(cells, objective="goodput", slo=ServiceLevel(tpot=0.0115)).answers[0].gain.value == pytest.approx(
        2, rel=0.01
    )


def test_a_cell_that_cannot_be_believed_sets_no_pace_and_is_in_no_pareto_set(tuned):
    wrong = cell(k=2, speedup=2.0, noise=0.1)
    slow_plain = tuple(
        p if p.mode == "speculative" else q for p, q in zip(wrong.passes, slowed(wrong, 10.0).passes, strict=True)
    )
    cells = [wrong.model_copy(update={"passes": slow_plain}), cell(k=8, speedup=1.5, noise=0.1)]
    answer = tuned(cells).answers[0]
    assert answer.choice.config.k == 8
    assert [c.config.k for c in answer.pareto if c.config] == [8]
    off = next(c for c in answer.ranking if c.config is None)
    assert off.value.value == pytest.approx(1 / STEP)
    assert answer.choice.value.value == pytest.approx(1.5 / STEP, rel=0.01)
    (doubtful,) = [c for c in answer.ranking if c.config and c.config.k == 2]
    assert doubtful.value.value == pytest.approx(2 / STEP, rel=0.01)  # as it was measured


def test_goodput_of_a_cell_whose_plain_requests_came_too_late_is_held_against_those_of_the_others(tuned):
    late = cell(k=2, speedup=2.0, noise=0.1)
    passes = tuple(
        p
        if p.mode == "speculative"
        else p.model_copy(update={"requests": tuple(r.model_copy(update={"ttft_seconds": 9.0}) for r in p.requests)})
        for p in late.passes
    )
    cells = [late.model_copy(update={"passes": passes}), cell(k=8, speedup=0.8, noise=0.1)]
    answer = tuned(cells, objective="goodput", slo=ServiceLevel(ttft=5.0)).answers[0]
    assert answer.choice.config.k == 2
    assert answer.gain.reason is None
    off = next(c for c in answer.ranking if c.config is None)
    assert answer.gain.value == pytest.approx(answer.choice.value.value / off.value.value)


def test_each_suite_has_its_own_answer_beside_the_mix(tuned):
    found = tuned(suites(code=3.0, chat=0.5), mix={"code": 0.9, "chat": 0.1})
    assert [(a.workload, a.choice.config is None) for a in found.answers] == [
        ("code 90%, chat 10%", False),
        ("code", False),
        ("chat", True),
    ]


def test_service_levels_are_read_with_units_and_mistakes_are_refused():
    assert parse_slo("ttft=200ms,tpot=0.02s") == ServiceLevel(0.2, 0.02)
    assert parse_slo("tpot=0.02") == ServiceLevel(None, 0.02)
    for wrong in ("ttft", "ttft=x", "ttft=0", "e2e=1s", "ttft=1s,ttft=2s", "tpot=-1ms", "tpot=nan"):
        with pytest.raises(UsageError):
            parse_slo(wrong)
    for objective, slo in (("goodput", None), ("latency", "ttft=1s"), (None, "ttft=1s"), ("speed", None)):
        with pytest.raises(UsageError):
            parse_objective(objective, slo)


# Pareto set


def test_the_pareto_set_drops_what_is_beaten_in_both():
    assert pareto_set([(1, 5), (3, 3), (2, 2), (5, 1), (3, 3), (4, 1)]) == (3, 1, 0)


def test_plain_decoding_competes_in_the_pareto_set(tuned):
    found = tuned([by_batch(2.0, batch=1), by_batch(0.8, batch=32)]).answers[0]
    assert [(c.config is None, c.batch) for c in found.pareto] == [(True, 32), (False, 1)][::-1]


# Schedule and crossover


def cost_model(batch, k):
    """Verification grows with batch and K; the acceptance is 0.7 at each position."""
    length = sum(0.7**i for i in range(k + 1))
    return length / (1 + 0.05 * k + 0.02 * (batch - 1) * k)


def model_cells(**changes):
    return [
        cell(k=k, batch=b, speedup=cost_model(b, k), noise=0.2, **changes) for b in (1, 4, 16, 64) for k in (1, 2, 4, 8)
    ]


def test_k_falls_with_the_batch_as_the_cost_model_says(tuned):
    (schedule,) = tuned(model_cells()).schedules
    ks = {row.batch: row.k for row in schedule.rows}
    assert ks[64] == 0
    for b in (1, 4, 16):
        best = max((1, 2, 4, 8), key=lambda k: cost_model(b, k))
        assert ks[b] == (best if cost_model(b, best) > 1 else 0)
    assert ks[1] > ks[16] > 0


def test_the_crossover_lies_where_the_cost_model_breaks_even(tuned):
    (schedule,) = tuned(model_cells()).schedules
    # K = 1 is the last to pay: 1.7 / (1.05 + 0.02 (b - 1)) = 1 at b = 33.5.
    assert 16 < schedule.crossover.low <= schedule.crossover.value <= schedule.crossover.high < 64
    assert schedule.crossover.value == pytest.approx(33.5, rel=0.15)
    assert schedule.monotone


def test_a_crossing_is_interpolated_on_log_axes_with_an_interval():
    random = np.random.default_rng(1)
    draws = np.array([2.0, 0.5]) * np.exp(random.normal(0, 0.1, (2000, 1)))
    found = crossing([1, 16], [2.0, 0.5], draws)
    assert found.value == pytest.approx(4.0)
    # log S falls by log 4 over log 16: a shift of 0.196 moves the crossing by a factor of exp(0.39).
    assert found.low == pytest.approx(4 * math.exp(-0.392), rel=0.05)
    assert found.high == pytest.approx(4 * math.exp(0.392), rel=0.05)


def test_a_crossing_outside_the_measured_sizes_is_not_invented():
    wide = np.exp(np.random.default_rng(1).normal(0, 0.2, (500, 2))) * [2.0, 1.1]
    above = crossing([1, 16], [2.0, 1.1], wide)
    assert (above.value, above.pays, above.high) == (None, True, None)
    assert above.low is not None
    assert above.text("batch").startswith("seems to pay at batch 16, the largest looked at, but may stop at ")
    assert (
        Crossing(None, None, None, True, True, 1, 16).text("batch") == "still pays at batch 16, the largest looked at"
    )
    long = Crossing(12345.6, 206.4, None, None, True, 96.25, 65536.0)
    assert long.text("context") == "stops paying at context 12346 (206 to above 65536)"
    never = crossing([1, 16], [0.9, 0.5], None)
    assert (never.value, never.pays, never.known) == (None, False, False)
    assert "does not pay at batch 1" in never.text("batch")


def test_a_speedup_that_comes_back_is_said(tuned):
    (schedule,) = tuned([by_batch(s, batch=b) for b, s in {1: 2.0, 4: 0.8, 16: 1.5}.items()]).schedules
    assert not schedule.monotone


def test_k_0_in_the_loop_is_measured_apart_from_plain_decoding(tuned):
    cells = [by_batch(2.0, batch=1), by_batch(0.5, batch=8)]
    resting = [
        cell(k=0, batch=b, speedup=0.9, rounds=(RoundCount(drafted=0, accepted=0, count=20),), noise=0.1)
        for b in (1, 8)
    ]
    found = tuned([*cells, *resting])
    (schedule,) = found.schedules
    assert [(r.k, round(r.resting.value, 2)) for r in schedule.rows] == [(4, 0.9), (0, 0.9)]
    by_policy = {r.policy: r for r in found.regrets}
    assert by_policy["schedule"].by_batch[8] == 1
    assert by_policy["resting"].by_batch[8] == pytest.approx(0.9, rel=0.01)
    assert found.answers[0].choice.config is None  # and it is no configuration to choose
    assert all(c.config is None or c.config.k > 0 for c in found.answers[0].ranking)


def test_the_context_crossover_needs_contexts_that_differ(tuned):
    found = tuned(model_cells())
    assert all(c.found is None and "too alike" in c.reason for c in found.contexts)


# Regret


def test_regret_of_static_schedule_and_oracle(tuned):
    speeds = {(2, 1): 1.2, (2, 8): 1.1, (8, 1): 2.0, (8, 8): 0.5}
    found = tuned([cell(k=k, batch=b, speedup=s, noise=0.1) for (k, b), s in speeds.items()])
    rows = {r.policy: r for r in found.regrets}
    oracle = 2 / (1 / 2.0 + 1 / 1.1)
    static = 2 / (1 / 1.2 + 1 / 1.1)
    assert rows["oracle"].speedup.value == pytest.approx(oracle, rel=0.01)
    assert rows["static"].what == "draft, K 2"
    assert rows["static"].loss.value == pytest.approx(oracle / static, rel=0.01)
    assert rows["static"].loss.low > 1
    assert rows["schedule"].loss.value == pytest.approx(1.0)
    assert rows["off"].loss.value == pytest.approx(oracle, rel=0.01)


def test_nothing_beats_the_oracle_however_quick_the_machine_was(tuned):
    ratios = {(2, "code"): (2.0, 1.0), (2, "math"): (1.0, 1.0), (8, "code"): (1.99, 1.05), (8, "math"): (1.0, 1.0)}
    found = tuned(
        [
            slowed(cell(k=k, suite=suite, suite_digest=suite, speedup=value, noise=0.1), pace)
            for (k, suite), (value, pace) in ratios.items()
        ]
    )
    assert all(row.loss.value >= 1 - 1e-9 for row in found.regrets)
    # The loop at rest is a way to decode, too.
    resting = tuned([cell(k=0, speedup=1.03, noise=0.01), cell(k=4, speedup=0.9, noise=0.01)])
    assert {row.policy for row in resting.regrets} == {"off", "static", "schedule", "resting", "oracle"}
    assert all(row.loss.value >= 1 - 1e-9 for row in resting.regrets)


def test_the_oracle_may_change_the_drafter_by_suite_and_the_schedule_may_not(tuned):
    cells = []
    for drafter, speeds in {"draft": (2.0, 0.5), "ngram": (0.5, 2.0)}.items():
        for suite, s in zip(("code", "chat"), speeds, strict=True):
            cells.append(cell(drafter=drafter, drafter_digest=drafter, suite=suite, suite_digest=suite, speedup=s))
    rows = {r.policy: r for r in tuned(cells).regrets}
    assert rows["oracle"].speedup.value == pytest.approx(2.0, rel=0.01)
    assert rows["schedule"].speedup.value == pytest.approx(1.0)


# Advice


def rated(k, kept, of=10, **changes):
    """K drafted tokens, all kept in `kept` of `of` rounds and none in the others."""
    rounds = [RoundCount(drafted=k, accepted=k, count=kept)] if kept else []
    return cell(k=k, rounds=(*rounds, RoundCount(drafted=k, accepted=0, count=of - kept)), **changes)


def test_a_weak_draft_is_told_its_own_break_even_beside_the_rule_of_thumb(tuned):
    # A round of 1 + 4·0.1 + 1 plain steps: break-even at AL 2.4, so β = 0.35, and β is 0.2.
    found = tuned([rated(4, 2, cost_ratio=0.1, speedup=1.8 / 2.4)])
    (weak,) = named(found, "draft-too-weak")
    assert (weak.value, weak.threshold) == (pytest.approx(0.2), pytest.approx(0.35))
    assert "T_d/T_t 0.10" in weak.text
    assert "60%" in weak.text
    assert not named(found, "draft-too-big")  # a free one would cost 2 steps for 1.8 tokens


def test_a_big_draft_is_told_what_it_may_cost(tuned):
    # 3 tokens a round; without the draft it costs 1 step, so four steps may cost 0.5 each.
    found = tuned([cell(cost_ratio=0.8, speedup=3 / 4.2)])
    (big,) = named(found, "draft-too-big")
    assert (big.value, big.threshold) == (pytest.approx(0.8), pytest.approx(0.5))


def test_a_draft_that_pays_is_left_alone(tuned):
    found = tuned([cell(speedup=1.5)])
    assert not named(found, "draft-too-weak") + named(found, "draft-too-big")


def test_a_large_batch_is_named_with_the_crossover(tuned):
    found = tuned([by_batch(s, batch=b) for b, s in {1: 2.0, 4: 1.2, 16: 0.6}.items()])
    (advice,) = named(found, "batch-too-large")
    assert advice.value == 16
    assert 4 < advice.threshold < 16


def test_a_k_that_is_too_high_is_named_with_the_better_one(tuned):
    (advice,) = named(tuned([cell(k=2, speedup=1.5), cell(k=8, speedup=1.1)]), "k-too-high")
    assert (advice.value, advice.threshold) == (8, 2)
    assert not named(tuned([cell(k=2, speedup=1.5), cell(k=8, speedup=1.5)]), "k-too-high")


def test_other_vocabularies_are_named_for_draft_models_and_not_for_heads(tuned):
    small = model("x").model_copy(update={"vocab_size": 100})
    changes = {"drafters": {"draft": small, "eagle3:path": small, "ngram": None}}
    found = named(tuned([cell()], **changes), "tokenizers-differ")
    assert [(f.where, f.value, f.threshold) for f in found] == [("draft", 100, 128)]


def test_short_outputs_are_named(tuned):
    short = cell(rounds=(RoundCount(drafted=4, accepted=2, count=5),))
    assert [f.value for f in named(tuned([short]), "outputs-too-short")] == [16]
    assert not named(tuned([cell()]), "outputs-too-short")


def test_tight_memory_and_cells_that_did_not_fit_are_named(tuned):
    plan = MemoryPlan(weight_bytes=20_000_000_000, kv_bytes=2_500_000_000, logits_bytes=1, layer_bytes=1)
    memory = Memory(plan=plan, predicted_bytes=plan.total_bytes, measured_bytes=Reading(value=None, reason="no GPU"))
    full = cell().model_copy(update={"memory": memory})
    gpu = {"device": "cuda:0", "gpus": [{"name": "a card", "memory_bytes": 24_000_000_000}]}
    (tight,) = named(tuned([full], environment=gpu), "memory-tight")
    assert tight.value == pytest.approx(22.5 / 24)
    assert "weights 20.00 GB, key-value caches 2.50 GB" in tight.text
    roomy = {"device": "cuda:0", "gpus": [{"name": "a card", "memory_bytes": 48_000_000_000}]}
    assert not named(tuned([full], environment=roomy), "memory-tight")
    failures = [failed("batch 8 fits", reason="infeasible", batch=16)]
    assert "batch 8 fits" in named(tuned([cell()], failures), "memory-tight")[0].text


def test_context_drift_needs_longer_contexts_that_accept_less(tuned):
    def with_contexts(long_accepts):
        made = cell(prompts=8, noise=0)
        passes = []
        for p in made.passes:
            requests = []
            for i, r in enumerate(p.requests):
                prompt = 1000 if i >= 4 else 10
                rounds = r.rounds
                if p.mode == "speculative" and i >= 4:
                    rounds = (RoundCount(drafted=4, accepted=long_accepts, count=20),)
                tokens = 1 + sum((c.accepted + 1) * c.count for c in rounds)
                requests.append(
                    r.model_copy(update={"prompt_tokens": prompt, "rounds": rounds, "output_tokens": tokens})
                )
            passes.append(p.model_copy(update={"requests": tuple(requests)}))
        return made.model_copy(update={"passes": tuple(passes)})

    (drift,) = named(tuned([with_contexts(1)]), "context-drift")
    assert drift.value == pytest.approx(2 / 3 - 1)
    assert not named(tuned([with_contexts(2)]), "context-drift")


def test_a_throttled_or_noisy_machine_is_named(tuned):
    hot = cell().model_copy(update={"bandwidth": bandwidth(throttle_reasons=("thermal",))})
    assert "thermal" in named(tuned([hot]), "throttled")[0].text
    assert not named(tuned([cell()]), "throttled")
    slow = cell(k=2)
    requests = [
        [r.model_copy(update={"full_seconds": r.full_seconds * 1.5}) for r in p.requests] if p.mode == "plain" else None
        for p in slow.passes
    ]
    passes = tuple(
        p if own is None else p.model_copy(update={"requests": tuple(own)})
        for p, own in zip(slow.passes, requests, strict=True)
    )
    noisy = tuned([slow.model_copy(update={"passes": passes}), cell(k=4)])
    assert named(noisy, "noisy-machine")[0].value > 0.15
    assert noisy.advice[0].name == "noisy-machine"  # with it all others are less sure
    assert not named(tuned([cell(k=2), cell(k=4)]), "noisy-machine")
    # Other prompts are other work, at whatever rate.
    others = tuple(
        p.model_copy(update={"requests": tuple(r.model_copy(update={"id": f"q{r.id}"}) for r in p.requests)})
        for p in slowed(cell(k=4), 1.5).passes
    )
    assert not named(tuned([cell(k=2), cell(k=4).model_copy(update={"passes": others})]), "noisy-machine")
