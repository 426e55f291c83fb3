"""A target grown from a draft: the draft's own layers, then further random ones whose output is scaled by ε.

    grown:DRAFT:LAYERS:EPSILON        for instance grown:smollm2:8:0.1

With ε = 0 the new layers add nothing, so the target agrees with the draft at every token and acceptance is exactly 1.
The larger ε, the more they disturb what the draft would say: acceptance is real, and tunable without any training. ε is
relative: at 1, what one new layer adds is about as large as the residual stream that the draft's last layer leaves.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spectune.decoding.adapter import CausalModel, layer_stack
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.random_weights import fill
from spectune.decoding.source import Source
from spectune.errors import UsageError
from spectune.sweeping.cell import WeightOrigin

PREFIX = "grown:"
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"})
_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")  # what writes into the residual stream
_SEED = 1
_MOST_LAYERS = 1000
_PROBE = 32  # tokens


class Grown(NamedTuple):
    """What `grown:…` asks for."""

    draft: str
    layers: int
    epsilon: float


def parse_grown(name: str) -> Grown:
    """Read `grown:DRAFT:LAYERS:EPSILON`. Raises UsageError for anything else."""
    parts = name.removeprefix(PREFIX).rsplit(":", 2)
    example = "for example grown:smollm2:8:0.1"
    if len(parts) != 3 or not parts[0]:
        raise UsageError(f"{name!r} is not grown:DRAFT:LAYERS:EPSILON", example)
    draft, layers, epsilon = parts
    if not (layers.isascii() and layers.isdecimal() and 1 <= int(layers) <= _MOST_LAYERS):
        raise UsageError(f"{name!r}: LAYERS must be from 1 to {_MOST_LAYERS}, not {layers!r}", example)
    try:
        scale = float(epsilon)
    except ValueError:
        scale = math.nan
    if not 0 <= scale < math.inf:
        raise UsageError(f"{name!r}: EPSILON must be 0 or more, not {epsilon!r}", example)
    if draft.startswith(PREFIX):
        raise UsageError(f"{name!r}: a grown model does not grow again", "name the draft itself")
    return Grown(draft, int(layers), scale)


def grow(name: str, base: Source, layers: int, epsilon: float) -> Source:
    """The model of `base` with further layers behind its own, in place.

    Raises:
        UsageError: a family whose layers do not simply add their output.
    """
    model = base.model
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise UsageError(f"cannot grow {name!r}: {config.model_type} is not one of {', '.join(sorted(FAMILIES))}")
    stack = layer_stack(model)
    size = _stream_size(model, stack)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(_SEED)
    for _ in range(layers):
        # The configuration is shared by all layers, and stays so.
        layer = copy.deepcopy(stack[-1], {id(config): config})
        fill(layer.named_parameters(), generator)
        _scale_outputs(layer, epsilon * size)
        _renumber(layer, len(stack))
        stack.append(layer)
    config.num_hidden_layers = len(stack)
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, *[config.layer_types[-1]] * layers]
    weights: WeightOrigin = "random" if base.weights == "random" else "grown"
    digest = f"grown-{base.digest}-{layers}-{epsilon:g}"
    return Source(model.eval().requires_grad_(False), base.tokenizer, digest, weights)


def _stream_size(model: PreTrainedModel, stack: nn.ModuleList) -> float:
    """Root mean square of what the last layer leaves, over a short text of arbitrary tokens."""
    seen: list[Tensor] = []

    def note(module: nn.Module, arguments: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    device = next(model.parameters()).device
    causal = CausalModel(model, device)
    size = min(_PROBE, causal.max_context)
    ids = (torch.arange(size, device=device) * 7 + 3)[None] % causal.vocab_size
    handle = stack[-1].register_forward_hook(note)
    try:
        with torch.inference_mode():
            causal.forward(ids, Step(0, (0,), size, device), KVStore(1, size))
    finally:
        handle.remove()
    # The first tokens of trained models carry a few enormous values; the median over positions is not moved by them.
    return float(seen[0].float().pow(2).mean(-1).sqrt().median())


def _scale_outputs(layer: nn.Module, scale: float) -> None:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(_OUTPUTS):
                parameter.mul_(scale)


def _renumber(layer: nn.Module, index: int) -> None:
    """The cache knows a layer by its number."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = index  # type: ignore[assignment]
