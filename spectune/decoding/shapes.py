"""Shapes of public models: their configurations without their weights.

    shape:llama-3.1-8b        a name of the table below
    shape:FILE.json           a configuration of your own, or a folder that holds one
    shape:{"model_type": …}   the same, written out

Sizes are those of the published `config.json` files. Names carry no licence of weights: nothing is downloaded.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spectune.errors import UsageError

PREFIX = "shape:"
RANDOM_HEAD = "shape"  # as in eagle3:shape

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_QWEN = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_QWEN3 = _QWEN | {"model_type": "qwen3", "num_key_value_heads": 8}
_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _SMOLLM2 | _sizes(576, 1536, 30, 9, num_key_value_heads=3),
    "smollm2-360m": _SMOLLM2 | _sizes(960, 2560, 32, 15, num_key_value_heads=5),
    "smollm2-1.7b": _SMOLLM2 | _sizes(2048, 8192, 24, 32, num_key_value_heads=32),
    "llama-3.2-1b": _LLAMA
    | _sizes(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0)),
    "llama-3.2-3b": _LLAMA
    | _sizes(3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True, rope_parameters=_llama3_rope(32.0)),
    "llama-3.1-8b": _LLAMA | _sizes(4096, 14336, 32, 32, tie_word_embeddings=False, rope_parameters=_llama3_rope(8.0)),
    "llama-3.1-70b": _LLAMA | _sizes(8192, 28672, 80, 64, tie_word_embeddings=False, rope_parameters=_llama3_rope(8.0)),
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-1.7b": _QWEN3 | _sizes(2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3-4b": _QWEN3 | _sizes(2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32, tie_word_embeddings=False),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64, tie_word_embeddings=False),
    "qwen3-30b-a3b": _QWEN
    | _sizes(
        2048,
        6144,
        48,
        32,
        model_type="qwen3_moe",
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}


def shape_config(name: str) -> dict[str, Any]:
    """The configuration behind `shape:…`, with its `model_type`.

    Raises:
        UsageError: no such shape, an unreadable file, or no JSON object with a `model_type`.
    """
    text = name.removeprefix(PREFIX)
    if text in SHAPES:
        return dict(SHAPES[text])
    if not text.startswith("{"):
        text = _read(name, text)
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{_short(name)} is no JSON: {error}", "write a configuration as config.json has it") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f'{_short(name)} names no "model_type"', 'for example shape:{"model_type": "llama", …}')
    return config


def _read(name: str, where: str) -> str:
    path = Path(where).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" or not where:
        close = difflib.get_close_matches(where.lower(), SHAPES, n=1, cutoff=0.8)
        meant = f"did you mean shape:{close[0]}? " if close else ""
        raise UsageError(f"no shape {where!r}", f"{meant}the shapes are {', '.join(SHAPES)}, or name a FILE.json")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(
            f"{name}: {reason}", f"name a file with a configuration, or one of {', '.join(SHAPES)}"
        ) from None


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:59] + "…"
