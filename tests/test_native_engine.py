"""The native engine: rendering, repeated prompts, and memory that is given back."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
from conftest import save_tiny
from test_decoder_greedy import with_tokenizer

from spectune.decoding import verification
from spectune.decoding.decoder import Decoder
from spectune.engines.native import NativeEngine
from spectune.errors import UsageError
from spectune.suites.prompt import Prompt, Suite
from spectune.sweeping.cell import CellSpec


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = with_tokenizer(save_tiny(tmp_path_factory.mktemp("native"), max_positions=64), 128)
    return NativeEngine(str(folder), dtype="float32", device="cpu")


def spec_of(engine, **changes) -> CellSpec:
    settings = {
        "target": engine.target.name,
        "target_digest": engine.target.digest,
        "drafter": "early-exit:1",
        "drafter_digest": "x",
        "suite": "s",
        "suite_digest": "d",
        "k": 2,
        "batch": 3,
        "rule": "greedy",
        "max_new_tokens": 8,
        "chat_template": None,
        "dtype": "float32",
        "device": "cpu",
        "draft_device": "cpu",
    }
    return CellSpec(**(settings | changes))


def suite_of(*ids: str) -> Suite:
    return Suite("s", "test", tuple(Prompt(i, "all", text=f"w{n + 5} w9") for n, i in enumerate(ids)))


def test_repeated_prompts_keep_their_prompts_name_whatever_it_is(engine):
    rendered = engine.render(spec_of(engine, batch=4), suite_of("a", "a#2", "b#1"))
    ids = [r.id for r in rendered.requests]
    assert len(set(ids)) == len(ids) >= 4
    done = engine.run_pass(spec_of(engine, batch=4), rendered.requests, mode="plain", repeat=0, order=0)
    assert [r.prompt_id for r in done.requests] == ["a", "a#2", "b#1"] * 2


def test_prompts_that_fill_the_context_are_left_out_and_named(engine):
    suite = Suite("s", "test", (Prompt("long", "all", text="w5 " * 70), Prompt("short", "all", text="w5")))
    rendered = engine.render(spec_of(engine, batch=1), suite)
    assert [r.id for r in rendered.requests] == ["short"]
    assert rendered.notes == ("long: left out, 70 prompt tokens fill the context of 64",)
    with pytest.raises(UsageError, match="no prompt that fits"):
        engine.render(spec_of(engine), Suite("s", "test", suite.prompts[:1]))


@pytest.mark.parametrize("mode", ["plain", "speculative"])
def test_full_rounds_are_counted_by_request_and_by_pass_alike(engine, mode):
    spec = spec_of(engine, batch=2)
    requests = engine.render(spec, suite_of("a", "b c", "d")).requests
    done = engine.run_pass(spec, requests, mode=mode, repeat=0, order=0)
    assert sum(r.full_rounds for r in done.requests) == 2 * done.times.rounds > 0
    for r in done.requests:
        assert r.full_rounds <= sum(c.count for c in r.rounds)
        assert mode == "speculative" or r.full_rounds == r.full_tokens
    # Three prompts for two slots: somebody decoded alone.
    assert sum(r.full_rounds for r in done.requests) < sum(c.count for r in done.requests for c in r.rounds)


def test_a_finished_pass_keeps_no_cache_alive(engine):
    spec = spec_of(engine)
    requests = engine.render(spec, suite_of("a", "b", "c")).requests
    alive: list[weakref.ref] = []
    decoder = engine._decoder(spec, speculative=True)
    decoder.on_round = lambda d, _: alive.append(weakref.ref(d.store.keys[0]))
    decoder.decode(requests, 3)
    gc.collect()
    assert alive
    assert not any(ref() is not None for ref in alive)


def recorded_pass(engine, **changes):
    spec = spec_of(engine, graphs=True, **changes)
    requests = engine.render(spec, suite_of("a", "b", "c", "d")).requests
    return engine.run_pass(spec, requests, mode="speculative", repeat=0, order=0)


def test_a_pass_in_which_something_was_recorded_is_made_again(engine, monkeypatch):
    runs = []
    steps = Decoder.steps

    def counted(self, *arguments, **options):
        runs.append(self.captures)
        return steps(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "steps", counted)
    recorded_pass(engine)
    assert len(runs) == 2
    recorded_pass(engine)
    assert len(runs) == 3  # all was recorded by then
    recorded_pass(engine, k=3)
    assert len(runs) == 5  # another cell has recordings of its own
    engine.release()


def test_recorded_passes_give_the_same_outputs_and_release_drops_their_caches(engine):
    spec = spec_of(engine)
    requests = engine.render(spec, suite_of("a", "b", "c", "d")).requests
    plain = engine.run_pass(spec, requests, mode="speculative", repeat=0, order=0)
    assert [r.output_digest for r in recorded_pass(engine).requests] == [r.output_digest for r in plain.requests]
    stores = [weakref.ref(store) for store in engine._recordings[1]._stores.values()]
    assert stores
    engine.release()
    gc.collect()
    assert [store() for store in stores] == [None] * len(stores)


def test_what_cannot_be_recorded_is_called_and_told(engine, monkeypatch):
    accept = verification.accept

    def asking(logits, *arguments):
        assert logits.sum().item() is not None
        return accept(logits, *arguments)

    monkeypatch.setattr(verification, "accept", asking)
    assert recorded_pass(engine).target_forwards > 0
    (why,) = engine.unrecorded()
    assert "item" in why
    engine.release()
    assert engine.unrecorded() == ()


def test_a_warm_up_on_a_cpu_prefills_little_and_one_with_recordings_all(engine, monkeypatch):
    prefilled = []
    decode = Decoder.decode

    def spied(self, requests, *args, **more):
        prefilled.append([len(r.token_ids) for r in requests])
        return decode(self, requests, *args, **more)

    monkeypatch.setattr(Decoder, "decode", spied)
    suite = Suite("s", "test", (Prompt("long", "all", text="w5 " * 40), Prompt("short", "all", text="w5")))
    for graphs, longest in ((False, 16), (True, 40)):
        prefilled.clear()
        spec = spec_of(engine, batch=2, k=3, graphs=graphs)
        engine.warm_up(spec, engine.render(spec, suite).requests)
        assert prefilled == [[longest, 1], [longest, 1]]  # plain, speculative


def test_without_recordings_what_is_warm_is_not_warmed_again(engine, monkeypatch):
    warmed = []
    decode = Decoder.decode

    def spied(self, requests, batch, **more):
        warmed.append((type(self.drafter).__name__, batch, self.settings.schedule.largest))
        return decode(self, requests, batch, **more)

    widths = []
    forward = type(engine.loaded.model).forward

    def watched(self, ids, *args, last_only=False):
        if self is engine.loaded.model and not warmed:
            widths.append(tuple(ids.shape))
        return forward(self, ids, *args, last_only=last_only)

    monkeypatch.setattr(Decoder, "decode", spied)
    monkeypatch.setattr(type(engine.loaded.model), "forward", watched)
    exits = type(engine.built("early-exit:1").drafter).__name__
    lookup = type(engine.built("ngram").drafter).__name__
    new = [(7, width) for width in range(1, 6)]  # of the target's forwards
    for changes, forwards, decoded in (
        ({}, new, [("NoneType", 7, 4), (exits, 7, 4)]),
        ({"suite": "other"}, [], []),
        ({"k": 3}, [], [(exits, 7, 3)]),
        ({"k": 5}, [(7, 6)], [(exits, 7, 5)]),
        ({"drafter": "ngram"}, [], [(lookup, 7, 4)]),
        ({"batch": 8}, [(8, width) for _, width in new], [("NoneType", 8, 4), (exits, 8, 4)]),
        ({"graphs": True}, [], [("NoneType", 7, 4), (exits, 7, 4)]),
        ({"graphs": True, "suite": "other"}, [], [("NoneType", 7, 4), (exits, 7, 4)]),
    ):
        warmed.clear()
        widths.clear()
        spec = spec_of(engine, **({"batch": 7, "k": 4} | changes))
        engine.warm_up(spec, engine.render(spec, suite_of("a", "b")).requests)
        assert (widths, warmed) == (forwards, decoded), changes


def test_release_drops_the_recordings_of_a_pass_that_failed(engine):
    spec = spec_of(engine, graphs=True, drafter="early-exit:1")
    requests = engine.render(spec, suite_of("a", "b", "c")).requests

    def fail(*_):
        raise RuntimeError("out of memory")

    def attempt():
        decoder = engine._decoder(spec, speculative=True)
        decoder.on_round = fail
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.decode(requests, 3)

    attempt()
    stores = [weakref.ref(s) for s in engine._recordings[1]._stores.values()]
    assert stores
    engine.release()
    gc.collect()
    assert [ref() for ref in stores] == [None] * len(stores)


def test_recordings_of_the_cell_before_are_freed_at_once(engine):
    gc.collect()
    gc.disable()  # what is only in a cycle stays
    try:
        recorded_pass(engine)
        old = weakref.ref(engine._recordings[1])
        recorded_pass(engine, k=3)
        assert old() is None
    finally:
        gc.enable()
        engine.release()


def test_a_warm_up_that_failed_is_made_again(engine, monkeypatch):
    calls, steps = [], Decoder.steps

    def failing(self, *arguments, **options):
        calls.append(self.drafter is not None)
        if len(calls) == 2:
            raise RuntimeError("once")
        return steps(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "steps", failing)
    spec = spec_of(engine, batch=9, k=4)
    requests = engine.render(spec, suite_of("a", "b")).requests
    with pytest.raises(RuntimeError, match="once"):
        engine.warm_up(spec, requests)
    calls.clear()
    engine.warm_up(spec, requests)
    assert calls == [True]  # plain decoding was warm


def test_a_warm_up_drafts_even_where_the_first_token_ends_a_row(engine, monkeypatch):
    monkeypatch.setattr(engine, "loaded", replace(engine.loaded, stop_ids=frozenset(range(128))))
    drafter, asked = engine.built("early-exit:1").drafter, []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda r: asked.append(1) or propose(r))
    spec = spec_of(engine, batch=10, k=4)
    engine.warm_up(spec, engine.render(spec, suite_of("a", "b")).requests)
    assert asked
