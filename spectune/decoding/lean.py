"""A direct forward for the Llama family: the same weights with less work around them.

On a small model a third of a step is spent between the matrix products. Here the query, key and value products are
one, gate and up are one, normalisation and rotary embedding take a few operations, nothing is wrapped, and weights
are laid out for the processor. Models of other families, and any whose logits differ here from those of their own
forward, keep the general path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
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
    runs_attention: bool = True  # a block that does not run passes its input on
    runs_mlp: bool = True


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
        self.finish: Callable[[Tensor], Tensor] = self._normalize  # between the layers and the output head

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
        x = functional.embedding(ids, self.embedding)  # [B, q, h]
        cos, sin = self.rotary(x, step.positions.clamp(max=self.max_context - 1))  # [B, q, head_dim]
        half = cos.shape[-1] // 2
        # rotate_half(x) * sin, written as roll(x) * (-sin, sin): one operation less per layer.
        cos = cos[:, None]
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, None]
        for number, layer in enumerate(self.layers):
            if number in taps:
                tapped.append(x)
            if layer.runs_attention:
                x = x + self._attend(x, layer, cos, sin, step, store)
            if layer.runs_mlp:
                hidden = functional.rms_norm(x, layer.norm_mlp.shape, layer.norm_mlp, self.eps)
                gate, up = layer.gate_up(hidden).chunk(2, -1)
                x = x + layer.down(functional.silu(gate) * up)
        x = self.finish(x)
        if len(self.layers) in taps:
            tapped.append(x)
        return x, torch.cat(tapped, -1) if tapped else x[..., :0]

    def _normalize(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.final_norm.shape, self.final_norm, self.eps)

    def _attend(self, x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, step: Step, store: KVStore) -> Tensor:
        """A layer's attention block without its residual. x [B, q, h]; cos, sin [B, 1, q, head_dim] -> [B, q, h]."""
        rows, width, _ = x.shape
        hidden = functional.rms_norm(x, layer.norm_in.shape, layer.norm_in, self.eps)
        qkv = layer.qkv(hidden).view(rows, width, self.heads + 2 * self.kv_heads, -1).transpose(1, 2)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            query = functional.rms_norm(query, layer.q_norm.shape, layer.q_norm, self.eps)
            key = functional.rms_norm(key, layer.k_norm.shape, layer.k_norm, self.eps)
            turned = torch.cat([query, key], 1)
        else:
            turned, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        turned = torch.addcmul(turned * cos, turned.roll(cos.shape[-1] // 2, -1), sin)
        query, key = turned.split([self.heads, self.kv_heads], 1)
        keys, values = store.write(layer.index, key, value, step)
        mixed = attend_rows(query, keys, values, step, layer.scaling, layer.window)
        return layer.out(mixed.reshape(rows, width, -1))

    def subset(self, layers: Sequence[int]) -> LeanModel:
        twin = copy.copy(self)
        twin.model = super().subset(layers).model
        twin.layers = [self.layers[i] for i in layers]
        return twin

    def without_blocks(self, attention: Collection[int], mlp: Collection[int]) -> LeanModel:
        """The same weights with single blocks left out; the cache layers keep their numbers.

        The twin's module holds what still runs, for its sizes only: its own forward is lost.

        Args:
            attention: layers whose attention does not run.
            mlp: layers whose MLP does not run.

        Raises:
            UsageError: nothing left to run.
        """
        kept = [i for i in range(len(self.layers)) if i not in attention or i not in mlp]
        twin = self.subset(kept)
        twin.layers = [replace(self.layers[i], runs_attention=i not in attention, runs_mlp=i not in mlp) for i in kept]
        stack: Any = twin.model.base_model.layers
        for place, i in enumerate(kept):
            if i in attention:
                stack[place] = _without(stack[place], "self_attn", "input_layernorm")
            if i in mlp:
                stack[place] = _without(stack[place], "mlp", "post_attention_layernorm")
        return twin

    def with_exit(self, model: Any, finish: Callable[[Tensor], Tensor], head: Product) -> LeanModel:
        """The same layers with another way out.

        Args:
            model: a module of these layers and that way out, for its sizes.
            finish: what stands between the layers and the output head. [B, q, h] -> [B, q, h].
            head: the output head, perhaps of another width than the vocabulary.
        """
        twin = copy.copy(self)
        twin.model, twin.finish, twin.head = model, finish, head
        return twin

    def int8(self) -> LeanModel:
        """The same model with copies of its matrices in 8 bits. Raises UsageError where there are no such products."""
        twin = copy.copy(self)
        twin.layers = [
            replace(x, qkv=x.qkv.int8(), out=x.out.int8(), gate_up=x.gate_up.int8(), down=x.down.int8())
            for x in self.layers
        ]
        twin.head = self.head.int8()
        return twin

    def drop_originals(self) -> None:
        """Free the module weights that the products hold copies of; sizes and types stay known.

        The output head stays: drafters read rows of it.
        """
        kept = {id(m.weight) for m in (self.model.get_input_embeddings(), self.model.get_output_embeddings())}
        for module in self.model.modules():
            if isinstance(module, nn.Linear) and id(module.weight) not in kept:
                module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)


def _without(module: nn.Module, *names: str) -> nn.Module:
    """A copy of a module without some of its children; parameters are shared."""
    twin = copy.copy(module)
    twin._modules = {name: child for name, child in module._modules.items() if name not in names}
    return twin


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
