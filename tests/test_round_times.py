"""Timed rounds: what the fast plan knows of costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_native_engine import engine, spec_of, suite_of  # noqa: F401  (a fixture)

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.generation import RoundTrace
from spectune.decoding.stopping import StopRule
from spectune.engines.round_times import BLOCK, Blocks, timings
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
    assert [(t.k, t.rounds) for t in found] == [(0, 2 * BLOCK), (1, 2 * BLOCK), (3, 2 * BLOCK)]
    rounds = [tokens for rows, tokens in widths if rows == 2]
    assert rounds == [k + 1 for k in (0, 1, 3, 3, 1, 0) for _ in range(BLOCK)]
    assert all(t.verify_seconds > 0 and t.overhead_seconds >= 0 for t in found)


def test_a_drafter_is_timed_at_every_k_and_rests_at_0(engine):  # noqa: F811
    spec = spec_of(engine, batch=2)
    requests = engine.render(spec, suite_of("a", "b")).requests
    none, one, three = engine.time_rounds(spec, requests, (0, 1, 3), drafting=True)
    assert none.draft_seconds < one.draft_seconds < three.draft_seconds
    assert (none.rounds, one.rounds, three.rounds) == (6, 6, 6)


def test_what_finds_no_room_in_the_context_is_left_out(engine):  # noqa: F811
    spec = spec_of(engine, batch=1)
    long = engine.render(spec, Suite("s", "test", (Prompt("long", "all", text="w5 " * 58),))).requests
    found = engine.time_rounds(spec, long, (1, 6), drafting=False)
    assert [t.k for t in found] in ([1], [1, 6])
    assert sum(t.rounds for t in found) < 4 * BLOCK


def test_blocks_run_forwards_and_back():
    blocks = Blocks((1, 2))
    assert [blocks.at(4) for _ in blocks.order] == [1] * 3 + [2] * 6 + [1] * 3
    assert blocks.largest == 2


def test_rounds_stop_where_they_are_told_to(engine):  # noqa: F811
    spec = spec_of(engine, batch=2)
    requests = engine.render(spec, suite_of("a", "b", "c")).requests
    run = engine._decoder(spec, speculative=True).decode(requests, 2, rounds=2)
    assert len(run.trace) == run.target_forwards == 2
    assert len(engine._decoder(spec, speculative=True).decode(requests, 2, rounds=0).trace) == 0


def test_rounds_with_a_free_slot_do_not_count():
    def trace(seconds, *, full):
        return RoundTrace(
            rows=2 if full else 1,
            full=full,
            drafted=0,
            nodes=0,
            emitted=1,
            draft_steps=0,
            context=10.0,
            draft_seconds=0.0,
            verify_seconds=seconds,
            overhead_seconds=0.0,
        )

    rounds = [trace(2.0, full=True), trace(2.0, full=True), trace(0.5, full=False), trace(0.5, full=False)]
    (found,) = timings([1, 1, 1, 1], rounds)
    assert (found.rounds, found.verify_seconds) == (2, 2.0)
    assert timings([1, 1], rounds[2:]) == ()


def test_a_draft_made_ahead_for_another_k_is_not_taken_up(engine):  # noqa: F811
    blocks = Blocks((1, 3))
    requests = engine.render(spec_of(engine, batch=2), suite_of("a", "b")).requests
    endless = [replace(r, max_new_tokens=50) for r in requests[:2]]
    drafter = engine.built("early-exit:1").drafter
    decoder = Decoder(engine.loaded.model, drafter, DecodeSettings(blocks, graphs=True), StopRule(frozenset()))
    run = decoder.decode(endless, 2, rounds=len(blocks.order))
    assert [t.drafted for t in run.trace] == [2 * k for k in blocks.order]
