"""Timed rounds: what the fast plan knows of costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_native_engine import engine, spec_of, suite_of  # noqa: F401  (a fixture)

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.generation import RoundTrace
from spectune.decoding.stopping import StopRule
from spectune.engines.round_times import TURNS, Turns, timings
from spectune.suites.prompt import Prompt, Suite


@pytest.fixture
def widths(engine, monkeypatch):  # noqa: F811
    """Rows and tokens of every target forward over all rows."""
    seen = []
    kind = type(engine.loaded.model)
    forward = kind.forward

    def spy(self, ids, *arguments, **options):
        seen.append(tuple(ids.shape))
        return forward(self, ids, *arguments, **options)

    monkeypatch.setattr(kind, "forward", spy)
    return seen


def test_verification_alone_is_timed_at_the_full_width_of_every_k(engine, widths):  # noqa: F811
    spec = spec_of(engine, batch=2)
    requests = engine.render(spec, suite_of("a", "b", "c")).requests
    found = engine.time_rounds(spec, requests, (0, 1, 3), drafting=False)
    assert [(t.k, t.rounds, t.drafted) for t in found] == [(0, TURNS, 0), (1, TURNS, 1), (3, TURNS, 3)]
    rounds = [tokens for rows, tokens in widths if rows == 2]
    assert rounds == [1, 2, 4, 4, 2, 1] * (TURNS // 2)
    assert all(t.verify_seconds > 0 and t.overhead_seconds >= 0 for t in found)


def test_a_drafter_is_timed_at_every_k_and_rests_at_0(engine):  # noqa: F811
    spec = spec_of(engine, batch=2)
    requests = engine.render(spec, suite_of("a", "b")).requests
    none, one, three = engine.time_rounds(spec, requests, (0, 1, 3), drafting=True)
    assert none.draft_seconds < one.draft_seconds < three.draft_seconds
    assert [(t.rounds, t.drafted) for t in (none, one, three)] == [(TURNS, 0), (TURNS, 1), (TURNS, 3)]


def test_what_finds_no_room_in_the_context_is_left_out(engine):  # noqa: F811
    spec = spec_of(engine, batch=1)
    long = engine.render(spec, Suite("s", "test", (Prompt("long", "all", text="w5 " * 58),))).requests
    found = engine.time_rounds(spec, long, (1, 6), drafting=False)
    assert [t.k for t in found] in ([1], [1, 6])
    assert sum(t.rounds for t in found) < 2 * TURNS


def test_every_k_has_its_turn_and_every_other_turn_runs_backwards():
    turns = Turns((1, 2, 4))
    assert turns.largest == 4
    assert [turns.at(4) for _ in turns.order] == [1, 2, 4, 4, 2, 1] * (TURNS // 2)


def test_rounds_stop_where_they_are_told_to(engine):  # noqa: F811
    spec = spec_of(engine, batch=2)
    requests = engine.render(spec, suite_of("a", "b", "c")).requests
    run = engine._decoder(spec, speculative=True).decode(requests, 2, rounds=2)
    assert len(run.trace) == run.target_forwards == 2
    assert len(engine._decoder(spec, speculative=True).decode(requests, 2, rounds=0).trace) == 0


def trace(seconds, *, full=True, drafted=0, drafting=0.0):
    return RoundTrace(
        rows=2 if full else 1,
        full=full,
        drafted=drafted,
        nodes=0,
        emitted=1,
        draft_steps=0,
        context=10.0,
        draft_seconds=drafting,
        verify_seconds=seconds,
        overhead_seconds=0.0,
    )


def test_rounds_with_a_free_slot_do_not_count():
    rounds = [trace(2.0), trace(2.0), trace(0.5, full=False), trace(0.5, full=False)]
    (found,) = timings([1], [1, 1, 1, 1], rounds)
    assert (found.rounds, found.verify_seconds) == (2, 2.0)
    assert timings([1], [1, 1], rounds[2:]) == ()


def test_a_slow_spell_of_whole_turns_is_taken_out():
    order, speeds = Turns((0, 2, 4)).order, (1.0, 1.3, 0.8, 2.0, 1.0, 1.1)
    true = {0: 1.0, 2: 1.2, 4: 2.0}
    rounds = [
        trace(true[k] * speeds[n // 3], drafted=2 * k, drafting=0.1 * k * speeds[n // 3]) for n, k in enumerate(order)
    ]
    found = timings((0, 2, 4), order, rounds)
    first = found[0].verify_seconds
    assert 0.8 < first < 1.3
    for t in found:
        assert t.verify_seconds / first == pytest.approx(true[t.k])
        assert t.draft_seconds / first == pytest.approx(0.1 * t.k)
        assert t.drafted == t.k
        assert t.error == pytest.approx(0.0, abs=1e-9)


def test_the_error_is_that_of_repeated_timings_on_a_machine_that_drifts():
    generator = np.random.default_rng(0)
    ks = (0, 1, 2, 4, 8)
    order, ratios, errors = Turns(ks).order, [], []
    for _ in range(400):
        spells = generator.uniform(0.7, 1.4, TURNS)
        seconds = [(1 + k / 4) * spells[n // len(ks)] * generator.normal(1, 0.05) for n, k in enumerate(order)]
        found = timings(ks, order, [trace(s) for s in seconds])
        errors.append(found[0].error)
        ratios.append(found[2].verify_seconds / found[0].verify_seconds)
    assert np.mean(errors) * 2**0.5 == pytest.approx(np.std(ratios) / np.mean(ratios), rel=0.1)


def test_a_single_turn_has_an_error_too():
    found = timings((0, 1), (0, 1), [trace(1.0), trace(1.5)])
    assert [t.verify_seconds for t in found] == [1.0, 1.5]
    assert all(t.error > 0.05 for t in found)


def test_a_draft_made_ahead_for_another_k_is_not_taken_up(engine):  # noqa: F811
    turns = Turns((1, 3))
    requests = engine.render(spec_of(engine, batch=2), suite_of("a", "b")).requests
    endless = [replace(r, max_new_tokens=50) for r in requests[:2]]
    drafter = engine.built("early-exit:1").drafter
    decoder = Decoder(engine.loaded.model, drafter, DecodeSettings(turns, graphs=True), StopRule(frozenset()))
    run = decoder.decode(endless, 2, rounds=len(turns.order))
    assert [t.drafted for t in run.trace] == [2 * k for k in turns.order]
