"""A direct forward for the Llama family: the same weights with less work around them.

On a small model a third of a step is spent between the matrix products. Here the query, key and value products are
one, gate and up are one, normalisation and rotary embedding take a few operations, nothing is wrapped, and weights
are laid out for the processor. Models of other families, and any whose logits differ here from those of their own
forward, keep the general path.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from spectune.decoding.adapter import CausalModel, attend_rows
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.product import Product

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer; `index` is its number in the cache."""

    index: int
    norm_in: Tensor  # [h]
    qkv: Product  # h -> (heads + 2 kv_heads) * head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Product  # heads * head_dim -> h
    norm_mlp: Tensor  # [h]
    gate_up: Product  # h -> 2 f
    down: Product  # f -> h
    window: int | None
    scaling: float


class LeanModel(CausalModel):
    """A CausalModel whose forward is written out."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        base = model.base_model
        self.heads: int = self.config.num_attention_heads
        self.kv_heads: int = self.config.num_key_value_heads
        self.eps: float = self.config.rms_norm_eps
        self.final_norm: Tensor = base.norm.weight
        self.rotary = base.rotary_emb
        self.layers = [_layer(module) for module in base.layers]
        self.head = Product.of(model.get_output_embeddings())

    def forward(self, ids: Tensor, step: Step, store: KVStore, *, last_only: bool = False) -> Tensor:
        x, _ = self._states(ids, step, store, ())
        return self.head(x[:, -1:] if last_only else x)

    def forward_with_states(
        self, ids: Tensor, step: Step, store: KVStore, taps: tuple[int, ...], *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        x, states = self._states(ids, step, store, taps)
        return self.head(x[:, -1:] if last_only else x), states

    def _states(self, ids: Tensor, step: Step, store: KVStore, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """What the head reads [B, q, h], and the states at the taps [B, q, len(taps) * h]."""
        tapped: list[Tensor] = []
        rows, width = ids.shape
        x = functional.embedding(ids, self.embedding)  # [B, q, h]
        cos, sin = self.rotary(x, step.positions.clamp(max=self.max_context - 1))  # [B, q, head_dim]
        half = cos.shape[-1] // 2
        # rotate_half(x) * sin, written as roll(x) * (-sin, sin): one operation less per layer.
        cos = cos[:, None]
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, None]
        for number, layer in enumerate(self.layers):
            if number in taps:
                tapped.append(x)
            hidden = functional.rms_norm(x, layer.norm_in.shape, layer.norm_in, self.eps)
            qkv = layer.qkv(hidden).view(rows, width, self.heads + 2 * self.kv_heads, -1).transpose(1, 2)
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
                query = functional.rms_norm(query, layer.q_norm.shape, layer.q_norm, self.eps)
                key = functional.rms_norm(key, layer.k_norm.shape, layer.k_norm, self.eps)
                turned = torch.cat([query, key], 1)
            else:
                turned, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
            turned = torch.addcmul(turned * cos, turned.roll(half, -1), sin)
            query, key = turned.split([self.heads, self.kv_heads], 1)
            keys, values = store.write(layer.index, key, value, step)
            mixed = attend_rows(query, keys, values, step, layer.scaling, layer.window)
            x = x + layer.out(mixed.reshape(rows, width, -1))
            hidden = functional.rms_norm(x, layer.norm_mlp.shape, layer.norm_mlp, self.eps)
            gate, up = layer.gate_up(hidden).chunk(2, -1)
            x = x + layer.down(functional.silu(gate) * up)
        x = functional.rms_norm(x, self.final_norm.shape, self.final_norm, self.eps)
        if len(self.layers) in taps:
            tapped.append(x)
        return x, torch.cat(tapped, -1) if tapped else x[..., :0]

    def subset(self, layers: Sequence[int]) -> LeanModel:
        twin = copy.copy(self)
        twin.model = super().subset(layers).model
        twin.layers = [self.layers[i] for i in layers]
        return twin

    def drop_originals(self) -> None:
        """Free the module weights that the products hold copies of; sizes and types stay known.

        The output head stays: drafters read rows of it.
        """
        kept = {id(self.embedding), id(self.head_rows())}
        for module in self.model.modules():
            if isinstance(module, nn.Linear) and id(module.weight) not in kept:
                module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)


def _layer(module: Any) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    # Mistral's window is in its config, the others' in the layers that have one.
    mistral_window = attention.config.sliding_window if attention.config.model_type == "mistral" else None
    return Layer(
        index=attention.layer_idx,
        norm_in=module.input_layernorm.weight,
        qkv=Product.of(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=q_norm.weight if q_norm is not None else None,
        k_norm=k_norm.weight if k_norm is not None else None,
        out=Product.of(attention.o_proj),
        norm_mlp=module.post_attention_layernorm.weight,
        gate_up=Product.of(mlp.gate_proj, mlp.up_proj),
        down=Product.of(mlp.down_proj),
        window=getattr(attention, "sliding_window", mistral_window),
        scaling=attention.scaling,
    )


def lean(causal: CausalModel) -> CausalModel:
    """The direct forward of a model of a known family whose logits it reproduces, else the model as it is."""
    config = causal.config
    if (
        config.model_type not in FAMILIES
        or config.hidden_act != "silu"
        or any(isinstance(m, nn.Linear) and type(m) is not nn.Linear for m in causal.model.modules())
    ):
        return causal
    size = min(16, causal.max_context)
    ids = (torch.arange(size, device=causal.device) * 7 + 3)[None] % causal.vocab_size
    step = Step(0, (0,), size, causal.device)
    direct = LeanModel(causal.model, causal.device)
    with torch.inference_mode():
        expected = causal.forward(ids, step, KVStore(1, size)).float()
        difference = (direct.forward(ids, step, KVStore(1, size)).float() - expected).abs().mean()
    tolerance = 1e-4 if causal.model.dtype == torch.float32 else 0.1
    if not difference < tolerance * expected.std():
        return causal
    direct.drop_originals()
    return direct
