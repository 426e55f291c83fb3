"""The device: turns what the user wrote (`auto`, `cpu`, `cuda`, `cuda:1`) into a torch device string."""

from __future__ import annotations

import re

from spectune.errors import UsageError


def resolve_device(text: str = "auto") -> str:
    """`cpu` or `cuda:N`, checked to exist. `auto` is the first GPU where there is one.

    Raises UsageError for another word, and for a GPU that torch does not see.
    """
    found = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", text)
    if not found:
        raise UsageError(f"unknown device {text!r}", "auto, cpu, cuda or cuda:N")
    if text == "cpu":
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return "cuda:0" if count else "cpu"
    if not count:
        raise UsageError("torch sees no CUDA device", "--device cpu, or spectune doctor to learn why")
    index = int(found[1]) if found[1] else torch.cuda.current_device()
    if index >= count:
        raise UsageError(f"there is no cuda:{index}", f"torch sees cuda:0 to cuda:{count - 1}")
    return f"cuda:{index}"
