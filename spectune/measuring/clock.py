"""The clock of a decoding round.

A GPU runs behind the host: work is queued, and reading the host's clock after a launch measures the launch.
Waiting for the device after each phase would give true times but stall the pipeline that is being measured.
So on CUDA a mark is an event in the stream, and the times are read once, after a single wait at the end of
the round or pass.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import device as Device

Mark = Any  # a host time or a CUDA event: only the clock that made it can read it


class RoundClock(Protocol):
    def mark(self) -> Mark:
        """The present moment in the device's order of work."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds from `start` to `end`; on CUDA only after `sync()`."""

    def sync(self) -> None:
        """Wait until all marked work is done."""


class HostClock:
    """Host time. Given CUDA devices, every mark waits for them, which is exact but costs a stall per mark."""

    def __init__(self, *devices: Device) -> None:
        self._devices = devices

    def mark(self) -> Mark:
        self.sync()
        return time.perf_counter()

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def sync(self) -> None:
        for device in self._devices:
            import torch

            torch.cuda.synchronize(device)


class EventClock:
    """CUDA events on the current stream of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def mark(self) -> Mark:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) / 1e3  # events count milliseconds

    def sync(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)


def make_clock(device: str | Device, draft_device: str | Device | None = None) -> RoundClock:
    """The clock for a target on `device` and a drafter on `draft_device` (default: the same one).

    Two different devices share no stream, so their phases are timed by the host.
    """
    import torch

    devices = {_with_index(torch.device(d)) for d in (device, draft_device) if d is not None}
    gpus = [d for d in devices if d.type == "cuda"]
    if len(devices) == 1 and gpus:
        return EventClock(gpus[0])
    return HostClock(*gpus)


def _with_index(device: Device) -> Device:
    # "cuda" and "cuda:0" are usually one device, but do not compare equal.
    import torch

    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
