"""Whether a decoder records its rounds (see `decoding.graphs`)."""

from __future__ import annotations

import os

VARIABLE = "SPECTUNE_GRAPHS"  # 1: also on a CPU, where it only costs time; 0: nowhere


def recorded(device: str, wanted: bool | None = None) -> bool:
    """As wanted, else as the environment says, else on CUDA.

    Args:
        device: as torch writes it, such as cuda:0.
    """
    if wanted is not None:
        return wanted
    said = os.environ.get(VARIABLE, "")
    return said == "1" if said in ("0", "1") else device.startswith("cuda")
