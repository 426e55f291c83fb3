"""EAGLE heads, versions 1 and 3 (Li et al. 2024, arXiv 2401.15077; Li et al. 2025, arXiv 2503.01840).

A head is one decoder layer (rarely more) that runs beside the target. Place i of a head holds the pair (what the target
knew at position i, token i + 1) and predicts token i + 2, so the head is one token ahead of the target's own output.

    version 1   x = fc([e(t_{i+1}); f_i])        f: the target's state behind its final norm
                f^ = layer(x)                    no norm in front of the attention; logits = W f^
    version 3   g_i = fc([low; mid; high])       three states from inside the target
                z = [norm(e(t_{i+1})); norm(g_i)]
                a = layer(z) with residual g_i;  logits = W norm(a)

Where the target's state is not known yet, the head feeds on its own output in its place: f^ in version 1, a in
version 3 (without fc). EAGLE-2 is version 1 with another way to choose the tree.

Variants that published heads have: norms around the fusion (`fc_norm`, `norm_before_fc`), the residual taken behind the
norm (`norm_before_residual`), the normalised output fed back (`norm_output`, "EAGLE 3.1"), further layers of the
usual form, norms in version 1 (`layernorms`). Tensor names are the published ones, with `layers.0` for `midlayer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectune.errors import UsageError
from spectune.heads.parallel import check_fit, draft_rows

# (layer, query [B, heads, T, d], key [B, kv_heads, T, d], value as key) -> [B, T, heads, d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes and variants of a head."""

    version: Literal[1, 3]
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # of the target
    taps: tuple[int, ...]  # which states of the target it reads, ascending; see `default_taps`
    target_hidden_size: int
    layers: int = 1
    eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 2048  # what the head was trained for; only the scaling types of RoPE read it
    own_embedding: bool = False  # else the target's
    own_head: bool = False  # else the target's rows
    fusion: bool = True  # has fc; version 3 on a single state may go without
    fusion_bias: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False  # per head, as in Qwen3
    layernorms: bool = False  # version 1: on the embedding, in front of the attention, in front of the output head
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def final_norm(self) -> bool:
        return self.version == 3 or self.layernorms

    @property
    def context(self) -> int:
        """Positions up to which the head is meant to run.

        RoPE goes on behind the length of the training texts (published heads say 2048 and are used far beyond it),
        except for kinds whose frequencies change with the length.
        """
        if self.rope.get("rope_type") not in ("dynamic", "longrope"):
            return 1 << 30
        return int(self.rope.get("original_max_position_embeddings") or self.max_positions)

    @property
    def feeds_norm(self) -> bool:
        """Whether the next step reads the normalised output.

        In version 1 the target's features are normalised ones, so with a norm before the output head its result is
        the predicted feature.
        """
        return self.norm_output or (self.version == 1 and self.layernorms)


def default_taps(version: Literal[1, 3], layers: int) -> tuple[int, ...]:
    """States that a head reads from a target of `layers` layers: i is what enters layer i, `layers` the normed output.

    Version 3: 2, L // 2 and L - 3, as in the authors' code; a target of fewer than 7 layers has fewer distinct ones.
    """
    if version == 1:
        return (layers,)
    return tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)}))


class Rotary:
    """Rotary position embedding: fixed frequencies, whatever the length."""

    def __init__(self, config: EagleConfig) -> None:
        settings = LlamaConfig(
            hidden_size=config.heads * config.head_dim,
            num_attention_heads=config.heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rope),
        )
        module = LlamaRotaryEmbedding(settings)
        self.frequencies: Tensor = module.inv_freq.float()  # [d / 2]; not a buffer, whose precision `to` would cut
        self.scaling = float(module.attention_scaling)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[B, T] -> cosine and signed sine, [B, 1, T, d] each, as `turn` takes them."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self.frequencies
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, heads, T, d]; the sign of rotate_half is in the sine."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Projections of one layer's attention; who attends to what is the caller's matter."""

    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__()
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, config.eps) if config.query_key_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.eps) if config.query_key_norm else None
        self.head_dim = config.head_dim

    def forward(self, z: Tensor, layer: int, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[B, T, width] -> [B, T, h]."""
        query, key, value = (
            projection(z).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = cos.to(query.dtype), sin.to(query.dtype)  # they differ where training multiplies in half precision
        mixed = attend(layer, turn(query, cos, sin), turn(key, cos, sin), value)
        return self.o_proj(mixed.flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """One decoder layer.

    The first one of version 3 reads the embedding and the feature side by side; the first one of version 1 has no norm
    in front of its attention; all others are of the usual Llama form.
    """

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.joins = config.version == 3 and index == 0
        self.norm_before_residual = config.norm_before_residual
        h = config.hidden_size
        has_input_norm = index > 0 or config.version == 3 or config.layernorms
        self.input_layernorm = nn.RMSNorm(h, config.eps) if has_input_norm else None
        self.hidden_norm = nn.RMSNorm(h, config.eps) if self.joins else None
        self.self_attn = Attention(config, 2 * h if self.joins else h)
        self.post_attention_layernorm = nn.RMSNorm(h, config.eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x, embedded: [B, T, h] -> [B, T, h]. Only a joining layer reads the embedding."""
        z, residual = x, x
        if self.input_layernorm is not None:
            z = self.input_layernorm(embedded if self.joins else x)
        if self.hidden_norm is not None:
            normed = self.hidden_norm(x)
            z = torch.cat([z, normed], -1)
            residual = normed if self.norm_before_residual else x
        x = residual + self.self_attn(z, self.index, cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """An EAGLE head. Where training multiplies in half precision, what runs along the residuals stays as it came in.

    Args:
        config: sizes and variants.
        draft_ids: [D] target ids of the draft vocabulary, ascending; None for the whole one.
    """

    draft_ids: Tensor | None
    embedding: Tensor | None  # [V, h] the target's, where the head has none of its own
    head_rows: Tensor | None  # [D, h] likewise

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("embedding", None, persistent=False)
        self.register_buffer("head_rows", None, persistent=False)
        h, eps, taps = config.hidden_size, config.eps, len(config.taps)
        wide = taps * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, h) if config.own_embedding else None
        self.embed_norm = nn.RMSNorm(h, eps) if config.version == 1 and config.layernorms else None
        self.input_norm = nn.RMSNorm(wide, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps) for _ in range(taps)) if config.fc_norm else None
        )
        fused = 2 * h if config.version == 1 else wide
        self.fc = nn.Linear(fused, h, bias=config.fusion_bias) if config.fusion else None
        self.layers = nn.ModuleList(EagleLayer(config, index) for index in range(config.layers))
        self.norm = nn.RMSNorm(h, eps) if config.final_norm else None
        self.lm_head = nn.Linear(h, self.draft_size, bias=False) if config.own_head else None
        self.rotary = Rotary(config)

    @property
    def draft_size(self) -> int:
        """D, the width of the logits."""
        return self.config.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def bind(self, embedding: Tensor, head_weight: Tensor) -> None:
        """Take from the target what the head does not bring itself.

        Args:
            embedding: [V, h] input embeddings of the target.
            head_weight: [V, h] its output head.

        Raises:
            UsageError: a head made for another target.
        """
        check_fit(self.config.target_hidden_size, self.config.vocab_size, self.draft_ids, head_weight)
        for is_own, name, weight in (
            (self.config.own_embedding, "embed_tokens.weight", embedding),
            (self.config.own_head, "lm_head.weight", head_weight),
        ):
            if not is_own and weight.shape[1] != self.config.hidden_size:
                raise UsageError(
                    f"the head is {self.config.hidden_size} wide, the target {weight.shape[1]}, and the head has no "
                    f"{name} of its own",
                    "use a head trained for this target",
                )
        # Detached: a parameter would become the head's own.
        embedding, head_weight = embedding.detach(), head_weight.detach()
        own = self.embed_tokens
        if own is not None and own.weight.shape == embedding.shape and torch.equal(own.weight.to(embedding), embedding):
            self.embed_tokens = None  # many files carry a copy of the target's
        if self.embed_tokens is None:
            self.embedding = embedding
        if not self.config.own_head:
            self.head_rows = draft_rows(head_weight, self.draft_ids)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] target ids -> [..., h]. A padding id only the target has becomes the head's last one."""
        if self.embed_tokens is not None:
            return functional.embedding(ids.clamp(max=self.config.vocab_size - 1), self.embed_tokens.weight)
        assert self.embedding is not None, "bind() gives the head the target's embedding"
        return functional.embedding(ids, self.embedding)

    def fuse(self, states: Tensor) -> Tensor:
        """What the head reads in place of its own output, from the target's states. [..., taps * h_t] -> [..., h]."""
        if self.config.version == 1 or self.fc is None:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states).to(states.dtype)

    def forward(self, ids: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step at T places.

        Args:
            ids: [B, T] the token behind each place.
            features: [B, T, h] from `fuse`, or from `following` of an earlier step.
            positions: [B, T] of the places.
            attend: what the places see.

        Returns:
            [B, T, h], for `logits` and `following`.
        """
        embedded = self.embed(ids).to(features.dtype)
        x = features
        if self.config.version == 1:
            if self.embed_norm is not None:
                embedded = self.embed_norm(embedded)
            assert self.fc is not None
            x = self.fc(torch.cat([embedded, x], -1)).to(x.dtype)
        cos, sin = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, embedded, cos, sin, attend)
        return x

    def following(self, hidden: Tensor) -> Tensor:
        """The feature that the next step reads. [..., h] -> [..., h]."""
        return self.norm(hidden) if self.norm is not None and self.config.feeds_norm else hidden

    def output_state(self, hidden: Tensor) -> Tensor:
        """What the output rows multiply. [..., h] -> [..., h]."""
        return hidden if self.norm is None else self.norm(hidden)

    def output_weight(self) -> Tensor:
        """[D, h]"""
        weight = self.head_rows if self.lm_head is None else self.lm_head.weight
        assert weight is not None, "bind() gives the head its output rows"
        return weight

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., h] -> [..., D]."""
        return functional.linear(self.output_state(hidden), self.output_weight())

    def run(self, states: Tensor, ids: Tensor) -> Tensor:
        """The head over whole sequences of true states: plain causal attention.

        Args:
            states: [B, T, taps * h_t] of positions 0 … T - 1.
            ids: [B, T] tokens at positions 1 … T.

        Returns:
            [B, T, h]
        """
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self(ids, self.fuse(states), positions, attend_causally)


def attend_causally(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each place sees itself and all before it. Shapes as in `Attend`."""
    mixed = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
    )
    return mixed.transpose(1, 2)
