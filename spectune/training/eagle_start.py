"""What the training of an EAGLE head starts from: parts of its target, so that little text is enough, or a head.

Of a new head the decoder layer starts as the target's last one, the output rows and the final norm as the target's.
The fusion passes the state nearest to the output through and ignores the embedding, which the head then learns to use.

In version 1 the layer adds nothing at first: it works on normalised states, and what the target's last layer adds is of
the size of its residual stream, dozens of times as large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spectune.decoding.adapter import CausalModel
from spectune.decoding.head_drafters import head_folder
from spectune.decoding.lean import LeanModel
from spectune.decoding.product import Product
from spectune.errors import UsageError
from spectune.heads.eagle import EagleConfig, EagleHead, default_taps
from spectune.heads.eagle_layouts import load_eagle
from spectune.heads.parallel import draft_rows


def start_head(target: CausalModel, version: Literal[1, 3], draft_ids: Tensor | None = None) -> EagleHead:
    """An untrained head of the target's own geometry, bound to it, in float32 on the target's device.

    Args:
        draft_ids: [D] ids of the draft vocabulary, ascending; None for the whole one.
    """
    settings = _settings(target, version)
    head = EagleHead(settings, draft_ids)
    layer, norm = last_layer(target)
    with torch.no_grad():
        _start_layer(head, layer)
        _start_fusion(head)
        if head.norm is not None and norm is not None:
            head.norm.weight.copy_(norm)
        if head.lm_head is not None:
            head.lm_head.weight.copy_(draft_rows(target.head_rows(), draft_ids))
    head = head.to(target.device)
    head.bind(target.embedding.float(), target.head_rows().float())
    return head


def trained_head(where: str, target: CausalModel, version: Literal[1, 3]) -> EagleHead:
    """A head from `demo`, a folder or the hub, bound to the target, in float32 on the target's device.

    Raises:
        UsageError: nothing there, another kind of head, or one made for another target.
    """
    kind = "eagle" if version == 1 else "eagle3"
    folder = head_folder(kind, where)
    head = load_eagle(folder, target.layers_count)
    if head.config.version != version:
        other = "eagle3" if version == 1 else "eagle"
        raise UsageError(f"{where} holds an {other} head", f"go on with: spectune train {other} --start {where}")
    head = head.float().to(target.device)
    head.bind(target.embedding.float(), target.head_rows().float())
    return head


def _settings(target: CausalModel, version: Literal[1, 3]) -> EagleConfig:
    config = target.config
    hidden, heads = target.hidden_size, config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") not in ("default", "llama3", "linear", "yarn"):
        rope = {}  # kinds of one set per layer, or with frequencies that depend on the length
    return EagleConfig(
        version=version,
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab_size=target.vocab_size,
        taps=default_taps(version, target.layers_count),
        target_hidden_size=hidden,
        eps=getattr(config, "rms_norm_eps", 1e-6),
        rope={"rope_type": "default", "rope_theta": 10000.0} | rope,
        max_positions=config.max_position_embeddings,
        own_head=version == 3,
    )


def last_layer(target: CausalModel) -> tuple[dict[str, Tensor], Tensor | None]:
    """Tensors of the target's last decoder layer under Llama's names, and the weight of its final norm.

    Empty and None for families that keep them elsewhere.
    """
    if isinstance(target, LeanModel):
        layer = target.layers[-1]
        qkv = _plain(layer.qkv)
        head_dim = len(qkv) // (target.heads + 2 * target.kv_heads)
        query, key, value = qkv.split([n * head_dim for n in (target.heads, target.kv_heads, target.kv_heads)])
        gate, up = _plain(layer.gate_up).chunk(2)
        return {
            "input_layernorm.weight": layer.norm_in,
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": key,
            "self_attn.v_proj.weight": value,
            "self_attn.o_proj.weight": _plain(layer.out),
            "post_attention_layernorm.weight": layer.norm_mlp,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": _plain(layer.down),
        }, target.final_norm
    base: Any = target.model.base_model
    layers, norm = getattr(base, "layers", None), getattr(getattr(base, "norm", None), "weight", None)
    if not isinstance(layers, nn.ModuleList) or norm is None:
        return {}, None
    return layers[-1].state_dict(), norm


def _plain(product: Product) -> Tensor:
    return product.weight.to_dense() if product.is_packed else product.weight


def _start_layer(head: EagleHead, layer: Mapping[str, Tensor]) -> None:
    """Copy what fits. In version 3 the attention reads [embedding; state]; the target's weights belong to the state."""
    renamed = {name: tensor for name, tensor in layer.items() if name != "input_layernorm.weight"}
    if head.config.version == 3 and "input_layernorm.weight" in layer:
        renamed["hidden_norm.weight"] = layer["input_layernorm.weight"]
    adds = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    for name, parameter in head.layers[0].named_parameters():
        start = renamed.get(name)
        if start is None:
            continue
        if head.config.version == 1 and name in adds:
            parameter.zero_()
            continue
        if parameter.shape == start.shape:
            parameter.copy_(start)
        elif parameter.dim() == 2 and parameter.shape == (start.shape[0], 2 * start.shape[1]):
            parameter.copy_(torch.cat([torch.zeros_like(start), start], 1))


def _start_fusion(head: EagleHead) -> None:
    """fc = [0 … 0, 1]: of everything side by side, the last part goes through."""
    assert head.fc is not None
    nn.init.zeros_(head.fc.weight)
    head.fc.weight[:, -head.config.hidden_size :].fill_diagonal_(1.0)
