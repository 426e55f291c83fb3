"""An EAGLE head written a second time, one place at a time and in float64, to compare with; and tiny random heads."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from spectune.heads.eagle import EagleConfig, EagleHead, default_taps

HIDDEN, VOCAB = 64, 128


def tiny_config(version: int, *, layers: int = 2, **changes) -> EagleConfig:
    """The geometry of conftest's tiny target, or of one with another number of layers."""
    settings = {
        "version": version,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "taps": default_taps(version, layers),
        "target_hidden_size": HIDDEN,
        "own_head": version == 3,
    }
    return EagleConfig(**(settings | changes))


VARIANTS = {
    "eagle": tiny_config(1),
    "eagle with bias": tiny_config(1, fusion_bias=True),
    "eagle with norms": tiny_config(1, layernorms=True),
    "eagle with an embedding of its own": tiny_config(1, own_embedding=True),
    "eagle3": tiny_config(3, layers=8),
    "eagle3 norm before residual": tiny_config(3, layers=8, norm_before_residual=True),
    "eagle3 norm fed back": tiny_config(3, layers=8, norm_output=True),
    "eagle3 norm before fc": tiny_config(3, layers=8, norm_before_fc=True),
    "eagle3 norm of each state": tiny_config(3, layers=8, fc_norm=True),
    "eagle3 with biases": tiny_config(3, layers=8, attention_bias=True, output_bias=True, mlp_bias=True),
    "eagle3 with query and key norms": tiny_config(3, layers=8, query_key_norm=True),
    "eagle3 without fusion": tiny_config(3, taps=(8,), fusion=False),
    "eagle3 with the target's head": tiny_config(3, layers=8, own_head=False),
}


def tiny_head(config: EagleConfig, *, draft_ids: Tensor | None = None, seed: int = 0) -> EagleHead:
    """Random weights, wide enough that choices vary; bound to random embeddings and output rows."""
    torch.manual_seed(seed)
    head = EagleHead(config, draft_ids)
    randomize(head)
    head.bind(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN) * 0.3)
    return head


def randomize(head: EagleHead) -> None:
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[1]))


class NaiveHead:
    """The published formulas, place by place. Weights under the names of `layers.0`; biases where they are given."""

    def __init__(
        self,
        version: int,
        weights: dict[str, Tensor],
        *,
        embedding: Tensor,
        head_rows: Tensor,
        heads: int = 4,
        kv_heads: int = 2,
        eps: float = 1e-6,
        theta: float = 10000.0,
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        self.version = version
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        self.embedding, self.head_rows = embedding.double(), head_rows.double()
        self.heads, self.kv_heads, self.eps, self.theta = heads, kv_heads, eps, theta
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
        self.past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.layers)]

    def fork(self) -> NaiveHead:
        twin = copy.copy(self)
        twin.past = [list(pairs) for pairs in self.past]
        return twin

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.eps) * self.w[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        out = torch.empty_like(x)
        for j in range(half):
            angle = position * self.theta ** (-2 * j / len(x))
            out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
            out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
        return out

    def fuse(self, state: Tensor) -> Tensor:
        state = state.double()
        if self.version == 1:
            return state
        if "input_norm.weight" in self.w:
            state = self._norm(state, "input_norm")
        if "fc_norm.0.weight" in self.w:
            parts = state.split(HIDDEN)
            state = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self._linear(state, "fc") if "fc.weight" in self.w else state

    def step(self, token: int, feature: Tensor, position: int) -> Tensor:
        """Feed one place; returns its output and remembers its keys."""
        e = self.embedding[token]
        x = feature
        if self.version == 1:
            if "embed_norm.weight" in self.w:
                e = self._norm(e, "embed_norm")
            x = self._linear(torch.cat([e, feature]), "fc")
        for layer in range(self.layers):
            name = f"layers.{layer}"
            residual, z = x, x
            if self.version == 3 and layer == 0:
                normed = self._norm(x, f"{name}.hidden_norm")
                z = torch.cat([self._norm(e, f"{name}.input_layernorm"), normed])
                residual = normed if self.norm_before_residual else x
            elif f"{name}.input_layernorm.weight" in self.w:
                z = self._norm(x, f"{name}.input_layernorm")
            x = residual + self._attend(layer, z, position)
            y = self._norm(x, f"{name}.post_attention_layernorm")
            gate = self._linear(y, f"{name}.mlp.gate_proj")
            x = x + self._linear(
                gate * torch.sigmoid(gate) * self._linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
            )
        return x

    def _attend(self, layer: int, z: Tensor, position: int) -> Tensor:
        name = f"layers.{layer}.self_attn"
        split = {}
        for part, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            rows = self._linear(z, f"{name}.{part}_proj").chunk(count)
            if f"{name}.{part}_norm.weight" in self.w:
                rows = [self._norm(row, f"{name}.{part}_norm") for row in rows]
            split[part] = list(rows) if part == "v" else [self._rotate(row, position) for row in rows]
        self.past[layer].append((torch.stack(split["k"]), torch.stack(split["v"])))
        keys = torch.stack([k for k, _ in self.past[layer]])  # [n, kv_heads, d]
        values = torch.stack([v for _, v in self.past[layer]])
        mixed = []
        for head, query in enumerate(split["q"]):
            group = head // (self.heads // self.kv_heads)
            weights = (keys[:, group] @ query / math.sqrt(len(query))).softmax(0)
            mixed.append(weights @ values[:, group])
        return self._linear(torch.cat(mixed), f"{name}.o_proj")

    def following(self, output: Tensor) -> Tensor:
        feeds_norm = self.norm_output or (self.version == 1 and "norm.weight" in self.w)
        return self._norm(output, "norm") if feeds_norm else output

    def logits(self, output: Tensor) -> Tensor:
        x = self._norm(output, "norm") if "norm.weight" in self.w else output
        return self.w.get("lm_head.weight", self.head_rows) @ x

    def run(self, states: Tensor, ids: Tensor) -> Tensor:
        """Outputs over one text. states [T, taps * h], ids [T] the tokens behind -> [T, h]."""
        return torch.stack(
            [
                self.step(int(token), self.fuse(state), i)
                for i, (state, token) in enumerate(zip(states, ids, strict=True))
            ]
        )


def naive(head: EagleHead) -> NaiveHead:
    """The same head, written the other way."""
    embedding = head.embedding if head.embed_tokens is None else head.embed_tokens.weight
    return NaiveHead(
        head.config.version,
        head.state_dict(),
        embedding=embedding,
        head_rows=head.output_weight(),
        heads=head.config.heads,
        kv_heads=head.config.kv_heads,
        eps=head.config.eps,
        theta=head.config.rope["rope_theta"],
        norm_before_residual=head.config.norm_before_residual,
        norm_output=head.config.norm_output,
    )
