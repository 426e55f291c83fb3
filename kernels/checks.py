"""What several launchers ask of their arguments. An assertion names the argument and what is wrong with it."""

from __future__ import annotations

import torch


def check_logits(name: str, logits: torch.Tensor) -> None:
    """`name` takes logits in a dtype that models compute in, with the vocabulary contiguous."""
    assert logits.dtype in (torch.float32, torch.float16, torch.bfloat16), f"{name} takes no {logits.dtype} logits"
    assert logits.stride(-1) == 1, f"{name} needs logits whose vocabulary is contiguous"


def check_integers(device: torch.device, **tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        assert x.dtype == torch.int64, f"{name} must be int64, not {x.dtype}"
        assert x.device == device, f"{name} must be on {device}, not on {x.device}"


def check_rows(rows: int, device: torch.device, **tensors: torch.Tensor) -> None:
    """One int64 number per row."""
    check_integers(device, **tensors)
    for name, x in tensors.items():
        assert x.shape == (rows,), f"{name} must be [{rows}], not {list(x.shape)}"
        assert x.is_contiguous(), f"{name} must be contiguous"


def check_chain(name: str, logits: torch.Tensor, tokens: torch.Tensor, **keys: torch.Tensor) -> None:
    """Logits of K + 1 places, K drafted tokens, and numbers of each row."""
    check_logits(name, logits)
    rows, places, _ = logits.shape
    assert tokens.shape == (rows, places - 1), f"tokens must be {[rows, places - 1]}, not {list(tokens.shape)}"
    check_integers(logits.device, tokens=tokens)
    check_rows(rows, logits.device, **keys)
