"""Models of a shape with random weights, targets grown from a draft, and the tokenizer of models without text."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import CPU, load_tiny
from decoding_helpers import decode, drafter_of, random_prompts, tokens_of

from spectune.decoding.grown import parse_grown
from spectune.decoding.hash_tokenizer import HashTokenizer
from spectune.decoding.loading import load
from spectune.decoding.random_weights import on_meta
from spectune.decoding.shapes import SHAPES, shape_config
from spectune.errors import UsageError
from spectune.suites.load import load_suite
from spectune.suites.render import render
from spectune.sweeping.cell import Sampling

TINY = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MOE = TINY | {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def named(config: dict) -> str:
    return f"shape:{json.dumps(config)}"


def load_shape(name: str, dtype: torch.dtype = torch.float32):
    return load(name, device=CPU, dtype=dtype)


# Parameters as counted from the published checkpoints, a tied head once.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_shape_has_as_many_parameters_as_the_public_model(name):
    model = on_meta(name, shape_config(f"shape:{name}"), torch.bfloat16)
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("config", [TINY, MOE], ids=["llama", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shape_loads_with_finite_logits_and_says_that_its_weights_are_random(config, dtype):
    loaded = load_shape(named(config), dtype)
    assert loaded.info.weights == "random"
    assert loaded.info.dtype == str(dtype).removeprefix("torch.")
    assert loaded.stop_ids == frozenset()
    assert loaded.info.activation_bytes_per_token > 0


def test_equal_shapes_have_equal_weights_and_other_shapes_other_digests():
    first, again = load_shape(named(TINY)), load_shape(named(TINY))
    other = load_shape(named(TINY | {"num_hidden_layers": 3}))
    assert first.info.digest == again.info.digest != other.info.digest
    assert torch.equal(first.model.embedding, again.model.embedding)


def test_what_is_computed_from_the_configuration_survives_the_meta_device():
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = SHAPES["llama-3.2-1b"]["rope_parameters"]
    made = load_shape(named(TINY | {"rope_parameters": rope}))
    settings = {k: v for k, v in TINY.items() if k != "model_type"} | {"rope_parameters": dict(rope)}
    usual = LlamaForCausalLM(LlamaConfig(**settings))
    assert torch.equal(made.model.model.model.rotary_emb.inv_freq, usual.model.rotary_emb.inv_freq)


def test_a_shape_can_come_from_a_file_or_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for name in (f"shape:{tmp_path}", f"shape:{tmp_path / 'config.json'}"):
        assert shape_config(name) == TINY


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shape:llama-3.1-9b", "no shape 'llama-3.1-9b'"),
        ("shape:", "no shape ''"),
        ("shape:/nowhere/config.json", "No such file"),
        ("shape:{nonsense", "is no JSON"),
        ('shape:{"hidden_size": 4}', 'no "model_type"'),
        ('shape:{"model_type": "no-such-model"}', "cannot build"),
        ('shape:{"model_type": "llama", "hidden_size": "wide"}', "cannot build"),
    ],
)
def test_a_shape_that_cannot_be_made_is_wrong_use_in_one_line(name, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_shape(name)
    assert "\n" not in str(caught.value)


def test_an_unknown_shape_names_the_known_ones():
    with pytest.raises(UsageError) as caught:
        shape_config("shape:llama-3.1-9b")
    assert all(name in caught.value.hint for name in SHAPES)
    assert "did you mean shape:llama-3.1-" in caught.value.hint


def test_a_shape_with_more_weights_than_free_memory_is_refused_before_any_is_made(monkeypatch):
    from spectune.decoding import random_weights

    monkeypatch.setattr(random_weights, "free_memory", lambda device: 100_000_000_000)
    with pytest.raises(UsageError, match=r"141\.1 GB of weights in bfloat16, and cpu has 100\.0 GB free"):
        load_shape("shape:llama-3.1-70b", torch.bfloat16)


def test_shapes_of_another_vocabulary_do_not_draft_for_each_other():
    target = load_shape(named(TINY))
    with pytest.raises(UsageError, match="vocabularies have 64 and 128 tokens"):
        drafter_of(target, named(TINY | {"vocab_size": 64}))


@pytest.mark.parametrize("draft", ["eagle:shape", "eagle3:shape", "medusa:shape", "tree:eagle3:shape", "early-exit:1"])
@pytest.mark.parametrize("config", [TINY | {"num_hidden_layers": 4}, MOE], ids=["llama", "moe"])
def test_untrained_heads_of_the_targets_geometry_draft_losslessly(draft, config):
    target = load_shape(named(config))
    prompts = random_prompts(3)
    plain = tokens_of(decode(target, None, prompts))
    assert tokens_of(decode(target, drafter_of(target, draft), prompts, batch=2)) == plain


def test_no_head_is_made_up_where_none_can_be():
    target = load_shape(named(TINY))
    with pytest.raises(UsageError, match="no blockwise head can be made from a shape"):
        drafter_of(target, "blockwise:shape")


def test_hashed_prompts_are_about_as_long_as_with_a_trained_vocabulary(smollm2):
    for name in ("code", "math", "creative", "chat"):
        prompts = load_suite(name).prompts
        trained, hashed = (
            sum(len(render(p, t, chat_template=False)) for p in prompts)
            for t in (smollm2.tokenizer, HashTokenizer(smollm2.model.vocab_size))
        )
        assert 0.9 < hashed / trained < 1.1, name


def test_equal_words_have_equal_ids_below_the_vocabulary():
    ids = HashTokenizer(50)("the cat and the cat\n\n  (again)")["input_ids"]
    assert ids[1:2] == ids[4:5]
    assert max(ids) < 50
    assert HashTokenizer(50).decode(ids[:2]) == f"<{ids[0]}><{ids[1]}>"


def acceptance(target, draft: str, **settings) -> float:
    run = decode(target, drafter_of(target, draft), random_prompts(10), max_new_tokens=40, batch=5, **settings)
    rounds = [r for g in run.generations for r in g.rounds]
    return sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_a_grown_target_agrees_with_its_draft_at_zero_and_less_and_less_above(tiny_folder, sampling):
    rates = []
    for epsilon in ("0", "0.1", "0.4", "2"):
        target = load_shape(f"grown:{tiny_folder}:2:{epsilon}")
        assert target.info.weights == "grown"
        assert target.info.layers == 4
        rates.append(acceptance(target, str(tiny_folder), sampling=sampling))
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert rates[1] > rates[3] + 0.2


@pytest.mark.parametrize("base", ["folder", "shape", "moe"])
def test_a_grown_target_decodes_losslessly_with_its_draft(tiny_folder, base):
    draft = {"folder": str(tiny_folder), "shape": named(TINY), "moe": named(MOE)}[base]
    target = load_shape(f"grown:{draft}:1:0.3")
    prompts = random_prompts(4)
    plain = tokens_of(decode(target, None, prompts))
    for name in (draft, f"tree:{draft}"):
        assert tokens_of(decode(target, drafter_of(target, name), prompts, batch=3)) == plain
    assert target.info.weights == ("grown" if base == "folder" else "random")


def test_growing_leaves_the_draft_as_it_was(tiny_folder, tiny):
    load_shape(f"grown:{tiny_folder}:1:1")
    again = load_tiny(tiny_folder)
    prompts = random_prompts(2)
    assert tokens_of(decode(again, None, prompts)) == tokens_of(decode(tiny, None, prompts))


@pytest.mark.parametrize(
    "name",
    ["grown:x", "grown:x:2", "grown:x:0:0.1", "grown:x:2:-1", "grown:x:2:nan", "grown::2:1", "grown:grown:x:1:1:1:1"],
)
def test_a_malformed_grown_target_is_wrong_use(name):
    with pytest.raises(UsageError):
        parse_grown(name)


def test_a_folder_with_colons_can_grow():
    assert parse_grown('grown:shape:{"a": 1}:2:0.5') == ('shape:{"a": 1}', 2, 0.5)
