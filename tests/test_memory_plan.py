"""The memory plan: what it predicts, against tensors that exist, and what a sweep does with a cell that cannot fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import CPU
from decoding_helpers import drafter_of, random_prompts, requests_of
from fake_engine import FakeEngine, model
from synthetic_run import spec

from spectune.decoding.cache import KVStore
from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.loading import load
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.sweeping import session
from spectune.sweeping.cell import Sampling
from spectune.sweeping.memory import Device, infeasible, load_of, plan_memory
from spectune.sweeping.options import SweepOptions
from spectune.sweeping.session import run
from spectune.sweeping.summary import as_json, as_text, closing


def store_bytes(store: KVStore) -> int:
    return sum(b.nbytes for buffers in (store.keys, store.values) for b in buffers.values())


def test_weights_and_caches_are_the_tensors_that_exist(tiny, other_folder):
    draft = load(str(other_folder), device=CPU, dtype=tiny.model.model.dtype)
    requests = requests_of(random_prompts(4), 12)
    held = []
    drafter = drafter_of(tiny, str(other_folder))
    decoder = Decoder(tiny.model, drafter, DecodeSettings(KSchedule.constant(3)), StopRule())
    decoder.on_round = lambda d, _: held.append(store_bytes(d.store) + store_bytes(drafter.store))
    decoder.decode(requests, 3)
    beside = []  # plain decoding, which takes turns with it on a CPU
    plain = Decoder(tiny.model, None, DecodeSettings(KSchedule.constant(3)), StopRule())
    plain.on_round = lambda d, _: beside.append(store_bytes(d.store))
    plain.decode(requests, 3)
    cell = spec(k=3, batch=3, max_new_tokens=12)
    load_ = load_of(cell, requests, tiny.info, {"draft": draft.info})
    plan = plan_memory(load_)
    assert plan.kv_bytes == max(held) + max(beside)
    assert plan_memory(replace(load_, takes_turns=False)).kv_bytes == max(held)
    assert plan.weight_bytes == sum(p.numel() * 4 for m in (tiny, draft) for p in m.model.model.parameters())


def loaded(**changes):
    cell = spec(**{"k": 4, "batch": 8, "max_new_tokens": 12} | changes)
    requests = requests_of(random_prompts(1, lengths=(100,)), 28)
    return load_of(cell, requests, model("target"), {"draft": model("draft"), "part": model("p", digest="t/p")})


def test_sampling_holds_more_than_greedy_and_filters_more_still():
    def logits(**sampling):
        return plan_memory(loaded(sampling=Sampling(**sampling), rule="speculative")).logits_bytes

    assert plan_memory(loaded()).logits_bytes == 8 * 5 * 128 * 4
    assert logits() < logits(temperature=1.0) < logits(temperature=1.0, top_p=0.9)


def test_a_draft_on_another_device_and_layers_of_the_target_take_nothing():
    target = model("t", digest="t")
    requests = requests_of(random_prompts(1), 4)
    alone = plan_memory(load_of(spec(), requests, target, {"draft": None}))
    for draft in (model("p", digest="t/part"), model("d").model_copy(update={"device": "cuda:0"})):
        plan = plan_memory(load_of(spec(), requests, target, {"draft": draft}))
        assert (plan.weight_bytes, plan.kv_bytes) == (alone.weight_bytes, alone.kv_bytes)


def test_what_does_not_fit_names_the_largest_batch_and_context_that_do():
    load = loaded()
    needed = plan_memory(load).total_bytes
    assert infeasible(load, Device("gpu", needed, 1.0)) is None
    assert infeasible(load, Device("gpu", None, 0.9)) is None
    message = infeasible(load, Device("gpu", needed - 1, 1.0))
    assert "batch 7 fits at context 128" in message
    assert "context 127 fits at batch 8" in message
    assert "are needed" in message
    assert "no batch and no context" in infeasible(load, Device("gpu", load.weight_bytes, 1.0))


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "fingerprint", lambda device: {"device": device})
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"prompt {n}"}) + "\n" for n in range(4)))
    return lambda **changes: SweepOptions(
        **{"suites": (str(path),), "ks": (4,), "drafts": ("small",), "peak_bandwidth": 100.0} | changes
    )


def test_a_cell_that_cannot_fit_is_not_run_and_says_what_would(tmp_path, options, monkeypatch):
    # 4.4 MB of weights; a row's two caches take 145 kB.
    monkeypatch.setattr(session, "total_memory", lambda device: 6_000_000)
    engine = FakeEngine()
    outcome = run(options(batches=(1, 64)), engine=engine, output=tmp_path / "r")
    assert [r.spec.batch for r in outcome.results] == [1]
    (failure,) = outcome.failures
    assert (failure.spec.batch, failure.reason) == (64, "infeasible")
    assert "fits at context" in failure.message
    assert failure.key not in {key for _, key in engine.log}
    assert "infeasible" in closing(outcome)
    memory = outcome.results[0].memory
    assert memory.predicted_bytes == memory.plan.total_bytes
    assert memory.measured_bytes.value is None
    assert "cpu" in memory.measured_bytes.reason


def test_the_fraction_is_settable_and_a_dry_run_shows_the_plan(options, monkeypatch):
    monkeypatch.setattr(session, "total_memory", lambda device: 6_000_000)
    text = as_text(run(options(batches=(1, 64)), engine=FakeEngine(), dry_run=True))
    assert "memory  cpu has 6.0 MB; cells may fill 90%" in text
    assert text.count("does not fit") == 1
    tight = run(options(memory_fraction=0.5), engine=FakeEngine(), dry_run=True)
    assert "does not fit" in as_text(tight)
    assert as_json(tight)["memory"]
