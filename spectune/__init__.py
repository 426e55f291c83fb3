"""spectune benchmarks and tunes speculative decoding of large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectune.api import generate, sweep

__version__ = "0.1.0"
__all__ = ["__version__", "generate", "sweep"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: importing spectune must not import torch.
    if name in ("generate", "sweep"):
        from spectune import api

        return getattr(api, name)
    raise AttributeError(f"module 'spectune' has no attribute {name!r}")
