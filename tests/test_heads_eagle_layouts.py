"""Every public layout of EAGLE heads, written tiny and read back; what cannot be read is refused by name."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from eagle_helpers import HIDDEN, VOCAB, NaiveHead, tiny_config, tiny_head
from safetensors.torch import save_file

from spectune.errors import UsageError
from spectune.heads.checkpoint import detect_family, read_config, read_tensors, save_tensors
from spectune.heads.eagle_layouts import load_eagle, save_eagle

LAYERS = 8  # of the target: default states 2, 4 and 5
INNER, QUERIES, KEYS = 96, 64, 32
IDS = torch.tensor(sorted([2, 3, 5, 8, 13, 21, 34, 55, 89, 127]))
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2)) * 0.3
STATES = torch.randn(9, HIDDEN, LAYERS + 1, generator=torch.Generator().manual_seed(3))  # all hidden_states of a text
TEXT = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(4))


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if len(shape) == 2
        else 1 + 0.3 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def layer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj.weight": (QUERIES, width),
        "self_attn.k_proj.weight": (KEYS, width),
        "self_attn.v_proj.weight": (KEYS, width),
        "self_attn.o_proj.weight": (HIDDEN, QUERIES),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "post_attention_layernorm.weight": (HIDDEN,),
    }


LLAMA = {
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
EAGLE_SHAPES = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | {f"layers.0.{n}": s for n, s in layer_shapes(HIDDEN).items()}
EAGLE3_SHAPES = (
    {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (len(IDS), HIDDEN)}
    | {f"midlayer.{n}": s for n, s in layer_shapes(2 * HIDDEN).items()}
    | {"midlayer.hidden_norm.weight": (HIDDEN,), "midlayer.input_layernorm.weight": (HIDDEN,)}
)
EAGLE = LLAMA | {"architectures": ["LlamaForCausalLM"]}
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS)}


def vocabulary_tables() -> dict[str, torch.Tensor]:
    return {
        "d2t": IDS - torch.arange(len(IDS)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, IDS, True),
    }


def renamed(tensors, **prefixes):
    """Tensors with name prefixes replaced."""
    out = {}
    for name, tensor in tensors.items():
        for old, new in prefixes.items():
            old = old.replace("_DOT_", ".")
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        out[name] = tensor
    return out


def write(folder, config, tensors, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def logits_of(folder, taps):
    """Logits of the loaded head over the text, reading the given states."""
    head = load_eagle(folder, LAYERS)
    assert head.config.taps == taps
    head.bind(EMBEDDING, HEAD)
    states = torch.cat([STATES[..., tap] for tap in taps], -1)
    with torch.no_grad():
        return head, head.logits(head.run(states[None], TEXT[None]))[0]


def expected_logits(version, tensors, states_in_file_order, **settings):
    """The same from the file's tensors, under the names of the formulas."""
    reference = NaiveHead(
        version, tensors, embedding=tensors.get("embed_tokens.weight", EMBEDDING), head_rows=HEAD, eps=1e-5, **settings
    )
    states = torch.cat([STATES[..., tap] for tap in states_in_file_order], -1)
    return torch.stack([reference.logits(x) for x in reference.run(states, TEXT)])


def check(folder, taps, version, formula_tensors, *, order=None, draft_ids=None, **settings):
    head, logits = logits_of(folder, taps)
    expected = expected_logits(version, formula_tensors, order or taps, **settings)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-4)
    if draft_ids is None:
        assert head.draft_ids is None
    else:
        assert head.draft_ids.tolist() == draft_ids.tolist()
    return head


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_safeailab_eagle(tmp_path, file):
    tensors = random_tensors(EAGLE_SHAPES | {"fc.bias": (HIDDEN,)})
    write(tmp_path, EAGLE, tensors, file)
    assert detect_family(tmp_path) == "eagle"
    check(tmp_path, (8,), 1, tensors)


def test_safeailab_eagle_without_bias_and_with_an_embedding_of_its_own(tmp_path):
    tensors = random_tensors(EAGLE_SHAPES | {"embed_tokens.weight": (VOCAB, HIDDEN)})
    write(tmp_path, EAGLE | {"bias": False, "rope_theta": 500000.0}, tensors)
    check(tmp_path, (8,), 1, tensors, theta=500000.0)


def test_eagle_with_a_head_that_a_converter_added(tmp_path):
    tensors = random_tensors(EAGLE_SHAPES | {"lm_head.weight": (VOCAB, HIDDEN)})
    write(tmp_path, EAGLE, renamed(tensors, fc="model.fc", layers="model.layers"))
    check(tmp_path, (8,), 1, tensors)


def test_eagle_of_the_old_speculators(tmp_path):
    tensors = random_tensors(EAGLE_SHAPES | {"fc.bias": (HIDDEN,)})
    config = {
        "speculators_model_type": "eagle",
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "fusion_bias": True,
        "layernorms": False,
        "transformer_layer_config": LLAMA,
    }
    write(tmp_path, config, renamed(tensors, fc="fusion_fc", layers_DOT_0="transformer"))
    assert detect_family(tmp_path) == "eagle"
    check(tmp_path, (8,), 1, tensors)


NORMS = {"embed_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,), "layers.0.input_layernorm.weight": (HIDDEN,)}


def test_eagle_of_the_old_speculators_with_norms(tmp_path):
    tensors = random_tensors(EAGLE_SHAPES | NORMS)
    config = {"speculators_model_type": "eagle", "layernorms": True, "transformer_layer_config": LLAMA}
    write(
        tmp_path,
        config,
        renamed(
            tensors,
            fc="fusion_fc",
            layers_DOT_0="transformer",
            embed_norm="embedding_layernorm",
            norm="pre_lm_head_layernorm",
        ),
    )
    check(tmp_path, (8,), 1, tensors)


def test_eagle_with_norms_before_conversion(tmp_path):
    tensors = random_tensors(EAGLE_SHAPES | NORMS)
    names = renamed(tensors, embed_norm="embed_layernorm", norm="lm_head_layernorm")
    names["hidden_layernorm.weight"] = names.pop("layers.0.input_layernorm.weight")
    write(tmp_path, EAGLE, names)
    check(tmp_path, (8,), 1, tensors)


def test_safeailab_eagle3(tmp_path):
    tensors = random_tensors(EAGLE3_SHAPES)
    write(
        tmp_path, EAGLE3 | {"architectures": ["LlamaForCausalLM"]}, tensors | vocabulary_tables(), "pytorch_model.bin"
    )
    assert detect_family(tmp_path) == "eagle3"
    head = check(tmp_path, (2, 4, 5), 3, renamed(tensors, midlayer="layers.0"), draft_ids=IDS)
    assert head.config.rope["rope_theta"] == 10000.0  # not the target's
    assert not head.config.norm_before_residual


def test_specforge_counts_outputs_of_layers(tmp_path):
    tensors = random_tensors(EAGLE3_SHAPES)
    config = EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}}
    write(tmp_path, config, tensors | vocabulary_tables())
    check(tmp_path, (1, 4, 7), 3, renamed(tensors, midlayer="layers.0"), draft_ids=IDS)


def test_specforge_eagle31_norms(tmp_path):
    shapes = EAGLE3_SHAPES | {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}
    tensors = random_tensors(shapes)
    write(tmp_path, EAGLE3 | {"fc_norm": True, "norm_output": True}, tensors | vocabulary_tables())
    head = check(tmp_path, (2, 4, 5), 3, renamed(tensors, midlayer="layers.0"), draft_ids=IDS)
    assert head.config.norm_output
    legacy = renamed(tensors, fc_norm_DOT_0="aux_norm_low", fc_norm_DOT_1="aux_norm_mid", fc_norm_DOT_2="aux_norm_high")
    write(tmp_path, EAGLE3, legacy | vocabulary_tables())
    check(tmp_path, (2, 4, 5), 3, renamed(tensors, midlayer="layers.0"), draft_ids=IDS)


@pytest.mark.parametrize("stated", [None, True, False])
def test_speculators_eagle3(tmp_path, stated):
    """Counts states as hidden_states does, and takes the residual behind the norm unless told otherwise."""
    tensors = random_tensors(renamed(EAGLE3_SHAPES, midlayer="layers.0") | {"input_norm.weight": (3 * HIDDEN,)})
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(IDS),
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "transformer_layer_config": LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    }
    if stated is not None:
        config["norm_before_residual"] = stated
    write(tmp_path, config, tensors | vocabulary_tables())
    assert detect_family(tmp_path) == "eagle3"
    check(tmp_path, (1, 4, 6), 3, tensors, draft_ids=IDS, theta=2e4, norm_before_residual=stated is None or stated)


def test_speculators_eagle3_of_qwen3_with_two_layers(tmp_path):
    shapes = renamed(EAGLE3_SHAPES, midlayer="layers.0")
    shapes |= {f"layers.1.{n}": s for n, s in layer_shapes(HIDDEN).items()}
    shapes |= {"layers.1.input_layernorm.weight": (HIDDEN,)}
    shapes |= {f"layers.{i}.self_attn.{part}_norm.weight": (16,) for i in (0, 1) for part in "qk"}
    tensors = random_tensors(shapes)
    layer = LLAMA | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 16}
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": len(IDS), "transformer_layer_config": layer}
    write(tmp_path, config, tensors | vocabulary_tables())
    check(tmp_path, (2, 4, 5), 3, tensors, draft_ids=IDS, norm_before_residual=True)


def test_modelopt_prefix(tmp_path):
    tensors = random_tensors(renamed(EAGLE3_SHAPES, midlayer="layers.0"))
    prefixed = {f"model.{n}" if n != "lm_head.weight" else n: t for n, t in tensors.items()}
    write(tmp_path, EAGLE3, prefixed | vocabulary_tables())
    assert detect_family(tmp_path) == "eagle3"
    check(tmp_path, (2, 4, 5), 3, tensors, draft_ids=IDS)


def test_eagle3_on_the_last_state_alone(tmp_path):
    shapes = {n: s for n, s in renamed(EAGLE3_SHAPES, midlayer="layers.0").items() if n != "fc.weight"}
    tensors = random_tensors(shapes)
    write(tmp_path, EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}}, tensors | vocabulary_tables())
    check(tmp_path, (8,), 3, tensors, draft_ids=IDS)


def test_whole_vocabulary_needs_no_table(tmp_path):
    tensors = random_tensors(EAGLE3_SHAPES | {"lm_head.weight": (VOCAB, HIDDEN)})
    write(tmp_path, EAGLE3 | {"draft_vocab_size": VOCAB}, tensors)
    check(tmp_path, (2, 4, 5), 3, renamed(tensors, midlayer="layers.0"))
    tables = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    write(tmp_path, EAGLE3 | {"draft_vocab_size": VOCAB}, tensors | tables)
    check(tmp_path, (2, 4, 5), 3, renamed(tensors, midlayer="layers.0"))


def test_states_in_another_order_are_sorted_with_their_weights(tmp_path):
    shapes = renamed(EAGLE3_SHAPES, midlayer="layers.0") | {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}
    tensors = random_tensors(shapes)
    config = EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [6, 1, 4]}
    write(tmp_path, config, tensors | vocabulary_tables())
    check(tmp_path, (1, 4, 6), 3, tensors, order=(6, 1, 4), draft_ids=IDS)


def test_a_list_read_with_the_wrong_count_gives_other_logits(tmp_path):
    tensors = random_tensors(EAGLE3_SHAPES)
    config = EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    write(tmp_path, config, tensors | vocabulary_tables())
    _, logits = logits_of(tmp_path, (2, 4, 5))
    off_by_one = expected_logits(3, renamed(tensors, midlayer="layers.0"), (1, 3, 4))
    assert (logits - off_by_one).abs().mean() > 0.1


def test_draft_ids_in_another_order_are_sorted_with_their_rows(tmp_path):
    tensors = random_tensors(EAGLE3_SHAPES)
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(1))
    mixed = tensors | {"lm_head.weight": tensors["lm_head.weight"][order]}
    write(tmp_path, EAGLE3, mixed | {"d2t": IDS[order] - torch.arange(len(IDS))})
    check(tmp_path, (2, 4, 5), 3, renamed(tensors, midlayer="layers.0"), draft_ids=IDS)


def test_rope_of_old_configs(tmp_path):
    scaling = {"type": "linear", "factor": 2.0}
    write(tmp_path, EAGLE | {"rope_theta": 3e4, "rope_scaling": scaling}, random_tensors(EAGLE_SHAPES))
    head = load_eagle(tmp_path, LAYERS)
    assert head.config.rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}
    plain = tiny_head(tiny_config(1, rope={"rope_type": "default", "rope_theta": 3e4}))
    torch.testing.assert_close(head.rotary.frequencies, plain.rotary.frequencies / 2)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_what_we_write_we_read(tmp_path, version, trimmed, compact):
    config = tiny_config(version, layers=LAYERS, rope={"rope_type": "default", "rope_theta": 1e5}, eps=1e-5)
    head = tiny_head(config, draft_ids=IDS if trimmed else None)
    save_eagle(tmp_path, head, compact=compact, base_model="a/b")
    read = load_eagle(tmp_path, LAYERS)
    assert read.config == config
    assert (read.draft_ids is None) == (not trimmed)
    for name, tensor in head.state_dict().items():
        tolerance = float(tensor.abs().max()) / 250 if compact and tensor.dim() == 2 else 0.0
        torch.testing.assert_close(read.state_dict()[name], tensor, rtol=0, atol=tolerance)
    text = read_config(tmp_path)
    assert text["base_model_name_or_path"] == "a/b"
    assert ("spectune_note" in text) == (version == 1 and trimmed)


def test_written_eagle3_is_the_public_layout(tmp_path):
    save_eagle(tmp_path, tiny_head(tiny_config(3, layers=LAYERS), draft_ids=IDS))
    shapes = {name: tuple(t.shape) for name, t in read_tensors(tmp_path).items()}
    assert shapes == EAGLE3_SHAPES | {"d2t": (len(IDS),), "t2d": (VOCAB,)}
    config = read_config(tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_written_eagle_is_the_public_layout(tmp_path):
    save_eagle(tmp_path, tiny_head(tiny_config(1, layers=LAYERS)))
    assert {name: tuple(t.shape) for name, t in read_tensors(tmp_path).items()} == EAGLE_SHAPES
    assert read_config(tmp_path)["bias"] is False
    assert "draft_vocab_size" not in read_config(tmp_path)


REFUSED = {
    "Hydra": {"hydra_num_heads": 4, "model_type": "llama"},
    "DFlash": {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {"mask_token_id": 1}},
    "MTP": {"architectures": ["Qwen3NextMTP"], "model_type": "qwen3_next_mtp"},
    "P-EAGLE": {"architectures": ["PEagleDraftModel"], "model_type": "llama"},
}
REFUSED_SPECULATORS = {"DFlash": "dflash", "MTP": "mtp", "P-EAGLE": "peagle"}


@pytest.mark.parametrize("family", REFUSED)
def test_unknown_families_are_refused_by_name(tmp_path, family):
    write(tmp_path, REFUSED[family], {"x": torch.zeros(1)})
    with pytest.raises(UsageError, match=f"{family} head, which spectune cannot run") as caught:
        load_eagle(tmp_path, LAYERS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", REFUSED_SPECULATORS)
def test_unknown_families_of_speculators_are_refused_by_name(tmp_path, family):
    write(tmp_path, {"speculators_model_type": REFUSED_SPECULATORS[family]}, {"x": torch.zeros(1)})
    with pytest.raises(UsageError, match=f"{family} head"):
        detect_family(tmp_path)


def test_p_eagle_is_known_by_its_tensor(tmp_path):
    tensors = random_tensors(EAGLE3_SHAPES | {"mask_hidden": (1, 3 * HIDDEN)})
    write(tmp_path, EAGLE3, tensors | vocabulary_tables())
    with pytest.raises(UsageError, match="P-EAGLE"):
        load_eagle(tmp_path, LAYERS)


def test_hydra_is_known_by_its_file(tmp_path):
    write(tmp_path, {"model_type": "llama"}, {"x": torch.zeros(1)}, "hydra_lm_head.pt")
    with pytest.raises(UsageError, match="Hydra"):
        detect_family(tmp_path)


def test_a_folder_of_nothing_known_is_refused(tmp_path):
    write(tmp_path, {"model_type": "resnet"}, {"x": torch.zeros(1)})
    with pytest.raises(UsageError, match="neither a draft head nor a language model"):
        detect_family(tmp_path)
    write(tmp_path, {"speculators_model_type": "novel"}, {"x": torch.zeros(1)})
    with pytest.raises(UsageError, match="'novel'"):
        detect_family(tmp_path)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"spectune_head": "blockwise"}, "blockwise"),
        ({"spectune_head": "exit"}, "exit"),
        ({"spectune_head": "layer-skip"}, "layer-skip"),
        ({"medusa_num_heads": 2}, "medusa"),
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp-speculator"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "causal-lm"),
    ],
)
def test_other_families_are_told_apart(tmp_path, config, family):
    write(tmp_path, config, {"model.embed_tokens.weight": torch.zeros(4, 4)})
    assert detect_family(tmp_path) == family


def test_medusa_heads_inside_a_full_model_are_medusa(tmp_path):
    tensors = {"model.embed_tokens.weight": torch.zeros(4, 4), "medusa_head.0.0.linear.weight": torch.zeros(4, 4)}
    write(tmp_path, EAGLE, tensors)
    assert detect_family(tmp_path) == "medusa"


def test_another_family_is_not_read_as_eagle(tmp_path):
    write(tmp_path, {"model_type": "medusa"}, {"x": torch.zeros(1)})
    with pytest.raises(UsageError, match="no EAGLE head but a medusa draft"):
        load_eagle(tmp_path, LAYERS)


def test_wrong_shapes_name_the_tensor_and_both_shapes(tmp_path):
    tensors = random_tensors(EAGLE3_SHAPES | {"midlayer.self_attn.k_proj.weight": (KEYS, HIDDEN)})
    write(tmp_path, EAGLE3, tensors | vocabulary_tables())
    with pytest.raises(
        UsageError, match=r"layers\.0\.self_attn\.k_proj\.weight has shape \[32, 64\], wanted \[32, 128\]"
    ):
        load_eagle(tmp_path, LAYERS)


def test_missing_and_unknown_tensors_are_named(tmp_path):
    tensors = random_tensors(EAGLE3_SHAPES)
    write(tmp_path, EAGLE3, {n: t for n, t in tensors.items() if n != "norm.weight"} | vocabulary_tables())
    with pytest.raises(UsageError, match=r"lacks the tensor norm\.weight \[64\]"):
        load_eagle(tmp_path, LAYERS)
    write(tmp_path, EAGLE3, tensors | vocabulary_tables() | {"midlayer.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(UsageError, match=r"self_attn\.sinks, which spectune does not know"):
        load_eagle(tmp_path, LAYERS)


def test_a_draft_vocabulary_must_be_given_and_fit(tmp_path):
    tensors = random_tensors(EAGLE3_SHAPES)
    write(tmp_path, EAGLE3, tensors)
    with pytest.raises(UsageError, match="10 of 128 token ids but no tensor d2t"):
        load_eagle(tmp_path, LAYERS)
    write(tmp_path, EAGLE3, tensors | {"d2t": torch.zeros(4, dtype=torch.long)})
    with pytest.raises(UsageError, match=r"d2t has shape \[4\], wanted \[10\]"):
        load_eagle(tmp_path, LAYERS)
    for bad in (IDS, -torch.arange(10)):  # absolute ids taken as offsets lead too far; all the same id
        write(tmp_path, EAGLE3, tensors | {"d2t": bad})
        with pytest.raises(UsageError, match="d2t does not lead to 10 different ids below 128"):
            load_eagle(tmp_path, LAYERS)


@pytest.mark.parametrize("ids", [[1, 2, 99], [2, 2, 3], "all", []])
def test_states_that_the_target_lacks_are_refused(tmp_path, ids):
    config = EAGLE3 | {"eagle_aux_hidden_state_layer_ids": ids}
    write(tmp_path, config, random_tensors(EAGLE3_SHAPES) | vocabulary_tables())
    with pytest.raises(UsageError, match="does not fit a target of 8 layers"):
        load_eagle(tmp_path, LAYERS)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"partial_rotary_factor": 0.5}, "rotates only a part"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
    ],
)
def test_variants_that_compute_something_else_are_refused(tmp_path, change, word):
    write(tmp_path, EAGLE3 | change, random_tensors(EAGLE3_SHAPES) | vocabulary_tables())
    with pytest.raises(UsageError, match=word):
        load_eagle(tmp_path, LAYERS)


class Evil:
    def __reduce__(self):
        return (print, ("ran code from a checkpoint",))


def test_pickles_that_run_code_are_refused(tmp_path, capsys):
    write(tmp_path, EAGLE, {}, "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Evil()}, protocol=2))
    with pytest.raises(UsageError, match="could run code"):
        read_tensors(tmp_path)
    torch.save({"x": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="could run code"):
        read_tensors(tmp_path)
    assert "ran code" not in capsys.readouterr().out


def test_sharded_files_are_read_together(tmp_path):
    tensors = random_tensors(EAGLE_SHAPES)
    names = sorted(tensors)
    write(tmp_path, EAGLE, {n: tensors[n] for n in names[:4]}, "model-00001-of-00002.safetensors")
    write(tmp_path, EAGLE, {n: tensors[n] for n in names[4:]}, "model-00002-of-00002.safetensors")
    where = {n: f"model-0000{1 + (i >= 4)}-of-00002.safetensors" for i, n in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    check(tmp_path, (8,), 1, tensors)
    assert set(read_tensors(tmp_path, prefix="fc.")) == {"weight"}


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "sub/x.safetensors", "..", ""])
def test_an_index_cannot_point_outside_its_folder(tmp_path, name):
    folder = tmp_path / "head"
    write(folder, EAGLE, {}, "x.safetensors")
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(UsageError, match="not a file in its own folder"):
        read_tensors(folder)


def test_damaged_files_give_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="no JSON object"):
        read_config(tmp_path)
    with pytest.raises(UsageError, match="holds no weights"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 40)
    with pytest.raises(UsageError, match="cannot read") as caught:
        read_tensors(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(UsageError, match="cannot read"):
        read_tensors(tmp_path)
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="no table of tensors"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot read"):
        read_tensors(tmp_path)


def test_int8_files_hold_their_matrices_to_half_a_step(tmp_path):
    weight, vector, ids = torch.randn(30, 50), torch.randn(50), torch.arange(30)
    weight[3] = 0
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"w": weight, "v": vector, "ids": ids}, int8=True)
    read = read_tensors(tmp_path)
    assert set(read) == {"w", "v", "ids"}
    assert torch.equal(read["v"], vector)
    assert torch.equal(read["ids"], ids)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((read["w"] - weight).abs() <= step / 2 + 1e-7).all())
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    save_file({"w": torch.zeros(3, 4, dtype=torch.int8), "w_scale": torch.ones(4, 1)}, path)
    with pytest.raises(UsageError, match=r"w_scale has shape \[4, 1\], wanted \[3, 1\]"):
        read_tensors(tmp_path)
