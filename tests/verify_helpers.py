"""Tiny engines, requests and specs for audits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from decoding_helpers import random_prompts, requests_of

from spectune.decoding.drafters import BuiltDrafter
from spectune.engines.engine import Request
from spectune.engines.native import NativeEngine
from spectune.sweeping.cell import CellSpec, Sampling

WARM = Sampling(temperature=1.0)


def tiny_engine(folder: Path, dtype: str = "float32") -> NativeEngine:
    return NativeEngine(str(folder), dtype=dtype, device="cpu")


def save_near(folder: Path, target: Path, amount: float = 0.3) -> Path:
    """The target with noise on its output head: a draft that is often, but not always, right."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight += amount * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def spec_of(engine: NativeEngine, drafter: str, **changes: Any) -> CellSpec:
    settings: dict[str, Any] = {
        "target": "tiny",
        "target_digest": engine.target.digest,
        "drafter": drafter,
        "drafter_digest": "d",
        "suite": "s",
        "suite_digest": "s0",
        "k": 4,
        "batch": 8,
        "rule": "speculative",
        "sampling": WARM,
        "max_new_tokens": 24,
        "ignore_eos": True,
        "chat_template": None,
        "dtype": engine.target.dtype,
        "device": "cpu",
        "draft_device": "cpu",
    }
    return CellSpec(**(settings | changes))


def prompts_of(count: int = 4, max_new_tokens: int = 24) -> list[Request]:
    return requests_of(random_prompts(count), max_new_tokens)


def put_drafter(engine: NativeEngine, name: str, drafter: Any) -> str:
    """Make a drafter known to the engine under a name."""
    engine._drafters[name] = BuiltDrafter(drafter, None)
    return name
