"""An EAGLE head as the drafter runs it: the same computation as `EagleHead`, with less work around the products.

Query, key and value products are one, gate and up are one, weights are laid out for the processor, and rotary angles
come from a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from spectune.decoding.adapter import attend_rows
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.product import Product
from spectune.heads.eagle import EagleHead, turn


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor | None  # [h]
    joint_norm: Tensor | None  # [2, h] for embedding and feature, where the layer joins them
    qkv: Product
    query_norm: Tensor | None  # [d]
    key_norm: Tensor | None
    out: Product
    mlp_norm: Tensor  # [h]
    gate_up: Product
    down: Product


class EagleNetwork:
    """Forward of a bound head over a cache of its own layers.

    Args:
        head: on its device and in its type. It is used up: its matrices are laid out anew and freed.
        product: what multiplies with them.
    """

    def __init__(self, head: EagleHead, product: type[Product] = Product) -> None:
        config = head.config
        self.config = config
        self.head = head
        self.eps = config.eps
        self.layers = [_pack(layer, product) for layer in head.layers]
        self.fc = None if head.fc is None else product.of(head.fc)
        self.final_norm = _weight(head.norm)
        self.output = product(head.output_weight())
        self.device = head.output_weight().device
        self.dtype = head.output_weight().dtype
        self.angles = torch.zeros(0)
        head.head_rows = None
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)

    def make_room(self, positions: int) -> None:
        """Prepare rotary angles for that many positions."""
        if len(self.angles) >= positions:
            return
        place = torch.arange(positions, device=self.device)[None]
        self.angles = torch.cat(self.head.rotary(place, self.dtype), -1)[0, 0]  # [positions, 2 d]

    def fuse(self, states: Tensor) -> Tensor:
        """States of the target -> what a step reads. [..., taps * h_t] -> [..., h]."""
        if self.config.version == 1 or self.fc is None:
            return states
        if self.head.input_norm is not None:
            states = self.head.input_norm(states)
        if self.head.fc_norm is not None:
            parts = states.chunk(len(self.head.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.head.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def step(self, ids: Tensor, features: Tensor, step: Step, store: KVStore) -> Tensor:
        """Feed q places of every row.

        Args:
            ids: [B, q] the tokens behind the places.
            features: [B, q, h] from `fuse` or `following`.
            step: slots and positions of the places.

        Returns:
            [B, q, h], for `logits` and `following`.
        """
        rows, width = ids.shape
        embedded = self.head.embed(ids)
        x = features
        if self.config.version == 1:
            assert self.fc is not None
            if self.head.embed_norm is not None:
                embedded = self.head.embed_norm(embedded)
            x = self.fc(torch.cat([embedded, x], -1))
        cos, sin = self.angles[step.positions][:, None].chunk(2, -1)  # [B, 1, q, d]
        heads, kv_heads = self.config.heads, self.config.kv_heads
        for index, layer in enumerate(self.layers):
            z, residual = x, x
            if layer.joint_norm is not None:
                pair = functional.rms_norm(torch.stack([embedded, x], -2), x.shape[-1:], None, self.eps)
                pair = pair * layer.joint_norm
                z = pair.flatten(-2)
                residual = pair[..., 1, :] if self.config.norm_before_residual else x
            elif layer.input_norm is not None:
                z = self._norm(x, layer.input_norm)
            qkv = layer.qkv(z).view(rows, width, heads + 2 * kv_heads, -1).transpose(1, 2)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key, value = qkv.split([heads, kv_heads, kv_heads], 1)
                turned = torch.cat([self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)], 1)
            else:
                turned, value = qkv.split([heads + kv_heads, kv_heads], 1)
            query, key = turn(turned, cos, sin).split([heads, kv_heads], 1)
            keys, values = store.write(index, key, value, step)
            mixed = attend_rows(query, keys, values, step, None, None)
            x = residual + layer.out(mixed.reshape(rows, width, -1))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(functional.silu(gate) * up)
        return x

    def following(self, output: Tensor) -> Tensor:
        """The feature that the next step reads. [..., h] -> [..., h]."""
        return self._final(output) if self.config.feeds_norm else output

    def logits(self, output: Tensor) -> Tensor:
        """[..., h] -> [..., D]."""
        return self.output(self._final(output))

    def _final(self, x: Tensor) -> Tensor:
        return x if self.final_norm is None else self._norm(x, self.final_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.eps)


def _pack(layer: Any, product: type[Product]) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    input_norm, hidden_norm = _weight(layer.input_layernorm), _weight(layer.hidden_norm)
    return _Layer(
        input_norm=input_norm,
        joint_norm=None if input_norm is None or hidden_norm is None else torch.stack([input_norm, hidden_norm]),
        qkv=product.of(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_weight(attention.q_norm),
        key_norm=_weight(attention.k_norm),
        out=product.of(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=product.of(mlp.gate_proj, mlp.up_proj),
        down=product.of(mlp.down_proj),
    )


def _weight(norm: nn.Module | None) -> Tensor | None:
    return norm.weight if isinstance(norm, nn.RMSNorm) else None
