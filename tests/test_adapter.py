"""Architectures through the adapter: decoding in pieces over ragged rows equals transformers' own generate."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import load_tiny
from decoding_helpers import decode, drafter_of, random_prompts, reference, tokens_of

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.lean import LeanModel
from spectune.decoding.loading import load
from spectune.errors import UsageError

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES = {
    # name: (config class, settings, written-out forward?)
    "llama": ("LlamaConfig", {}, True),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}, True),
    "llama3-rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
        True,
    ),
    "mistral": ("MistralConfig", {"sliding_window": 16}, True),
    "qwen2": ("Qwen2Config", {}, True),
    "qwen2-window": (
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}, True,
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, True),
    "gemma2": (
        "Gemma2Config", {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}, False,
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}, False),
    "phi3": ("Phi3Config", {}, False),
    "olmo2": ("Olmo2Config", {}, False),
    "gpt2": ("GPT2Config", GPT2, False),
    "gpt-neox": ("GPTNeoXConfig", {"hidden_act": "gelu"}, False),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, False),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
        False,
    ),
}  # fmt: skip


def save(name: str, folder):
    config_class, settings, _ = ARCHITECTURES[name]
    whole = settings if name == "gpt2" else SMALL | settings
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**whole)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_decodes_like_generate_with_every_kind_of_drafter(name, tmp_path):
    loaded = load_tiny(save(name, tmp_path))
    assert isinstance(loaded.model, LeanModel) == ARCHITECTURES[name][2]
    prompts = random_prompts(4, lengths=(5, 23, 1))
    expected = [reference(loaded, p, 24) for p in prompts]
    assert tokens_of(decode(loaded, None, prompts, k=0, batch=3)) == expected
    for drafter in (tmp_path, "ngram", "early-exit:2", "layer-skip:1"):
        run = decode(loaded, drafter_of(loaded, drafter), prompts, k=4, batch=3)
        assert tokens_of(run) == expected, drafter


@pytest.mark.parametrize("name", [n for n, (_, _, lean) in ARCHITECTURES.items() if lean])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_written_out_forward_gives_the_models_own_logits(name, dtype, tmp_path):
    folder = save(name, tmp_path)
    direct = load_tiny(folder, dtype).model
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.tensor(random_prompts(1, lengths=(40,)))
    step = Step(0, (0,), 40, direct.device)
    with torch.inference_mode():
        actual, expected = direct.forward(ids, step, KVStore(1, 40)), own(ids).logits
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
    else:
        assert (actual.float() - expected.float()).abs().mean() < 0.05 * expected.float().std()


def test_hidden_changes_to_a_layer_are_found_and_the_general_path_is_kept(tmp_path, monkeypatch):
    from spectune.decoding import lean as lean_module

    def without_scaling(module, make=lean_module._layer):
        layer = make(module)
        layer.scaling *= 2
        return layer

    monkeypatch.setattr(lean_module, "_layer", without_scaling)
    assert type(load_tiny(save("llama", tmp_path)).model) is CausalModel


@pytest.mark.parametrize(
    ("config_class", "settings", "words"),
    [
        ("MambaConfig", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "cannot|no keys"),
        ("T5Config", {"vocab_size": 64, "d_model": 32, "num_layers": 1}, "cannot load|encoder-decoder"),
    ],
)
def test_targets_whose_state_cannot_roll_back_are_refused_with_a_reason(config_class, settings, words, tmp_path):
    config = getattr(transformers, config_class)(**settings)
    kind = transformers.AutoModelForCausalLM if config_class == "MambaConfig" else transformers.AutoModelForSeq2SeqLM
    kind.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=words):
        load_tiny(tmp_path)


def test_a_missing_model_is_one_line_with_the_fix():
    with pytest.raises(UsageError, match=r"no model folder at \./nowhere"):
        load("./nowhere", device=torch.device("cpu"), dtype=torch.float32)


def test_weight_bytes_leave_out_looked_up_embeddings_and_count_a_tied_head_once(tmp_path):
    untied = load_tiny(save("llama", tmp_path / "untied")).info
    assert untied.weight_bytes_per_step == 4 * (untied.parameters - 128 * 64)
    tied = load_tiny(save("llama-tied", tmp_path / "tied")).info
    assert tied.weight_bytes_per_step == 4 * tied.parameters


def test_only_chosen_experts_count_as_read(tmp_path):
    info = load_tiny(save("mixtral", tmp_path)).info
    experts = 3 * 4 * 3 * 64 * 96  # layers, experts, matrices
    assert info.weight_bytes_per_step == 4 * (info.parameters - 128 * 64 - experts // 2)


def test_kv_bytes_per_token_are_those_of_the_cache(tmp_path):
    assert load_tiny(save("llama", tmp_path)).info.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_rope_scaling_that_depends_on_the_longest_row_caps_the_context(tmp_path):
    torch.manual_seed(0)
    half = SMALL["hidden_size"] // SMALL["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "original_max_position_embeddings": 32,
    }
    config = transformers.Phi3Config(**SMALL, original_max_position_embeddings=32, rope_parameters=rope)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_tiny(tmp_path)
    assert loaded.info.max_context == 32
    prompts = random_prompts(4, lengths=(5, 23, 1))
    plain = decode(loaded, None, prompts, k=0, batch=1, max_new_tokens=40)
    run = decode(loaded, drafter_of(loaded, "early-exit:2"), prompts, k=4, batch=3, max_new_tokens=40)
    assert tokens_of(run) == tokens_of(plain)
    assert "context" in {g.finish_reason for g in run.generations}


def test_a_damaged_weight_file_is_one_line(tmp_path):
    folder = save("llama", tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UsageError, match="cannot load"):
        load_tiny(folder)
