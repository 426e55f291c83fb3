"""Files of EAGLE heads: every public layout is read into one form, and two are written.

Read are EAGLE-1/2 and EAGLE-3 of the authors (SafeAILab; SpecForge writes the same), `eagle` and `eagle3` of the
speculators library, and either with the prefix `model.` of ModelOpt and NeMo. What a file has decides over what its
config says: biases, norms, an embedding or an output head of its own.

Layouts number the target states in different ways. Here a tap is an index into transformers' `hidden_states`: i enters
layer i. A list at the top of the config (speculators, vLLM) says just that; a list inside `eagle_config` (SpecForge,
ModelOpt, SGLang) counts the layers whose output is meant, which is one less; without a list the authors' choice holds
(`default_taps`).

`d2t` holds offsets: entry i belongs to the target's token i + d2t[i].
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from spectune.errors import UsageError
from spectune.heads.checkpoint import detect_family, read_config, read_eps, read_tensors, save_tensors
from spectune.heads.eagle import EagleConfig, EagleHead, default_taps

_RENAMED = (
    (r"model\.", ""),
    (r"midlayer\.", "layers.0."),
    (r"aux_norm_low\.", "fc_norm.0."),
    (r"aux_norm_mid\.", "fc_norm.1."),
    (r"aux_norm_high\.", "fc_norm.2."),
    # The old `eagle` type of speculators, and the heads with norms that it converted.
    (r"fusion_fc\.", "fc."),
    (r"transformer\.", "layers.0."),
    (r"(embedding|embed)_layernorm\.", "embed_norm."),
    (r"(pre_lm_head|lm_head)_layernorm\.", "norm."),
    (r"hidden_layernorm\.", "layers.0.input_layernorm."),
)
# Copies of the target and tables that are computed here.
_IGNORED = re.compile(r"verifier_.*|.*rotary_emb\.inv_freq|t2d")
_NOTE = "draft_vocab_size, d2t and t2d are additions to the EAGLE-1 layout: the head proposes only these ids"


def load_eagle(folder: Path, target_layers: int) -> EagleHead:
    """An EAGLE head of either version, not yet bound to its target.

    Args:
        target_layers: L, from which the default taps follow.

    Raises:
        UsageError: no EAGLE head, a variant that spectune does not have, or a tensor that is missing, unknown or of a
            wrong shape.
    """
    family = detect_family(folder)
    if family not in ("eagle", "eagle3"):
        raise UsageError(f"{folder} holds no EAGLE head but a {family} draft", f"name it {family}:{folder}")
    config = read_config(folder)
    tensors = {_common_name(name): tensor for name, tensor in read_tensors(folder).items()}
    target_vocab = len(tensors["t2d"]) if "t2d" in tensors else None
    d2t = tensors.pop("d2t", None)
    tensors = {name: tensor for name, tensor in tensors.items() if not _IGNORED.fullmatch(name)}
    settings = _settings(config, tensors, 1 if family == "eagle" else 3, target_layers, target_vocab)
    settings, tensors = _sort_taps(settings, tensors)
    rows = tensors["lm_head.weight"].shape[0] if settings.own_head else config.get("draft_vocab_size")
    ids, order = _draft_vocabulary(d2t, rows, settings.vocab_size)
    head = EagleHead(settings, ids)
    _fill(head, tensors)
    if order is not None and head.lm_head is not None:
        with torch.no_grad():
            head.lm_head.weight.copy_(head.lm_head.weight[order])
    return head


def save_eagle(folder: Path, head: EagleHead, *, compact: bool = False, base_model: str | None = None) -> None:
    """Write a head in the authors' layout of its version (SafeAILab; for version 3 SpecForge's is the same).

    Never written are the target's embedding and, where the head has none of its own, output rows.

    Args:
        compact: store matrices in int8, which only spectune reads.
        base_model: the target's name or folder, noted in the config.
    """
    settings = head.config
    tensors = dict(head.state_dict())
    if settings.version == 3 and settings.layers == 1:
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    config = _public_config(head)
    if head.draft_ids is not None:
        ids = head.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(settings.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        if settings.version == 1:
            config["spectune_note"] = _NOTE
    if base_model is not None:
        config["base_model_name_or_path"] = base_model
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", tensors, int8=compact)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _public_config(head: EagleHead) -> dict[str, Any]:
    settings = head.config
    rope = dict(settings.rope)
    theta = rope.pop("rope_theta")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if settings.version == 3 else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "vocab_size": settings.vocab_size,
        "draft_vocab_size": head.draft_size,
        "rms_norm_eps": settings.eps,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": settings.max_positions,
        "attention_bias": settings.attention_bias,
        "mlp_bias": settings.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
    }
    if settings.version == 1:
        config["bias"] = settings.fusion_bias
        if head.draft_ids is None:
            del config["draft_vocab_size"]
        return config
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        config[flag] = getattr(settings, flag)
    if settings.target_hidden_size != settings.hidden_size:
        config["target_hidden_size"] = settings.target_hidden_size
    # vLLM reads the first list, SGLang the second, each with its own count.
    config["eagle_aux_hidden_state_layer_ids"] = list(settings.taps)
    config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in settings.taps],
        "use_aux_hidden_state": settings.fusion,
    }
    return config


def _common_name(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(f"^{pattern}", replacement, name)
    return name


def _settings(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    version: Literal[1, 3],
    target_layers: int,
    target_vocab: int | None,
) -> EagleConfig:
    """The head's sizes and variants. Taps are still in the file's order."""
    layer = config.get("transformer_layer_config") or config
    from_speculators = "speculators_model_type" in config
    _refuse_variants(layer)
    hidden, heads = _number(layer, "hidden_size"), _number(layer, "num_attention_heads")
    target_hidden = config.get("target_hidden_size") or hidden
    taps = _taps(config, version, target_layers)
    norms = {name.split(".")[0] for name in tensors}
    return EagleConfig(
        version=version,
        hidden_size=hidden,
        intermediate_size=_number(layer, "intermediate_size"),
        heads=heads,
        kv_heads=_number(layer, "num_key_value_heads", heads),
        head_dim=_number(layer, "head_dim", hidden // heads),
        vocab_size=target_vocab or _number(layer, "vocab_size"),
        taps=taps,
        target_hidden_size=target_hidden,
        layers=1 + max((int(m[1]) for name in tensors if (m := re.match(r"layers\.(\d+)\.", name))), default=0),
        eps=read_eps(layer, 1e-6),
        rope=_rope(layer),
        max_positions=_number(layer, "max_position_embeddings", 2048),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        fusion="fc" in norms,
        fusion_bias="fc.bias" in tensors,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
        query_key_norm="layers.0.self_attn.q_norm.weight" in tensors,
        layernorms=version == 1 and "embed_norm" in norms,
        norm_before_residual=bool(config.get("norm_before_residual", from_speculators and version == 3)),
        norm_before_fc="input_norm" in norms,
        fc_norm="fc_norm" in norms,
        norm_output=bool(config.get("norm_output", False)),
    )


def _refuse_variants(layer: Mapping[str, Any]) -> None:
    """Layers that compute something else than a Llama layer under the same names."""
    activation = layer.get("hidden_act", "silu")
    if activation != "silu":
        raise UsageError(f"the head's activation is {activation!r}", "spectune runs EAGLE heads with silu only")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise UsageError("the head has sliding-window layers", "spectune runs EAGLE heads with full attention only")
    rope = layer.get("rope_parameters") or {}
    if rope.get("partial_rotary_factor", layer.get("partial_rotary_factor", 1.0)) not in (1, None):
        raise UsageError("the head rotates only a part of its queries", "spectune runs EAGLE heads with full RoPE only")


def _taps(config: Mapping[str, Any], version: Literal[1, 3], layers: int) -> tuple[int, ...]:
    """In the order of the file, as indices of hidden_states."""
    if version == 1:
        return default_taps(1, layers)
    nested = config.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        return (layers,)
    key = "eagle_aux_hidden_state_layer_ids"
    if (listed := config.get(key)) is not None:
        taps, shift = listed, 0
    elif (listed := nested.get(key)) is not None:
        taps, shift = listed, 1
    else:
        taps, shift = default_taps(3, layers), 0
    whole = isinstance(taps, list | tuple) and all(isinstance(tap, int) for tap in taps)
    if not whole or not taps or len(set(taps)) < len(taps) or min(taps) + shift < 0 or max(taps) + shift > layers:
        raise UsageError(
            f"config.json says {key} = {taps!r}, which does not fit a target of {layers} layers",
            "use a head trained for this target",
        )
    return tuple(tap + shift for tap in taps)


def _sort_taps(settings: EagleConfig, tensors: dict[str, Tensor]) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Put the taps in ascending order, and what belongs to them with them."""
    count, width = len(settings.taps), settings.target_hidden_size
    order = sorted(range(count), key=lambda place: settings.taps[place])
    if order == list(range(count)):
        return settings, tensors
    moved = dict(tensors)
    for name in ("fc.weight", "input_norm.weight"):
        if name in tensors:
            _check_shape(name, tensors[name], (*tensors[name].shape[:-1], count * width))
            parts = tensors[name].split(width, -1)
            moved[name] = torch.cat([parts[place] for place in order], -1)
    for new, old in enumerate(order):
        if f"fc_norm.{old}.weight" in tensors:
            moved[f"fc_norm.{new}.weight"] = tensors[f"fc_norm.{old}.weight"]
    return replace(settings, taps=tuple(sorted(settings.taps))), moved


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings in transformers' present form. Where a config names no theta, it is 10000, not the target's."""
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    rope = dict(rope.get("full_attention", rope))  # one set per kind of layer
    kind = rope.pop("type", "default")
    rope.setdefault("rope_type", kind)
    if "mrope_section" in rope:  # three axes that are one for text
        rope["rope_type"] = "default"
    rope.setdefault("rope_theta", layer.get("rope_theta") or 10000.0)
    return rope


def _draft_vocabulary(d2t: Tensor | None, rows: Any, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    """Ascending ids of the draft vocabulary (None: all), and the order of the file's rows that makes them ascend.

    Args:
        rows: D, None where the file does not say; then d2t tells.
    """
    if d2t is None:
        if rows not in (None, vocab_size):
            raise UsageError(
                f"the head has {rows} of {vocab_size} token ids but no tensor d2t",
                "without it nobody knows which; fetch the head again",
            )
        return None, None
    if rows is not None:
        _check_shape("d2t", d2t, (int(rows),))
    ids, order = (torch.arange(len(d2t)) + d2t.long()).sort()
    if len(ids) == 0 or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids[1:] == ids[:-1]).any()):
        raise UsageError(
            f"tensor d2t does not lead to {len(d2t)} different ids below {vocab_size}",
            "the file is damaged, or made for another target",
        )
    if torch.equal(ids, torch.arange(vocab_size)):
        return None, None
    return ids, None if torch.equal(order, torch.arange(len(order))) else order


def _fill(head: EagleHead, tensors: Mapping[str, Tensor]) -> None:
    """Load every parameter; nothing may be missing, be left over or have another shape."""
    wanted = dict(head.named_parameters())
    with torch.no_grad():
        for name, parameter in wanted.items():
            if name not in tensors:
                raise UsageError(
                    f"the head lacks the tensor {name} {list(parameter.shape)}", "the file is damaged or incomplete"
                )
            _check_shape(name, tensors[name], tuple(parameter.shape))
            parameter.copy_(tensors[name])
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise UsageError(
            f"the head has a tensor {unknown[0]}, which spectune does not know", "it would compute something else"
        )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise UsageError(
            f"tensor {name} has shape {list(tensor.shape)}, wanted {list(shape)}",
            "the file is damaged, or made for another target",
        )


def _number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"config.json says {key} = {value!r}, wanted a whole number from 1")
    return value
