"""Models of a given shape with random weights, made where they will run.

The module is built on the meta device, given memory on the real one in the wanted dtype, and filled parameter by
parameter, so that no weight ever exists twice. A weight is normal with a variance of 1 / fan-in: products keep the size
of their input, so that activations stay finite at any depth and in any dtype.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from spectune.decoding.adapter import ATTENTION
from spectune.decoding.hash_tokenizer import HashTokenizer
from spectune.decoding.shapes import shape_config
from spectune.decoding.source import Source
from spectune.errors import UsageError
from spectune.measuring.device_memory import free_memory

_SEED = 0


def random_source(name: str, *, device: torch.device, dtype: torch.dtype) -> Source:
    """The model that `shape:…` asks for.

    Raises:
        UsageError: no such shape, a configuration that makes no causal language model, or more weights than the device
            has room for.
    """
    config = shape_config(name)
    model = on_meta(name, config, dtype)
    _check_room(name, model, device, dtype)
    model = model.to_empty(device=device)
    _fill_buffers(name, model)
    generator = torch.Generator(device).manual_seed(_SEED)
    fill(model.named_parameters(), generator)
    model.tie_weights()
    canonical = json.dumps([config, _SEED], sort_keys=True)
    digest = "random-" + hashlib.sha256(canonical.encode()).hexdigest()[:16]
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return Source(model.eval().requires_grad_(False), HashTokenizer(vocab_size), digest, "random")


def on_meta(name: str, config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The module without memory: its sizes are known, its weights are not."""
    try:
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=ATTENTION)
    except Exception as error:  # whatever a configuration of the user's own makes transformers raise
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"cannot build {name[:60]!r}: {message[:200]}", "check the configuration") from error


def fill(parameters: Iterable[tuple[str, Tensor]], generator: torch.Generator) -> None:
    """Random matrices, norms of one and biases of zero, in place, in the order given."""
    with torch.no_grad():
        for name, parameter in parameters:
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)


def _check_room(name: str, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    free = free_memory(str(device))
    if free is not None and needed > free:
        raise UsageError(
            f"{name[:60]!r} has {needed / 1e9:.1f} GB of weights in {str(dtype).removeprefix('torch.')}, "
            f"and {device} has {free / 1e9:.1f} GB free",
            "choose a smaller shape or another --dtype",
        )


def _fill_buffers(name: str, model: PreTrainedModel) -> None:
    """What is computed from the configuration (rotary frequencies) had no values on the meta device."""
    for module in model.modules():
        own = [buffer for _, buffer in module.named_buffers(recurse=False) if buffer.is_floating_point()]
        if not own:
            continue
        for buffer in own:
            buffer.fill_(torch.nan)
        model._init_weights(module)
        if any(not torch.isfinite(buffer).all() for buffer in own):
            raise UsageError(
                f"{name[:60]!r}: {type(module).__name__} keeps values that random weights cannot replace",
                "choose a shape of another family",
            )
