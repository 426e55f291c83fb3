"""Layer skip: the names, single blocks left out of the written-out forward, and searched sets read from a folder."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import load_tiny, save_tiny
from decoding_helpers import decode, random_prompts, reference, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from test_adapter import save
from test_decoder_cache import assert_prefix_equals_prefill

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.layer_skip import Skip, parse_skip, read_skip, skip_of, skipped_model
from spectune.decoding.lean import LeanModel
from spectune.decoding.loading import weight_bytes_per_step
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.stopping import StopRule
from spectune.errors import UsageError
from spectune.sweeping.cell import Sampling


def skip(attention=(), mlp=()) -> Skip:
    return Skip(frozenset(attention), frozenset(mlp))


@pytest.mark.parametrize(
    ("text", "attention", "mlp"),
    [
        ("3", {3}, {3}),
        ("12-15", {12, 13, 14, 15}, {12, 13, 14, 15}),
        ("a3", {3}, set()),
        ("m7", set(), {7}),
        ("a2-4,m4", {2, 3, 4}, {4}),
        ("12-15,a3,m7", {3, 12, 13, 14, 15}, {7, 12, 13, 14, 15}),
    ],
)
def test_names_of_layers_and_blocks(text, attention, mlp):
    assert parse_skip("layer-skip:" + text, text) == skip(attention, mlp)


@given(st.frozensets(st.integers(0, 40)), st.frozensets(st.integers(0, 40)))
def test_the_shortest_name_of_a_set_names_that_set(attention, mlp):
    whole = Skip(attention, mlp)
    if attention or mlp:
        assert parse_skip("layer-skip", str(whole)) == whole
        assert len(whole.parts) == len(set(whole.parts))


@pytest.mark.parametrize("text", ["", "x", "b3", "3,", "a", "3-", "-3", "a3-a5", "3 4", "²", "123456", "1.5"])
def test_what_names_no_layers_is_refused_by_name(text):
    with pytest.raises(UsageError, match="needs a whole number"):
        parse_skip(f"layer-skip:{text}", text)


def test_a_range_that_runs_backwards_is_refused():
    with pytest.raises(UsageError, match="'5-3' runs backwards"):
        parse_skip("layer-skip:5-3", "5-3")


def test_a_searched_set_is_read_from_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "found"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"spectune_head": "layer-skip", "skip": ["12-13", "a3", 7]}))
    expected = skip({3, 7, 12, 13}, {7, 12, 13})
    assert read_skip(folder) == expected
    assert skip_of("layer-skip:found", str(folder)) == expected
    monkeypatch.chdir(tmp_path)
    assert skip_of("layer-skip:found", "found") == expected
    assert skip_of("layer-skip:12,a3", "12,a3") == skip({3, 12}, {12})


@pytest.mark.parametrize("config", [{}, {"spectune_head": "exit"}, {"spectune_head": "layer-skip", "skip": []}])
def test_a_folder_without_a_set_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="lists no layers"):
        read_skip(tmp_path)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return load_tiny(save_tiny(tmp_path_factory.mktemp("four"), num_hidden_layers=4, initializer_range=0.3))


def by_hand(loaded, ids: torch.Tensor, left_out: Skip) -> torch.Tensor:
    """Logits of transformers' own model in which the outputs of the blocks are replaced by zeros."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(loaded.model.model.name_or_path).eval()
    for number, layer in enumerate(model.model.layers):
        if number in left_out.attention:
            for parameter in layer.self_attn.o_proj.parameters():
                parameter.data.zero_()
        if number in left_out.mlp:
            layer.mlp.down_proj.weight.data.zero_()
    with torch.inference_mode():
        return model(ids).logits


SETS = [skip({1}), skip(mlp={2}), skip({1, 3}, {0, 3}), skip({0, 1, 2, 3}), skip(mlp={0, 1, 2, 3}), skip({2}, {2})]


@pytest.mark.parametrize("left_out", SETS, ids=str)
def test_a_skipped_block_adds_nothing(four, left_out):
    ids = torch.tensor(random_prompts(1, lengths=(30,)))
    model = skipped_model(four.model, left_out)
    with torch.inference_mode():
        actual = model.forward(ids, Step(0, (0,), 30, ids.device), KVStore(1, 30))
    torch.testing.assert_close(actual, by_hand(four, ids, left_out), atol=2e-4, rtol=2e-4)


def test_the_target_is_not_touched(four):
    ids = torch.tensor(random_prompts(1, lengths=(12,)))
    step = Step(0, (0,), 12, ids.device)
    with torch.inference_mode():
        before = four.model.forward(ids, step, KVStore(1, 12))
        for left_out in SETS:
            skipped_model(four.model, left_out)
        after = four.model.forward(ids, step, KVStore(1, 12))
    assert torch.equal(before, after)
    assert sum(p.numel() for p in four.model.model.parameters()) == four.info.parameters


def drafter_without(loaded, left_out: Skip) -> ModelDrafter:
    vocab = loaded.model.vocab_size
    return ModelDrafter(
        skipped_model(loaded.model, left_out), shared_vocab=vocab, target_vocab=vocab, shares_target_cache=True
    )


@pytest.mark.parametrize(("k", "batch"), [(1, 1), (4, 3)])
@pytest.mark.parametrize("left_out", SETS, ids=str)
def test_drafting_with_skipped_blocks_leaves_output_and_cache_the_targets(four, left_out, k, batch):
    prompts = random_prompts(4)
    expected = [reference(four, p, 20) for p in prompts]

    def check(decoder, _trace) -> None:
        for index, slot in enumerate(decoder.slots):
            assert_prefix_equals_prefill(decoder.target, decoder.store, index, slot.row.tokens[:-1])

    run = decode(four, drafter_without(four, left_out), prompts, k=k, batch=batch, max_new_tokens=20, on_round=check)
    assert tokens_of(run) == expected
    sampling = Sampling(temperature=0.9)
    plain = decode(four, None, prompts, k=0, batch=2, max_new_tokens=20, sampling=sampling)
    run = decode(
        four, drafter_without(four, left_out), prompts, k=k, batch=batch, max_new_tokens=20, rule="match",
        sampling=sampling,
    )  # fmt: skip
    assert tokens_of(run) == tokens_of(plain)


def test_a_block_that_adds_nothing_anyway_can_be_skipped_without_a_rejection(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path, num_hidden_layers=4, initializer_range=0.3))
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    model.model.layers[2].mlp.down_proj.weight.data.zero_()
    model.save_pretrained(tmp_path)
    loaded = load_tiny(tmp_path)
    run = decode(
        loaded, drafter_without(loaded, skip({1}, {2})), random_prompts(3), k=4, batch=2, max_new_tokens=40,
        stop=StopRule(),
    )  # fmt: skip
    assert all(r.accepted == r.drafted for g in run.generations for r in g.rounds)


def test_weight_bytes_count_what_still_runs(four):
    whole = weight_bytes_per_step(four.model.model)
    attention, mlp, norm = 64 * (64 + 64 + 32 + 32), 3 * 64 * 96, 64
    cases = [
        (skip({1}), attention + norm),
        (skip(mlp={1}), mlp + norm),
        (skip({1}, {1}), attention + mlp + 2 * norm),
        (skip({1, 2}, {2, 3}), 2 * (attention + mlp + 2 * norm)),
    ]
    for left_out, missing in cases:
        model = skipped_model(four.model, left_out)
        assert weight_bytes_per_step(model.model) == whole - 4 * missing
        assert sum(p.numel() for p in model.model.parameters()) == four.info.parameters - missing


def test_layers_the_target_lacks_and_empty_remains_are_refused(four):
    with pytest.raises(UsageError, match="layer 4 cannot be skipped"):
        skipped_model(four.model, skip(mlp={4}))
    with pytest.raises(UsageError, match="every layer"):
        skipped_model(four.model, skip(range(4), range(4)))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "phi3"])
def test_models_without_a_written_out_forward_skip_whole_layers_and_refuse_blocks(name, tmp_path):
    loaded = load_tiny(save(name, tmp_path))
    assert not isinstance(loaded.model, LeanModel)
    with pytest.raises(UsageError, match="whole layers only, not a1"):
        skipped_model(loaded.model, skip({0, 1}, {0}))
    prompts = random_prompts(2)
    run = decode(loaded, drafter_without(loaded, skip({1}, {1})), prompts, k=3, batch=2)
    assert tokens_of(run) == [reference(loaded, p, 24) for p in prompts]


@pytest.mark.parametrize("name", ["llama-tied", "mistral", "qwen2-window", "qwen3"])
def test_every_family_with_a_written_out_forward_skips_blocks(name, tmp_path):
    loaded = load_tiny(save(name, tmp_path))
    left_out = skip({1}, {2})
    ids = torch.tensor(random_prompts(1, lengths=(30,)))
    with torch.inference_mode():
        actual = skipped_model(loaded.model, left_out).forward(ids, Step(0, (0,), 30, ids.device), KVStore(1, 30))
    torch.testing.assert_close(actual, by_hand(loaded, ids, left_out), atol=3e-4, rtol=3e-4)
