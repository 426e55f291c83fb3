"""The fast plan: a grid's best cells are found by measuring few of them."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from statistics import harmonic_mean

import pytest
from fake_engine import FakeEngine
from synthetic_run import cell, probe, spec
from test_sweep_session import environment, options  # noqa: F401  (fixtures)

from spectune.engines.engine import Request
from spectune.reporting.summary import summarise
from spectune.speedup.run import load_run
from spectune.sweeping import fast_sweep, session
from spectune.sweeping.cell import RoundCount
from spectune.sweeping.fast_plan import (
    Choice,
    Prediction,
    choose,
    is_worth_it,
    predict,
    prediction_errors,
    probe_places,
    probed_ks,
    second_look,
    survey,
)
from spectune.sweeping.figures import figures
from spectune.sweeping.listener import Silent
from spectune.sweeping.rundir import RunDirectory
from spectune.sweeping.session import run
from spectune.sweeping.summary import as_json, closing
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
    found = survey(GRID, 40, big)
    assert {(s.drafter, s.suite) for s in found} == {(d, s) for d in RATES for s in SUITES}
    big_one = ("good", "math")
    assert [s.batch for s in found if (s.drafter, s.suite) == big_one] == [4]
    assert {s.batch for s in found if (s.drafter, s.suite) != big_one} == {8}
    # The largest K that fits comes before a large batch.
    wide = {s.key for s in GRID if s.batch > 1 and s.k > 6}
    assert {(s.batch, s.k) for s in survey(GRID, 40, wide)} == {(1, 8)}
    assert {(s.batch, s.k) for s in survey(GRID, 40, {s.key for s in GRID if s.k > 6})} == {(8, 6)}
    assert survey(GRID, 40, {s.key for s in GRID}) == ()
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
            *((name, "a", 4, tuple(contexts)) for name in RATES),
        ]
    assert [p.spec.batch for p in found] == [1] * 5 + [16] * 5
    # Where the first suite does not fit, the next one stands in.
    full = {s.key for s in grid if (s.suite, s.batch) == ("a", 16)}
    rest = [(p.drafter, p.spec.suite, p.suites) for p in probe_places(grid, contexts, full) if p.spec.batch == 16]
    assert rest == [
        (None, "b", ("b", "c", "d")),
        (None, "e", ("e",)),
        *((name, "b", ("b", "c", "d", "e")) for name in RATES),
    ]


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


def believed(grid, speedup):
    return {s.key: Prediction(key=s.key, acceptance_length=1.0, speedup=speedup(s)) for s in grid}


def test_where_the_favourite_of_a_scope_disappoints_the_next_one_is_measured_at_all_its_places():
    grid = tuple(spec(drafter=d, batch=b, k=4) for b in (1, 2) for d in ("favourite", "next", "last"))
    predictions = believed(grid, lambda s: {"favourite": 2.0, "next": 1.5, "last": 1.45}[s.drafter])
    measured = {s.key: 1.9 for s in grid if s.drafter == "favourite"}
    assert second_look(grid, predictions, measured) == ()
    measured = {s.key: 1.6 if s.batch == 1 else 1.1 for s in grid if s.drafter == "favourite"}
    assert {(s.drafter, s.batch) for s in second_look(grid, predictions, measured)} == {("next", 1), ("next", 2)}
    measured |= {s.key: 1.5 for s in grid if s.drafter == "next" and s.batch == 2}
    assert {(s.drafter, s.batch) for s in second_look(grid, predictions, measured)} == {("next", 1)}


def test_at_a_suite_and_batch_what_promises_clearly_more_than_the_best_measured_is_looked_at_again():
    grid = tuple(
        spec(drafter=d, suite=s, batch=b, k=4) for s in ("a", "b") for b in (1, 2) for d in ("everywhere", "there")
    )
    measured = {s.key: 2.0 for s in grid if s.drafter == "everywhere"}  # the best of every scope

    def looked_at(there: float):
        def speedup(s):
            return 3.0 if s.drafter == "everywhere" else there if (s.suite, s.batch) == ("a", 1) else 0.1

        return [(s.drafter, s.suite, s.batch) for s in second_look(grid, believed(grid, speedup), measured)]

    assert looked_at(2.05) == []
    assert looked_at(2.2) == [("there", "a", 1)]


def test_what_the_best_drafter_costs_at_rest_is_measured_where_it_has_become_the_best():
    grid = tuple(spec(drafter=d, batch=1, k=k) for d in ("favourite", "next") for k in (0, 4))
    predictions = believed(grid, lambda s: 0.9 if s.k == 0 else {"favourite": 2.0, "next": 1.5}[s.drafter])
    measured = {s.key: 1.2 if s.k else 0.9 for s in grid if s.drafter == "favourite"}
    assert {(s.drafter, s.k) for s in second_look(grid, predictions, measured)} == {("next", 0), ("next", 4)}


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

    def counting(sweep, place, spec, ks):
        calls.append(place)
        return original(sweep, place, spec, ks)

    monkeypatch.setattr(fast_sweep, "_probe", counting)
    with monkeypatch.context() as patch:
        patch.setattr(fast_sweep, "choose", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(Interrupted):
            run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    assert calls
    before = len(calls)
    run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r", resume=True)
    assert len(calls) == before


def test_a_fast_sweep_looks_again_where_its_favourites_disappoint(tmp_path, options, monkeypatch):  # noqa: F811
    original, favourite = fast_sweep.predict, ("large", 8)

    def hopeful(*arguments):
        found = original(*arguments)
        cells = {s.key: s for s in arguments[0]}
        return {
            key: p.model_copy(update={"speedup": 10.0}) if (cells[key].drafter, cells[key].k) == favourite else p
            for key, p in found.items()
        }

    def measured(path):
        return {(r.spec.drafter, r.spec.k, r.spec.batch) for r in RunDirectory(path).results()}

    best = run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    speed = {(r.spec.drafter, r.spec.k, r.spec.batch): figures(r).speedup for r in best.results}
    batches = {batch for _, _, batch in speed}
    everywhere = {(d, k) for d, k, _ in speed if all((d, k, b) in speed for b in batches)}
    winner = max(everywhere, key=lambda c: harmonic_mean([speed[(*c, b)] for b in batches]))
    assert winner != favourite
    monkeypatch.setattr(fast_sweep, "predict", hopeful)
    with monkeypatch.context() as patch:
        patch.setattr(fast_sweep, "second_look", lambda *_: ())
        run(options(**BIG), engine=FakeEngine(), output=tmp_path / "once")
    assert not {(*winner, batch) for batch in batches} <= measured(tmp_path / "once")
    twice = run(options(**BIG), engine=FakeEngine(), output=tmp_path / "twice")
    assert {(*winner, batch) for batch in batches} <= measured(tmp_path / "twice")
    assert len(twice.results) == len(twice.plan) == len(measured(tmp_path / "twice"))
    # An interruption between the looks loses none of them.
    run(options(**BIG), engine=FakeEngine(), output=tmp_path / "once", resume=True)
    assert measured(tmp_path / "once") == measured(tmp_path / "twice")


@pytest.mark.parametrize("becomes", ["an error", "nothing"])
def test_an_interruption_that_a_timed_round_turns_into_something_else_ends_the_sweep(
    tmp_path,
    options,  # noqa: F811
    monkeypatch,
    becomes,
):
    original, calls = fast_sweep._probe, []

    def careless(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            except KeyboardInterrupt:
                if becomes == "an error":
                    raise RuntimeError("error calling function: KeyboardInterrupt") from None
        return original(*arguments)

    monkeypatch.setattr(fast_sweep, "_probe", careless)
    with pytest.raises(Interrupted, match="3 of 3 cells are finished"):
        run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    assert len(calls) == 1


def write_suites(tmp_path, **limits):
    paths = []
    for name, limit in limits.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"prompt": f"{name} {n}", "max_new_tokens": limit}) + "\n" for n in range(4))
        )
        paths.append(str(path))
    return tuple(paths)


def record_of(folder):
    return json.loads((folder / "fast.json").read_text())


def timed(engine):
    return [key for what, key in engine.log if what == "time_rounds"]


def test_a_resume_with_another_suite_predicts_it_and_times_no_round_again(tmp_path, options):  # noqa: F811
    one, other = write_suites(tmp_path, one=40, other=40)
    run(options(**BIG, suites=(one,)), engine=FakeEngine(), output=tmp_path / "r")
    before = record_of(tmp_path / "r")
    engine = FakeEngine()
    run(options(**BIG, suites=(one, other)), engine=engine, output=tmp_path / "r", resume=True)
    after = record_of(tmp_path / "r")
    assert not timed(engine)
    assert (before["grid_cells"], after["grid_cells"]) == (72, 144)
    assert (len(before["predictions"]), len(after["predictions"])) == (72, 144)
    assert {tuple(p["suites"]) for p in after["probes"] if p["drafter"] is None} == {("other",)}
    assert {tuple(p["suites"]) for p in after["probes"] if p["drafter"]} == {()}


def test_suites_that_were_timed_apart_do_not_stand_for_each_other(tmp_path, options):  # noqa: F811
    one, other = write_suites(tmp_path, one=40, other=40)
    wanted = options(**BIG, suites=(one, other))
    run(wanted, engine=FakeEngine(), output=tmp_path / "r")
    record = record_of(tmp_path / "r")
    apart = [p | {"suite": "other", "suites": []} for p in record["probes"] if p["drafter"] is None]
    record["probes"] = [p | {"suites": []} for p in record["probes"]] + apart
    (tmp_path / "r" / "fast.json").write_text(json.dumps(record))
    engine = FakeEngine()
    run(wanted, engine=engine, output=tmp_path / "r", resume=True)
    assert not timed(engine)
    assert {tuple(p["suites"]) for p in record_of(tmp_path / "r")["probes"]} == {()}


def test_a_resume_with_larger_k_times_all_rounds_of_each_place_anew(tmp_path, options):  # noqa: F811
    small = options(**(BIG | {"ks": tuple(range(1, 6))}))
    run(small, engine=FakeEngine(), output=tmp_path / "r")
    assert {p["k"] for p in record_of(tmp_path / "r")["probes"]} == {0, 1, 2, 4, 5}
    engine = FakeEngine()
    run(options(**(BIG | {"ks": tuple(range(1, 17))})), engine=engine, output=tmp_path / "r", resume=True)
    assert len(timed(engine)) == 3 * 4  # batches; three drafters and verification
    after = record_of(tmp_path / "r")["probes"]
    assert {p["k"] for p in after} == {0, 1, 6, 11, 16}
    assert len(after) == 5 * 3 * 4


def test_a_resume_with_more_k_below_the_largest_times_them(tmp_path, options):  # noqa: F811
    drafts = tuple("abcdefghijklm")
    run(options(**(BIG | {"ks": (16,), "drafts": drafts})), engine=FakeEngine(), output=tmp_path / "r")
    assert {p["k"] for p in record_of(tmp_path / "r")["probes"]} == {0, 16}
    engine = FakeEngine()
    run(options(**(BIG | {"ks": (1, 4, 16), "drafts": drafts})), engine=engine, output=tmp_path / "r", resume=True)
    assert len(timed(engine)) == 3 * 14
    assert {p["k"] for p in record_of(tmp_path / "r")["probes"]} == {0, 1, 4, 16}


def test_what_does_not_fit_is_neither_predicted_nor_chosen(tmp_path, options, monkeypatch):  # noqa: F811
    def too_large(load, _):
        large = load.drafter is not None and load.drafter.name == "large"
        return "too large" if large and load.batch == 4 and load.context > 150 else None

    monkeypatch.setattr(session, "infeasible", too_large)
    for name, order in (("short-first", {"short": 40, "long": 200}), ("long-first", {"long": 200, "short": 40})):
        wanted = options(**BIG, suites=write_suites(tmp_path, **order), max_new_tokens=200)
        engine = FakeEngine()
        outcome = run(wanted, engine=engine, output=tmp_path / name)
        record = record_of(tmp_path / name)
        assert len(record["predictions"]) == 144 - 8
        # Where it does not fit on the first suite, it is timed on the next.
        assert ("large", "short", 4) in {(p["drafter"], p["suite"], p["batch"]) for p in record["probes"]}
        # One cell of the place says why.
        assert [(f.spec.drafter, f.spec.suite, f.spec.batch, f.reason) for f in outcome.failures] == [
            ("large", "long", 4, "infeasible")
        ]


def test_a_drafter_whose_output_is_wrong_is_not_predicted_from_it(tmp_path, options):  # noqa: F811
    class Wrong(FakeEngine):
        def run_pass(self, spec, requests, **more):
            self.vary = spec.drafter == "large"
            return super().run_pass(spec, requests, **more)

    run(options(**BIG), engine=Wrong(), output=tmp_path / "r")
    results = RunDirectory(tmp_path / "r").results()
    assert {r.spec.drafter for r in results if r.output_check and r.output_check.verdict == "different"} == {"large"}
    assert len([r for r in results if r.spec.drafter == "large"]) == 1
    assert len(record_of(tmp_path / "r")["predictions"]) == 48


def test_a_cell_of_the_survey_that_fails_is_tried_once_and_the_outcome_counts_what_was_measured(tmp_path, options):  # noqa: F811
    engine = FakeEngine(failures=lambda s: ValueError("no") if s.drafter == "large" else None)
    outcome = run(options(**BIG), engine=engine, output=tmp_path / "r")
    (bad,) = [f.key for f in outcome.failures]
    assert engine.log.count(("warm_up", bad)) == 1
    assert f"fast plan: {len(outcome.results)} of 72 cells measured" in closing(outcome)
    again = FakeEngine()
    run(options(**BIG), engine=again, output=tmp_path / "r", resume=True)
    assert ("speculative", bad) in again.log


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_rounds_that_were_timed_before_an_interruption_are_kept(tmp_path, options, monkeypatch, how):  # noqa: F811
    original, seen = fast_sweep._probe, []

    def third(sweep, place, spec, ks):
        seen.append(place)
        if len(seen) == 3:
            if how == "ctrl-c":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return original(sweep, place, spec, ks)

    monkeypatch.setattr(fast_sweep, "_probe", third)
    with pytest.raises(Interrupted, match="3 of 3 cells are finished"):
        run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    assert len(record_of(tmp_path / "r")["probes"]) == 2 * 5
    engine = FakeEngine()
    run(options(**BIG), engine=engine, output=tmp_path / "r", resume=True)
    assert len(timed(engine)) == 3 * 4 - 2


def test_rounds_are_timed_once_the_survey_is_complete_even_if_another_process_held_a_cell_of_it(
    tmp_path,
    options,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(fast_sweep, "_POLL_SECONDS", 0.05)
    first = run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r", dry_run=True).plan
    directory = RunDirectory(tmp_path / "r")
    held, done = threading.Event(), threading.Event()

    def other():
        with directory.claim(first[1].key) as ours:
            assert ours
            held.set()
            done.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(20)
    threading.Timer(0.5, done.set).start()  # it dies without a result
    engine = FakeEngine()
    outcome = run(options(**BIG), engine=engine, output=tmp_path / "r")
    thread.join()
    names = [what for what, _ in engine.log]
    assert engine.log.index(("speculative", first[1].key)) < names.index("time_rounds")
    assert not outcome.elsewhere
    assert len(record_of(tmp_path / "r")["predictions"]) == 72


def test_processes_that_share_a_run_time_its_rounds_once(tmp_path, options, monkeypatch):  # noqa: F811
    monkeypatch.setattr(fast_sweep, "_POLL_SECONDS", 0.01)

    class Slow(FakeEngine):
        def time_rounds(self, spec, requests, ks, *, drafting):
            time.sleep(0.1)
            return super().time_rounds(spec, requests, ks, drafting=drafting)

    engines = [Slow(pass_seconds=0.002), Slow(pass_seconds=0.002)]
    threads = [
        threading.Thread(
            target=run, args=(options(**BIG),), kwargs={"engine": e, "output": tmp_path / "r", "resume": True}
        )
        for e in engines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(timed(e)) for e in engines) == [0, 12]
    measured = [key for e in engines for what, key in e.log if what == "speculative"]
    assert set(measured) == {r.key for r in RunDirectory(tmp_path / "r").results()}


def test_a_survey_that_runs_out_of_memory_is_made_with_less(tmp_path, options):  # noqa: F811
    def full(spec):
        return MemoryError("out of memory") if spec.drafter == "large" and spec.batch == 4 and spec.k > 5 else None

    outcome = run(options(**BIG), engine=FakeEngine(failures=full), output=tmp_path / "r")
    assert [(f.spec.batch, f.spec.k, f.reason) for f in outcome.failures] == [(4, 8, "oom")]
    assert len(record_of(tmp_path / "r")["predictions"]) == 72
    surveyed = {(r.spec.drafter, r.spec.batch, r.spec.k) for r in outcome.results}
    assert {("ngram", 4, 8), ("small", 4, 8), ("large", 2, 8)} <= surveyed


def test_where_the_largest_k_fits_nowhere_the_next_one_is_surveyed(tmp_path, options, monkeypatch):  # noqa: F811
    monkeypatch.setattr(session, "infeasible", lambda load, _: "too large" if load.k > 7 else None)
    outcome = run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    assert not outcome.failures
    assert len(record_of(tmp_path / "r")["predictions"]) == 63


def test_a_drafter_that_cannot_be_timed_on_one_suite_is_timed_on_another(tmp_path, options):  # noqa: F811
    class Picky(FakeEngine):
        def time_rounds(self, spec, requests, ks, *, drafting):
            if "bad" in spec.suite:
                raise ValueError("no")
            return super().time_rounds(spec, requests, ks, drafting=drafting)

    notes = []
    listener = type("Notes", (Silent,), {"note": lambda self, text: notes.append(text)})()
    wanted = options(**BIG, suites=write_suites(tmp_path, bad=40, good=40))
    run(wanted, engine=Picky(), output=tmp_path / "r", listener=listener)
    record = record_of(tmp_path / "r")
    assert {p["suite"] for p in record["probes"]} == {"good"}
    assert {tuple(p["suites"]) for p in record["probes"] if p["drafter"] is None} == {("bad",)}
    assert len(record["predictions"]) == 144
    assert "no times for ngram, bad, batch 1: ValueError" in "\n".join(notes)


def test_one_bad_time_does_not_end_the_plan(tmp_path, options):  # noqa: F811
    class Spike(FakeEngine):
        def time_rounds(self, spec, requests, ks, *, drafting):
            found = super().time_rounds(spec, requests, ks, drafting=drafting)
            spiked = not drafting and spec.suite == "short" and spec.batch == 2
            return tuple(
                t.model_copy(update={"verify_seconds": t.verify_seconds * 5}) if spiked and t.k == max(ks) else t
                for t in found
            )

    wanted = options(**BIG, suites=write_suites(tmp_path, short=40, long=200), max_new_tokens=200)
    outcome = run(wanted, engine=Spike(), output=tmp_path / "r")
    assert len(record_of(tmp_path / "r")["predictions"]) == 144
    # No forward costs less than a plain one, so no speedup exceeds the acceptance length.
    for p in record_of(tmp_path / "r")["predictions"]:
        assert p["speedup"] <= p["acceptance_length"] * 1.001
    assert outcome.fast


def test_a_place_without_room_for_the_largest_k_is_not_timed_again(tmp_path, options):  # noqa: F811
    class Cramped(FakeEngine):
        def time_rounds(self, spec, requests, ks, *, drafting):
            return super().time_rounds(spec, requests, [k for k in ks if k < 8], drafting=drafting)

    run(options(**BIG), engine=Cramped(), output=tmp_path / "r")
    engine = Cramped()
    run(options(**BIG), engine=engine, output=tmp_path / "r", resume=True)
    assert not timed(engine)


def test_times_are_kept_where_those_for_a_larger_k_cannot_be_had(tmp_path, options):  # noqa: F811
    small = options(**(BIG | {"ks": tuple(range(1, 9))}))
    run(small, engine=FakeEngine(), output=tmp_path / "r")

    class Untimed(FakeEngine):
        def time_rounds(self, spec, requests, ks, *, drafting):
            raise ValueError("no")

    before = record_of(tmp_path / "r")["probes"]
    run(options(**(BIG | {"ks": tuple(range(1, 17))})), engine=Untimed(), output=tmp_path / "r", resume=True)
    assert record_of(tmp_path / "r")["probes"] == before


def test_an_answer_from_an_unfinished_plan_says_so(tmp_path, options, monkeypatch):  # noqa: F811
    def caveats():
        return summarise(tmp_path / "r").caveats

    with monkeypatch.context() as patch:
        patch.setattr(fast_sweep, "choose", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(Interrupted):
            run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    assert "the fast plan of 72 cells has not chosen yet" in caveats()[0]
    seen = []

    def stop(spec):
        seen.append(spec.key)
        return KeyboardInterrupt() if len(set(seen)) > 2 else None

    with pytest.raises(Interrupted):
        run(options(**BIG), engine=FakeEngine(failures=stop), output=tmp_path / "r", resume=True)
    assert "cells are to be measured yet" in caveats()[0]
    run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r", resume=True)
    assert caveats() == ()


def test_what_an_interrupted_plan_had_chosen_is_measured_by_the_next_one(tmp_path, options, monkeypatch):  # noqa: F811
    wanted = options(**BIG)
    surveyed = {s.key for s in run(wanted, engine=FakeEngine(), output=tmp_path / "r", dry_run=True).plan}

    class Stops(FakeEngine):
        def warm_up(self, spec, requests):
            if spec.key not in surveyed:
                raise KeyboardInterrupt
            return super().warm_up(spec, requests)

    with pytest.raises(Interrupted):
        run(wanted, engine=Stops(), output=tmp_path / "r")
    planned = {s.key for s in RunDirectory(tmp_path / "r").info().plan}
    assert len(planned) > len(surveyed)
    # Other times would choose other cells: say, none.
    monkeypatch.setattr(fast_sweep, "choose", lambda *_: Choice((), ()))
    outcome = run(wanted, engine=FakeEngine(), output=tmp_path / "r", resume=True)
    assert not outcome.elsewhere
    assert {r.key for r in outcome.results} == planned


@pytest.mark.parametrize(
    ("field", "value"),
    [("verify_seconds", 0.0), ("verify_seconds", float("nan")), ("error", float("inf")), ("draft_seconds", -1.0)],
)
def test_impossible_times_on_disk_are_measured_anew(tmp_path, options, field, value):  # noqa: F811
    run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    path = tmp_path / "r" / "fast.json"
    record = json.loads(path.read_text())
    record["probes"][0][field] = value
    path.write_text(json.dumps(record))
    engine = FakeEngine()
    run(options(**BIG), engine=engine, output=tmp_path / "r", resume=True)
    assert len(timed(engine)) == 12
    # Without the plain step of its turns a place's times say nothing.
    record = record_of(tmp_path / "r")
    record["probes"] = [p if p["k"] or p["drafter"] else p | {"k": 2} for p in record["probes"]]
    path.write_text(json.dumps(record))
    engine = FakeEngine()
    run(options(**BIG), engine=engine, output=tmp_path / "r", resume=True)
    assert len(timed(engine)) == 3


def test_a_dry_run_tells_the_memory_of_the_largest_cell_and_that_more_will_follow(tmp_path, options):  # noqa: F811
    found = [
        as_json(
            run(
                options(**(BIG | {"batches": (1, 2, 64)}), plan=plan),
                engine=FakeEngine(),
                output=tmp_path / plan,
                dry_run=True,
            )
        )
        for plan in ("fast", "full")
    ]
    assert found[0]["kv_bytes"] == found[1]["kv_bytes"]
    assert "of 72 first" in found[0]["fast"]
    assert found[1]["fast"] is None


def test_json_of_a_fast_sweep_says_what_it_came_to(tmp_path, options):  # noqa: F811
    outcome = run(options(**BIG), engine=FakeEngine(), output=tmp_path / "r")
    assert f"fast plan: {len(outcome.results)} of 72 cells measured" in as_json(outcome)["fast"]


def test_the_best_drafter_of_all_has_its_best_k_measured_at_every_batch():
    grid = [
        spec(drafter=d, suite=suite, batch=b, k=k)
        for suite in ("code", "math")
        for b in (1, 8)
        for d in ("whole", "other")
        for k in (1, 4)
    ]
    speeds = {
        ("whole", 4, 1): 3.0,
        ("whole", 1, 1): 1.0,
        ("whole", 4, 8): 0.9,
        ("whole", 1, 8): 1.2,
        ("other", 4, 8): 1.3,
    }
    exact = {
        s.key: Prediction(key=s.key, acceptance_length=1, speedup=speeds.get((s.drafter, s.k, s.batch), 0.5))
        for s in grid
    }
    chosen = choose(grid, exact, ()).promising
    assert {s.suite for s in chosen if (s.drafter, s.k, s.batch) == ("whole", 1, 8)} == {"code", "math"}
    assert not [s for s in chosen if (s.drafter, s.k, s.batch) == ("other", 1, 1)]


def test_loops_at_rest_do_not_take_the_place_of_the_best_draft_where_none_pays():
    grid = [spec(drafter=d, k=k) for d in ("a", "b", "c") for k in (0, 2, 4)]
    speeds = {0: {"a": 0.97, "b": 0.99, "c": 0.98}, 2: {"a": 0.9, "b": 0.7, "c": 0.6}}
    exact = {
        s.key: Prediction(key=s.key, acceptance_length=1, speedup=speeds.get(s.k, {}).get(s.drafter, 0.5)) for s in grid
    }
    assert {(s.drafter, s.k) for s in choose(grid, exact, ()).promising} == {("a", 2), ("a", 0)}


def test_synthetic_rates_of_positions_are_cut_at_a_smaller_k():
    rates = (0.9, 0.5, 0.1)
    grid = tuple(spec(drafter="good", suite="code", batch=1, k=k, synthetic=rates[:k]) for k in (1, 2, 3))
    counts = {0: 100, 1: 450, 2: 405, 3: 45}
    rounds = tuple(RoundCount(drafted=3, accepted=a, count=n) for a, n in counts.items())
    cells = [cell(drafter="good", suite="code", batch=1, k=3, rounds=rounds, synthetic=rates)]
    places = [s for s in GRID if (s.suite, s.batch, s.drafter) == ("code", 1, "good")]
    found = predict(grid, cells, probes(places))
    assert [found[s.key].acceptance_length for s in grid] == pytest.approx([1.9, 2.35, 2.395], abs=0.005)


@pytest.mark.parametrize("plan", ["fast", "full"])
def test_forced_acceptance_with_the_loop_at_rest_in_the_grid_is_resumed(tmp_path, options, plan):  # noqa: F811
    wanted = options(**(BIG | {"ks": (0, *range(1, 9))}), synthetic_acceptance="3.2", plan=plan)
    planned = run(wanted, engine=FakeEngine(), output=tmp_path / "r").plan
    again = run(wanted, engine=FakeEngine(), output=tmp_path / "r", resume=True)
    assert again.plan == planned == RunDirectory(tmp_path / "r").info().plan
    assert {s.k for s in planned} >= {0, 8}
    assert {s.synthetic for s in planned if s.k == 0} == {None}
    assert len(load_run(tmp_path / "r").cells) == len(planned)


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
