"""Decoders that take turns: the same tokens as alone, each on its own clock, side by side all the way."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from conftest import save_tiny
from test_decoder_greedy import with_tokenizer
from test_native_engine import spec_of, suite_of
from test_sweep_measure import StillGauge

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.native import NativeEngine
from spectune.engines.turns import take_turns
from spectune.sweeping.measure import measure_cell


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = with_tokenizer(save_tiny(tmp_path_factory.mktemp("turns"), max_positions=64), 128)
    return NativeEngine(str(folder), dtype="float32", device="cpu")


def counted(done):
    """What a pass counts, without what it times."""
    return [(r.id, r.output_digest, r.rounds, r.finish_reason) for r in done.requests]


@pytest.mark.parametrize("drafter", ["early-exit:1", "ngram", "tree:ngram"])
@pytest.mark.parametrize("batch", [1, 3])
def test_passes_that_take_turns_decode_what_they_decode_alone(engine, drafter, batch):
    spec = spec_of(engine, drafter=drafter, batch=batch, max_new_tokens=16)
    requests = engine.render(spec, suite_of("a", "b", "c", "d")).requests
    alone = [engine.run_pass(spec, requests, mode=m, repeat=0, order=0) for m in ("speculative", "plain")]
    pair = engine.run_pair(spec, requests, modes=("speculative", "plain"), repeat=3, order=6)
    assert [counted(done) for done in pair] == [counted(done) for done in alone]
    assert [(done.mode, done.repeat, done.order) for done in pair] == [("speculative", 3, 6), ("plain", 3, 7)]
    assert [done.target_forwards for done in pair] == [done.target_forwards for done in alone]


def test_a_decoder_does_not_count_the_time_between_its_rounds(engine):
    spec = spec_of(engine, batch=1)
    requests = engine.render(spec, suite_of("a", "b")).requests
    began = time.perf_counter()
    slept = -1  # the last step only hands over the run
    steps = engine._decoder(spec, speculative=True).steps(requests, 1)
    while (step := next(steps, None)) is not None:
        run = step
        time.sleep(0.05)
        slept += 1
    elapsed = time.perf_counter() - began
    assert slept > 4
    assert run.wall_seconds <= elapsed - 0.05 * slept
    assert sum(g.ttft_seconds + g.decode_seconds for g in run.generations) <= run.wall_seconds


def test_a_prefill_that_was_taken_over_counts_as_long_as_it_took(engine, monkeypatch):
    spec = spec_of(engine, batch=2, max_new_tokens=12)
    requests = engine.render(spec, suite_of("a", "b", "c")).requests
    prompts = {len(r.token_ids) for r in requests}
    original = type(engine.loaded.model).forward

    def slow(self, ids, *arguments, **options):
        if ids.shape[0] == 1 and ids.shape[1] in prompts and self is engine.loaded.model and options.get("last_only"):
            time.sleep(0.3)
        return original(self, ids, *arguments, **options)

    monkeypatch.setattr(type(engine.loaded.model), "forward", slow)
    began = time.perf_counter()
    pair = engine.run_pair(spec, requests, modes=("plain", "speculative"), repeat=0, order=0)
    elapsed = time.perf_counter() - began
    for done in pair:
        assert all(r.ttft_seconds >= 0.3 for r in done.requests)
        assert done.wall_seconds >= 0.9
    # Alone, each would have taken all three; a busy machine may lose some of what is saved here.
    assert elapsed < sum(done.wall_seconds for done in pair) - 0.5


def test_a_prefill_is_kept_by_neither_decoder_once_it_was_taken_over(engine):
    requests = engine.render(spec_of(engine), suite_of("a", "b")).requests
    pair = [
        Decoder(engine.loaded.model, drafter, DecodeSettings(KSchedule.constant(2), "greedy"), StopRule(frozenset()))
        for drafter in (None, Reading((1,)))
    ]
    pair[0].peer, pair[1].peer = pair[1], pair[0]
    walks = [decoder.steps(requests, 2) for decoder in pair]
    next(walks[0])
    assert all(slot.prefill is not None for slot in pair[0].slots)
    next(walks[1])
    assert [slot.prefill for decoder in pair for slot in decoder.slots] == [None] * 4


def test_states_of_other_layers_are_not_taken_over(engine):
    """Two drafters that read other layers of the target decode in turns what they decode alone."""
    requests = engine.render(spec_of(engine), suite_of("a", "b", "c")).requests

    def decoders():
        for taps in ((1,), (2,)):
            settings = DecodeSettings(KSchedule.constant(2), "greedy")
            yield Decoder(engine.loaded.model, Reading(taps), settings, StopRule(frozenset()))

    alone, together = list(decoders()), list(decoders())
    for decoder in alone:
        decoder.decode(requests, 2)
    take_turns(together, requests, 2)
    for one, other in zip(alone, together, strict=True):
        assert len(one.drafter.read) == len(other.drafter.read) == 3
        for a, b in zip(one.drafter.read, other.drafter.read, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(together[0].drafter.read[0], together[1].drafter.read[0])


class Reading:
    """Drafts nothing, but keeps the states of every prompt."""

    device = torch.device("cpu")

    def __init__(self, taps):
        self.taps, self.read = taps, []

    def start(self, rows, capacity): ...

    def admit(self, index, row, states):
        self.read.append(states.clone())

    def propose(self, round_):
        return None

    def keep(self, rows, kept): ...

    def move(self, source, destination): ...


class Scripted:
    """Stands for a decoder: its rounds emit what the script says."""

    def __init__(self, emits, log):
        self.emits, self.log, self.on_round = emits, log, None

    def steps(self, requests, batch, *, room):
        for n in self.emits:
            self.log.append((self, n))
            self.on_round(self, SimpleNamespace(emitted=n))
            yield self


@pytest.mark.parametrize("quick", [[3, 1, 3, 5], [5, 5, 1, 1], [12]])
def test_neither_of_two_decoders_runs_ahead_of_the_other(quick):
    log, told = [], []
    slow, fast = Scripted([1] * 12, log), Scripted(quick, log)
    assert take_turns([slow, fast], [], 1, on_tokens=told.append) == [slow, fast]
    assert sum(told) == 24
    emitted = {slow: 0, fast: 0}
    for who, n in log:
        other = fast if who is slow else slow
        assert emitted[who] <= emitted[other] or emitted[other] == 12
        emitted[who] += n


def test_a_cell_on_a_cpu_is_measured_in_turns_and_one_with_recordings_is_not(engine, monkeypatch):
    asked = []
    for name in ("run_pass", "run_pair"):
        real = getattr(engine, name)

        def spied(*args, name=name, real=real, **more):
            asked.append(name)
            return real(*args, **more)

        monkeypatch.setattr(engine, name, spied)
    for graphs, names in ((False, ["run_pair"] * 2), (True, ["run_pass"] * 4)):
        asked.clear()
        spec = spec_of(engine, graphs=graphs, repeats=2)
        result = measure_cell(engine, spec, engine.render(spec, suite_of("a", "b", "c")), gauge=StillGauge())
        assert asked == names
        assert [p.order for p in result.passes] == [0, 1, 2, 3]
        assert result.output_check.verdict == "identical"
