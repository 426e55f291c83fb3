"""The fast plan: a grid's best cells are found by measuring few of them."""

from __future__ import annotations

import json
import random

import pytest
from fake_engine import FakeEngine
from synthetic_run import cell, probe, spec
from test_sweep_session import environment, options  # noqa: F401  (fixtures)

from spectune.engines.engine import Request
from spectune.sweeping import fast_sweep, session
from spectune.sweeping.cell import RoundCount
from spectune.sweeping.fast_plan import (
    Prediction,
    choose,
    is_worth_it,
    predict,
    prediction_errors,
    probe_places,
    probed_ks,
    survey,
)
from spectune.sweeping.session import run
from spectune.sweeping.summary import closing
from spectune.sweeping.sweep import Interrupted

KS, BATCHES, SUITES = range(1, 9), (1, 2, 4, 8), ("code", "math")
RATES = {"good": 0.8, "fair": 0.6, "poor": 0.3}  # chance that a token is kept
COSTS = {"good": 0.30, "fair": 0.08, "poor": 0.01}  # T_d / T_t
CONTEXTS = {"code": 400.0, "math": 100.0}
GRID = tuple(spec(drafter=d, suite=s, batch=b, k=k) for s in SUITES for b in BATCHES for d in RATES for k in KS)


def rate(drafter: str, suite: str) -> float:
    return RATES[drafter] * (1.0 if suite == "code" else 0.8)


def true_length(drafter: str, suite: str, k: int) -> float:
    return sum(rate(drafter, suite) ** i for i in range(k + 1))


def step(batch: int) -> float:
    return 0.01 * (1 + 0.05 * batch)


def round_seconds(drafter: str, batch: int, k: int) -> float:
    return step(batch) * (1 + COSTS[drafter] * k + 0.01 * batch * k)


def true_speedup(s) -> float:
    return true_length(s.drafter, s.suite, s.k) * step(s.batch) / round_seconds(s.drafter, s.batch, s.k)


def surveyed(grid=GRID, rounds: int = 100_000):
    """Survey cells whose counts follow the rates exactly."""
    cells = []
    for s in survey(grid, 40):
        r = rate(s.drafter, s.suite)
        shares = [r**i * (1 - r) for i in range(s.k)] + [r**s.k]
        counts = tuple(
            RoundCount(drafted=s.k, accepted=i, count=max(1, round(rounds * share))) for i, share in enumerate(shares)
        )
        cells.append(cell(drafter=s.drafter, suite=s.suite, batch=s.batch, k=s.k, rounds=counts))
    return cells


def verification(batch: int, k: int) -> float:
    return step(batch) * (1 + 0.01 * batch * k)


def probes(grid=GRID, noise=lambda: 1.0, error=0.0):
    found = []
    for place in probe_places(grid, CONTEXTS):
        spell = noise()  # the machine is as fast as this while a place is probed
        for k in probed_ks(grid):
            batch, suite, name = place.spec.batch, place.spec.suite, place.drafter
            own = 0.0 if name is None else step(batch) * COSTS[name] * k
            slow = spell * noise()
            found.append(probe(name, batch, k, verification(batch, k) * slow, suite, own * slow, error=error))
    return found


def test_the_survey_is_one_cell_per_drafter_and_suite_at_the_largest_k():
    found = survey(GRID, 40)
    assert {(s.drafter, s.suite) for s in found} == {(d, s) for d in RATES for s in SUITES}
    assert {(s.batch, s.k) for s in found} == {(8, 8)}
    trees = survey(tuple(spec(drafter="tree:small", k=k) for k in KS), 40)
    assert [s.k for s in trees] == [1, 8]


def test_the_survey_takes_the_largest_batch_that_the_prompts_fill_and_that_fits():
    assert {s.batch for s in survey(GRID, 7)} == {4}
    assert {s.batch for s in survey(GRID, 1)} == {1}
    big = {s.key for s in GRID if s.batch == 8 and s.drafter == "good" and s.suite == "math"}
    assert {s.batch for s in survey(GRID, 40, big)} == {4}
    assert {s.batch for s in survey(GRID, 40, {s.key for s in GRID})} == {1}
    only_large = tuple(s for s in GRID if s.batch == 8)
    assert {s.batch for s in survey(only_large, 3)} == {8}  # prompts are repeated there


def test_verification_is_timed_once_for_suites_of_similar_contexts_and_drafting_on_the_first():
    contexts = {"a": 100.0, "b": 201.0, "c": 200.0, "d": 390.0, "e": 100.0}
    grid = [spec(drafter=d, suite=s, batch=b, k=k) for s in contexts for b in (16, 1) for d in RATES for k in (0, 4, 8)]
    found = probe_places(grid, contexts)
    for batch in (1, 16):
        here = [(p.drafter, p.spec.suite, p.spec.k, p.suites) for p in found if p.spec.batch == batch]
        assert here == [
            (None, "a", 4, ("a", "c", "e")),
            (None, "b", 4, ("b", "d")),
            *((name, "a", 4, ()) for name in RATES),
        ]
    assert [p.spec.batch for p in found] == [1] * 5 + [16] * 5
    # Where the first suite does not fit, the next one stands in.
    full = {s.key for s in grid if (s.suite, s.batch) == ("a", 16)}
    rest = [(p.drafter, p.spec.suite, p.suites) for p in probe_places(grid, contexts, full) if p.spec.batch == 16]
    assert rest == [(None, "b", ("b", "c", "d")), (None, "e", ("e",)), *((name, "b", ()) for name in RATES)]


def test_predictions_follow_a_known_cost_model_at_every_k_and_batch():
    found = predict(GRID, surveyed(), probes())
    assert len(found) == len(GRID)
    for s in GRID:
        assert found[s.key].acceptance_length == pytest.approx(true_length(s.drafter, s.suite, s.k), rel=0.02)
        assert found[s.key].speedup == pytest.approx(true_speedup(s), rel=0.03)


def test_with_noisy_times_the_chosen_cells_hold_one_within_3_percent_of_the_best():
    hits = total = 0
    for seed in range(40):
        generator = random.Random(seed)
        found = predict(GRID, surveyed(), probes(noise=lambda g=generator: g.gauss(1, 0.03), error=0.03))
        measured = {s.key for s in survey(GRID, 40)}
        chosen = {s.key for s in choose(GRID, found, measured).promising} | measured
        for suite in SUITES:
            for batch in BATCHES:
                here = [s for s in GRID if (s.suite, s.batch) == (suite, batch)]
                best = max(map(true_speedup, here))
                hits += max(true_speedup(s) for s in here if s.key in chosen) >= 0.97 * best
                total += 1
    assert hits / total >= 0.95


def test_the_best_static_configuration_of_every_batch_and_suite_and_of_all_is_measured_at_all_its_places():
    places = [(suite, batch) for suite in SUITES for batch in BATCHES]
    at_rest = [spec(drafter=d, suite=suite, batch=batch, k=0) for suite, batch in places for d in RATES]
    grid = (*GRID, *at_rest)

    def speedup(drafter, k, place):
        """Each place has its own best, which is slow elsewhere; so have each batch, each suite and all."""
        if k == 0:
            return 1.6
        if drafter == "good":  # by its arithmetic mean the best of a batch, too
            return 4.0 if k == places.index(place) + 1 else 0.9
        if drafter == "fair" and k <= 4:
            return 2.0 if place[1] == BATCHES[k - 1] else 0.5
        if drafter == "fair" and k <= 6:
            return 1.9 if place[0] == SUITES[k - 5] else 0.5
        return 1.5 if (drafter, k) == ("poor", 8) else 0.5

    exact = {
        s.key: Prediction(key=s.key, acceptance_length=1.0, speedup=speedup(s.drafter, s.k, (s.suite, s.batch)))
        for s in grid
    }
    expected = {("good", k, place) for number, place in enumerate(places, 1) for k in (number, 0)}
    expected |= {("fair", k, place) for place in places for k in range(1, 7) if speedup("fair", k, place) > 1}
    expected |= {("poor", 8, place) for place in places}
    chosen = choose(grid, exact, ()).promising
    assert len(chosen) == len(expected)
    assert {(s.drafter, s.k, (s.suite, s.batch)) for s in chosen} == expected


def test_close_cells_that_are_measured_anyway_leave_room_for_fewer_others():
    grid = tuple(spec(drafter=d, batch=b, k=4) for b in (1, 2) for d in ("best", "second", "third", "everywhere"))
    here = {"best": 2.0, "second": 1.99, "third": 1.98, "everywhere": 1.97}
    there = {"best": 1.0, "second": 1.0, "third": 1.0, "everywhere": 1.97}
    exact = {
        s.key: Prediction(key=s.key, acceptance_length=1.0, speedup=(here if s.batch == 1 else there)[s.drafter])
        for s in grid
    }
    chosen = choose(grid, exact, ()).promising
    assert {s.drafter for s in chosen if s.batch == 1} == {"best", "everywhere", "second"}
    assert {s.drafter for s in chosen if s.batch == 2} == {"everywhere"}
    again = choose(grid, exact, {chosen[0].key})
    assert again.promising == chosen[1:]
    assert not {s.key for s in again.checks} & {s.key for s in chosen}


def test_a_configuration_that_is_not_predicted_everywhere_is_no_static_choice():
    def prediction(s):
        return Prediction(key=s.key, acceptance_length=1.0, speedup={"good": 3.0, "fair": 2.0, "poor": 1.0}[s.drafter])

    # Batch 8 does not fit at all, the good drafter not at batch 4.
    partly = {s.key: prediction(s) for s in GRID if s.batch < 4 or (s.batch == 4 and s.drafter != "good")}
    chosen = choose(GRID, partly, ()).promising
    fair = {(s.suite, s.batch) for s in chosen if s.drafter == "fair"}
    assert fair == {(suite, batch) for suite in SUITES for batch in (1, 2, 4)}
    assert {s.batch for s in chosen if s.drafter == "good"} == {1, 2}


def test_a_drafter_without_survey_or_times_is_not_predicted():
    cells = [c for c in surveyed() if c.spec.drafter != "good"]
    times = [p for p in probes() if p.drafter != "fair" or p.batch != 4]
    found = predict(GRID, cells, times)
    assert {s.key for s in GRID if s.key not in found} == {
        s.key for s in GRID if s.drafter == "good" or (s.drafter == "fair" and s.batch == 4)
    }


def test_checks_are_cells_that_nothing_else_measures():
    found = predict(GRID, surveyed(), probes())
    measured = {s.key for s in survey(GRID, 40)}
    chosen = choose(GRID, found, measured)
    keys = [s.key for s in (*chosen.promising, *chosen.checks)]
    assert len(keys) == len(set(keys))
    assert not measured & set(keys)
    assert len(chosen.checks) == 4


@pytest.mark.parametrize(("cells", "checks"), [(48, 3), (192, 4), (288, 6), (768, 6)])
def test_a_larger_grid_has_more_checks_but_six_at_most(cells, checks):
    grid = tuple(spec(drafter=str(d), k=k) for d in range(cells // 8) for k in KS)
    exact = {s.key: Prediction(key=s.key, acceptance_length=1.0, speedup=1.0) for s in grid}
    assert len(choose(grid, exact, ()).checks) == checks


def test_errors_are_relative_to_what_was_measured():
    found = predict(GRID, surveyed(), probes())
    first = GRID[0]
    errors = prediction_errors({first.key: found[first.key]}, {first.key: found[first.key].speedup / 1.1})
    assert errors == pytest.approx([0.1])
    assert prediction_errors(found, {first.key: None}) == []


def test_a_small_grid_is_measured_whole():
    assert is_worth_it(GRID, 6)
    assert not is_worth_it(GRID, 150)
    # 0.6 of 192 cells, less 2 at each of 8 places and 4 checks
    assert is_worth_it(GRID, 95)
    assert not is_worth_it(GRID, 96)
    assert not is_worth_it(tuple(spec(drafter=d, k=k) for d in RATES for k in (2, 4)), 3)


BIG = {"ks": tuple(range(1, 9)), "batches": (1, 2, 4), "drafts": ("ngram", "small", "large")}


def test_a_fast_sweep_measures_a_part_and_says_so_and_resumes_to_the_same(tmp_path, options):  # noqa: F811
    outcome = run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    assert 10 < len(outcome.results) == len(outcome.plan) < 0.6 * 72
    assert "of 72 cells measured" in closing(outcome)
    record = json.loads((tmp_path / "r" / "fast.json").read_text())
    assert record["grid_cells"] == 72
    assert len(record["predictions"]) == 72
    assert {(p["drafted"] - p["k"], p["error"]) for p in record["probes"]} == {(0, 0.01)}
    engine = FakeEngine()
    again = run(options(**BIG), engine=engine, output=tmp_path / "r", resume=True)
    assert {r.key for r in again.results} == {r.key for r in outcome.results}
    assert not [call for call in engine.log if call[0] in ("plain", "speculative")]


def test_a_fast_sweep_probes_what_fits_and_one_of_two_suites_with_similar_contexts(tmp_path, options, monkeypatch):  # noqa: F811
    suites = []
    for name, limit in (("first", 40), ("like", 50), ("longer", 200)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"prompt": f"{name} {n}", "max_new_tokens": limit}) + "\n" for n in range(4))
        )
        suites.append(str(path))
    monkeypatch.setattr(session, "infeasible", lambda load, _: "too large" if load.batch == 4 else None)
    wanted = options(**BIG, suites=tuple(suites), max_new_tokens=200)
    run(wanted, engine=FakeEngine(), output=tmp_path / "r")
    record = json.loads((tmp_path / "r" / "fast.json").read_text())
    verified = {(p["suite"], *p["suites"]) for p in record["probes"] if p["drafter"] is None}
    assert verified == {("first", "like"), ("longer",)}
    assert {p["suite"] for p in record["probes"] if p["drafter"]} == {"first"}
    assert {p["batch"] for p in record["probes"]} == {1, 2}
    assert len(record["predictions"]) == 3 * 2 * 8 * 3  # suites, batches, K, drafts


def test_an_interrupted_fast_sweep_goes_on_without_timing_again(tmp_path, options, monkeypatch):  # noqa: F811
    calls = []
    original = fast_sweep._probe

    def counting(sweep, place, ks):
        calls.append(place)
        return original(sweep, place, ks)

    monkeypatch.setattr(fast_sweep, "_probe", counting)
    with monkeypatch.context() as patch:
        patch.setattr(fast_sweep, "choose", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(Interrupted):
            run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    assert calls
    before = len(calls)
    run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r", resume=True)
    assert len(calls) == before


def test_the_full_plan_measures_all(tmp_path, options):  # noqa: F811
    outcome = run(options(**BIG, plan="full"), engine=FakeEngine(), output=tmp_path / "r")
    assert len(outcome.results) == 72
    assert outcome.fast is None


def test_a_dry_run_names_what_is_measured_first(tmp_path, options):  # noqa: F811
    outcome = run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r", dry_run=True)
    assert len(outcome.plan) == 3
    assert "of 72" in outcome.fast


def test_the_loop_at_rest_is_surveyed_nowhere_and_measured_for_the_best_draft_of_each_place():
    grid = tuple(spec(drafter=s.drafter, suite=s.suite, batch=s.batch, k=k) for s in GRID if s.k == 1 for k in range(9))
    trees = tuple(spec(drafter="tree:ngram", k=k, batch=b) for k in (0, 4, 8) for b in range(1, 20))
    assert {s.k for s in survey(grid, 40)} == {8}
    assert {s.k for s in survey(trees, 40)} == {4, 8}
    assert survey([s for s in grid if s.k == 0], 40) == ()
    assert not is_worth_it(grid, 0)
    assert probed_ks(grid) == probed_ks(GRID) == (0, 1, 3, 6, 8)
    predictions = predict(grid, surveyed(grid), probes(grid))
    for s in grid:
        if s.k == 0:
            assert predictions[s.key].speedup == pytest.approx(1.0)
            assert predictions[s.key].acceptance_length == 1
    chosen = choose(grid, predictions, {s.key for s in survey(grid, 40)}).promising
    for place in {(s.suite, s.batch) for s in grid}:
        here = [s for s in grid if (s.suite, s.batch) == place]
        best = max(here, key=lambda s: predictions[s.key].speedup)
        assert [s.drafter for s in chosen if (s.suite, s.batch) == place and s.k == 0] == [best.drafter]


def test_probed_prompts_are_spread_over_the_lengths():
    requests = [Request(f"p{n}", tuple(range(1, n + 2)), 8, 0) for n in (9, 1, 5, 3, 7, 8)]
    assert [len(r.token_ids) - 1 for r in fast_sweep._typical(requests, 1)] == [7]
    assert [len(r.token_ids) - 1 for r in fast_sweep._typical(requests, 3)] == [3, 7, 9]
    assert len(fast_sweep._typical(requests[:2], 4)) == 4
