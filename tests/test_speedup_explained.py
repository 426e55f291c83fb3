"""What explains a speedup: waterfall, i.i.d. model, both rates with their K, a run's latency, the predicted K."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from synthetic_run import cell, rounds_of, write_run

from spectune.reporting.summary import fit_document, summarise
from spectune.speedup.latency import planned_k, run_surfaces
from spectune.speedup.models import fit
from spectune.speedup.profile import profile
from spectune.speedup.waterfall import STEPS, waterfall
from spectune.sweeping.cell import RoundCount

FIXED, KV, TOKEN = 6e-3, 2e-6, 1e-3  # seconds: fixed, per cached token, per batched token
DRAFT_STEP = 1e-3


def geometric_rounds(k, alpha=0.8, of=10_000):
    """Counts of an i.i.d. drafter."""
    exactly = [alpha**i * (1 - alpha) for i in range(k)] + [alpha**k]
    return tuple(RoundCount(drafted=k, accepted=i, count=round(of * share)) for i, share in enumerate(exactly))


def timed(made, *, step, verify, context):
    """The cell with other times of a plain step and of a verification."""
    passes = []
    for p in made.passes:
        mean = step if p.mode == "plain" else verify
        changed = {"verify_mean": mean, "verify_median": mean, "mean_context": context}
        if p.mode == "speculative":
            changed |= {
                "draft_mean": made.spec.k * DRAFT_STEP,
                "overhead_mean": 0.5e-3,
                "verified_nodes_mean": float(made.spec.k),
            }
        passes.append(p.model_copy(update={"times": p.times.model_copy(update=changed)}))
    return made.model_copy(update={"passes": tuple(passes)})


def surfaced(ks=(1, 2, 4, 6), batches=(1, 4, 8), contexts=(100.0, 300.0)):
    """Cells on two suites of different lengths, all timed by one linear surface."""

    def seconds(b, q, c):
        return FIXED + KV * b * c + TOKEN * b * q

    return [
        profile(
            timed(
                cell(k=k, batch=b, suite=f"s{c:.0f}", rounds=geometric_rounds(k)),
                step=seconds(b, 1, c),
                verify=seconds(b, k + 1, c),
                context=c,
            )
        )
        for c in contexts
        for b in batches
        for k in ks
    ]


def test_the_waterfall_ends_at_the_measured_speedup_and_its_factors_multiply_up_to_it():
    found = waterfall(
        profile(cell(k=4, rounds=rounds_of((4, 4), (4, 2)), cost_ratio=0.1, verify=1.2, speedup=1.8, noise=0))
    )
    reached = {s.name: s.speedup for s in found.steps}
    assert list(reached) == list(STEPS)
    assert reached["ideal"] == 5
    assert reached["acceptance"] == 4
    assert reached["draft"] == pytest.approx(4 / 1.4)
    assert reached["verify"] == pytest.approx(4 / 1.6)
    assert reached["overhead"] == pytest.approx(1.8, rel=1e-6)
    assert reached["measured"] == pytest.approx(1.8, rel=1e-6)
    assert prod(s.factor for s in found.steps if s.factor is not None) * reached["ideal"] == pytest.approx(
        1.8, rel=1e-6
    )
    assert reached["batch"] is None


def test_the_waterfall_shows_what_a_larger_batch_costs():
    alone = profile(cell(k=4, batch=1, verify=1.0, speedup=2.0, noise=0))
    crowded = profile(cell(k=4, batch=8, verify=2.5, speedup=0.9, noise=0))
    steps = {s.name: s for s in fit([alone, crowded]).predictions[1].waterfall.steps}
    assert steps["verify"].speedup == pytest.approx(3 / (0.4 + 1.0))  # as at batch 1
    assert steps["batch"].factor < 0.6
    assert steps["measured"].speedup == pytest.approx(0.9, rel=1e-6)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (cell(timed=False), "a time of the round"),
        (cell(identical=False), "differ from plain decoding"),
    ],
)
def test_a_waterfall_without_its_times_or_its_speedup_says_why(made, reason):
    found = waterfall(profile(made))
    assert found.steps == ()
    assert reason in found.reason


def test_the_iid_model_is_exact_for_an_iid_drafter_without_other_costs():
    cells = [
        profile(
            cell(
                k=k,
                rounds=geometric_rounds(k),
                cost_ratio=0.1,
                noise=0,
                speedup=(1 - 0.8 ** (k + 1)) / 0.2 / (1 + 0.1 * k),
            )
        )
        for k in (1, 2, 4, 8)
    ]
    found = fit(cells)
    assert found.curves[0].geometric.alpha == pytest.approx(0.8, abs=1e-3)
    assert found.curves[0].constant.rejected
    assert found.iid.rmse < 0.01
    assert found.curves[0].extra_steps == pytest.approx(0, abs=0.01)


def test_counted_and_fitted_rate_stand_beside_their_k():
    found = fit([profile(cell(k=k, rounds=geometric_rounds(k))) for k in (1, 2, 4)])
    for prediction, k in zip(found.predictions, (1, 2, 4), strict=True):
        assert prediction.drafted_per_round == k
        assert prediction.counted_rate == pytest.approx((1 - 0.8**k) * 0.8 / 0.2 / k, abs=1e-3)
        assert prediction.fitted_rate == pytest.approx(prediction.counted_rate, abs=0.01)


def test_a_drafter_that_stops_early_is_judged_by_the_tokens_it_drafted():
    found = fit([profile(cell(k=8, rounds=(RoundCount(drafted=2, accepted=2, count=10),)))])
    assert found.predictions[0].drafted_per_round == 2
    assert found.predictions[0].counted_rate == 1.0


def test_an_overhead_of_a_whole_step_is_named_where_the_plain_formula_is_poor():
    """0.9 accepted and still slower than the formula: (1 + βK)/(1 + 0.1·K + 1.0), T_d/T_t = 0.1."""
    cells = [
        profile(
            cell(
                k=k,
                rounds=rounds_of(*[(k, k)] * 9, (k, 0)),
                cost_ratio=0.1,
                noise=0,
                speedup=(1 + 0.9 * k) / (2 + 0.1 * k),
            )
        )
        for k in (1, 2, 4, 8)
    ]
    found = fit(cells)
    assert found.card.poor
    assert found.iid.poor
    assert not found.full.poor
    assert found.curves[0].extra_steps == pytest.approx(1.0, abs=0.01)
    for prediction in found.predictions:
        overhead = {s.name: s.factor for s in prediction.waterfall.steps}["overhead"]
        assert overhead < 0.7


def test_a_runs_passes_give_back_the_targets_surface():
    found = run_surfaces(surfaced())
    best = found.target.best
    assert best.form == "linear"
    values = {c.name: c.value for c in best.coefficients}
    assert values == {
        "fixed": pytest.approx(FIXED, rel=0.01),
        "kv": pytest.approx(KV, rel=0.01),
        "token": pytest.approx(TOKEN, rel=0.01),
    }
    assert list(found.drafts) == ["draft"]


def test_the_predicted_k_falls_with_the_batch_and_is_that_of_the_cost_model():
    profiles = surfaced()
    surfaces = run_surfaces(profiles)
    planned = [planned_k(c, surfaces, profiles) for c in fit(profiles).curves if c.suite == "s100"]

    def speedup(k, b):
        length = (1 - 0.8 ** (k + 1)) / 0.2
        fixed = FIXED + KV * b * 100
        return length * (fixed + TOKEN * b) / (k * DRAFT_STEP + fixed + TOKEN * b * (k + 1) + 0.5e-3)

    for p in planned:
        best = max(range(1, 14), key=lambda k: speedup(k, p.batch))
        assert speedup(p.optimum.k, p.batch) >= 0.99 * speedup(best, p.batch)
        assert p.optimum.speedup == pytest.approx(speedup(p.optimum.k, p.batch), rel=0.02)
        assert p.optimum.k in p.optimum.flat
    assert planned[0].optimum.k > planned[-1].optimum.k


def test_no_k_is_predicted_beyond_twice_the_widest_forward_even_where_that_is_narrower_than_k():
    profiles = surfaced()
    surfaces = run_surfaces(profiles)
    best = surfaces.target.best
    narrow = replace(best, ranges=(best.ranges[0], (1.0, 1.9), best.ranges[2]))  # q = 3.8 at most, so K = 2
    held = replace(surfaces, target=replace(surfaces.target, best=narrow))
    (planned, *_) = [planned_k(c, held, profiles) for c in fit(profiles).curves]
    assert planned.optimum.k == 2


def test_without_an_identifiable_part_no_k_is_predicted_and_the_reason_is_given():
    one = [profile(cell(k=4))]
    assert "fewer than two numbers" in planned_k(fit(one).curves[0], run_surfaces(one), one).reason
    flat = [profile(cell(k=k, rounds=geometric_rounds(k))) for k in (1, 2, 4)]
    reason = planned_k(fit(flat).curves[0], run_surfaces(flat), flat).reason
    assert reason.startswith("the target's latency is not identifiable")


def test_zero_drafts_and_zero_times_are_not_identifiable_instead_of_nonsense():
    nothing = [profile(cell(k=k, rounds=(RoundCount(drafted=0, accepted=0, count=9),))) for k in (1, 2)]
    found = fit(nothing)
    assert found.curves[0].constant is None
    assert found.curves[0].geometric is None
    assert all(p.iid is None and p.fitted_rate is None and p.counted_rate is None for p in found.predictions)
    untimed = [profile(cell(k=k, timed=False)) for k in (1, 2, 4)]
    assert run_surfaces(untimed).target.best is None
    assert fit(untimed).predictions[0].iid is None


def test_the_document_of_a_run_holds_every_new_number(tmp_path):
    cells = [p.cell for p in surfaced()]
    document = fit_document(summarise(write_run(tmp_path / "run", cells)))
    assert document["latency"]["target"]["best"]["form"] == "linear"
    assert document["positions"][0]["found"]["positions"][0]["conditional"]["value"] == pytest.approx(0.8, abs=1e-3)
    assert document["planned_k"][0]["optimum"]["k"] >= 1
    first = document["predictions"][0]
    assert first["acceptance_length"]["value"] == pytest.approx(1.8, abs=1e-3)
    assert [s["name"] for s in first["waterfall"]["steps"]] == list(STEPS)
    assert document["models"]["iid"]["cells"] == len(cells)
