"""Whether a decoder records its rounds (see `decoding.graphs`), and whether a cell's passes take turns."""

from __future__ import annotations

import os

from spectune.sweeping.cell import CellSpec

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


def interleaved(spec: CellSpec) -> bool:
    """Whether a cell's plain and speculative pass take turns round by round.

    Not with recordings, whose buffers both passes share; and a GPU's counters are read over whole passes.
    """
    return spec.device == spec.draft_device == "cpu" and not spec.graphs
