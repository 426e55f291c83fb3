"""A device's memory: how much there is, how much is free, and the most that torch held of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spectune.sweeping.cell import Reading


def total_memory(device: str) -> int | None:
    """Bytes of a device (`cpu`, `cuda:0`); None for one that is not here."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory) if torch.cuda.is_available() else None
    import psutil

    return int(psutil.virtual_memory().total) if device == "cpu" else None


def free_memory(device: str) -> int | None:
    """Bytes that nothing uses now; None for a device that is not here."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else None
    import psutil

    return int(psutil.virtual_memory().available) if device == "cpu" else None


@dataclass(slots=True)
class Peak:
    """`reading` is filled in when the watch ends."""

    reading: Reading = field(default_factory=lambda: Reading(value=None, reason="not measured yet"))


@contextmanager
def watch_peak(device: str) -> Iterator[Peak]:
    """The most bytes of a GPU that torch's tensors took at once in this block, all that lived before it included."""
    peak = Peak()
    if not device.startswith("cuda"):
        peak.reading = Reading(value=None, reason=f"torch keeps no peak of its memory on {device}")
        yield peak
        return
    import torch

    torch.cuda.reset_peak_memory_stats(device)
    yield peak
    peak.reading = Reading(value=float(torch.cuda.max_memory_allocated(device)), source="torch.cuda")
