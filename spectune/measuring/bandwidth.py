"""The achievable peak: how many bytes per second this device's memory really moves.

A data sheet's bandwidth is never reached, so utilisation is stated against what a plain copy reaches here. A
copy reads and writes every byte and both are counted. On a CPU the copy figure is too low a ceiling for
decoding, which only reads: a store often fetches its cache line first, traffic that nobody counts. So a read
is timed as well, and the peak is the fastest stream of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from spectune.errors import UsageError
from spectune.measuring.host import last_level_cache_bytes
from spectune.measuring.nvml_device import NvmlUnavailable, derived_peak, open_gpu
from spectune.sweeping.cell import Reading

if TYPE_CHECKING:
    import torch

CPU_BUFFER_BYTES = 192 << 20  # two of them stay below 512 MB and well beyond most last-level caches
GPU_BUFFER_BYTES = 1 << 30
SMALLEST_BUFFER_BYTES = 1 << 20
CACHES_BEYOND = 4  # a buffer this many times the cache is read from memory
FEWEST_RUNS = 3
MOST_RUNS = 50


@dataclass(frozen=True, slots=True)
class Rate:
    """One way to stream memory. `bytes_moved` are reads plus writes of one run; `seconds` has every run."""

    method: str
    writes: bool
    bytes_moved: int
    seconds: tuple[float, ...]

    @property
    def bytes_per_second(self) -> float:
        """From the median run."""
        return self.bytes_moved / median(self.seconds)


@dataclass(frozen=True, slots=True)
class CopyBandwidth:
    """What the benchmark measured on `device` with two buffers of `buffer_bytes` each."""

    device: str
    buffer_bytes: int
    rates: tuple[Rate, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Rate:
        return max(self.rates, key=lambda rate: rate.bytes_per_second)

    @property
    def bytes_per_second(self) -> float:
        """The achievable peak: the fastest of all streams."""
        return self.best.bytes_per_second

    @property
    def copy_bytes_per_second(self) -> float:
        """The fastest stream that writes, reads plus writes counted."""
        return max(rate.bytes_per_second for rate in self.rates if rate.writes)

    @property
    def read_bytes_per_second(self) -> float:
        """The fastest stream that only reads."""
        return max(rate.bytes_per_second for rate in self.rates if not rate.writes)


def measure_copy_bandwidth(device: str, *, bytes_: int | None = None, seconds: float = 0.25) -> CopyBandwidth:
    """Time the streams on `device` for about `seconds` each.

    `bytes_` is the size of each of the two buffers. Raises RuntimeError (torch's out-of-memory error is one)
    where they do not fit.
    """
    import torch

    buffer_bytes = bytes_ or _buffer_bytes(device)
    src = torch.ones(max(1, buffer_bytes // 4), dtype=torch.float32, device=device)
    dst = torch.ones_like(src)
    buffer_bytes = src.numel() * src.element_size()
    cuda = src.device.type == "cuda"
    # Triton launches on the current device, whatever its tensors say.
    with torch.cuda.device(src.device) if cuda else nullcontext():
        streams, notes = _cuda_streams(src, dst) if cuda else (_cpu_streams(src, dst), _cache_notes(buffer_bytes))
        rates = tuple(
            Rate(method, writes, 2 * buffer_bytes if both else buffer_bytes, _time_runs(run, src, seconds))
            for method, writes, both, run in streams
        )
    return CopyBandwidth(device, buffer_bytes, rates, notes)


def peak_reading(device: str, override: float | None = None) -> Reading:
    """The peak to state utilisation against, in bytes per second: `override`, or else measured now.

    Sources: `user`, or `copy: METHOD`. Raises UsageError for an override that is no positive number.
    """
    return _override(override) if override is not None else _measured(device)


def measured_reading(measured: CopyBandwidth) -> Reading:
    return Reading(value=measured.bytes_per_second, source=f"copy: {measured.best.method}")


def derived_reading(device: str) -> Reading:
    """The theoretical peak (source `nvml`), bytes per second, or null with the reason."""
    try:
        with open_gpu(device) as (nvml, gpu):
            return derived_peak(nvml, gpu)
    except NvmlUnavailable as error:
        return Reading(value=None, reason=str(error))


def _override(value: float) -> Reading:
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"the peak bandwidth must be a positive number, not {value}")
    return Reading(value=value, source="user")


def _measured(device: str) -> Reading:
    try:
        return measured_reading(measure_copy_bandwidth(device))
    except RuntimeError as error:
        return Reading(value=None, reason=f"the copy benchmark failed: {str(error).splitlines()[0]}")


Stream = tuple[str, bool, bool, Callable[[], object]]  # method, writes, moves both buffers, one run


def _cpu_streams(src: torch.Tensor, dst: torch.Tensor) -> list[Stream]:
    import torch

    rows = 1024 if src.numel() % 1024 == 0 else 1
    matrix = src.view(rows, -1)
    vector = torch.ones(matrix.shape[1])
    return [
        ("torch copy_", True, True, lambda: dst.copy_(src)),
        ("torch dot", False, True, lambda: torch.dot(src, dst)),
        # The shape of decoding's work: a matrix read once, a vector that stays in the cache.
        ("torch mv", False, False, lambda: torch.mv(matrix, vector)),
    ]


def _cuda_streams(src: torch.Tensor, dst: torch.Tensor) -> tuple[list[Stream], tuple[str, ...]]:
    import torch

    streams: list[Stream] = [
        ("torch copy_", True, True, lambda: dst.copy_(src)),
        ("torch sum", False, False, lambda: torch.sum(src)),
    ]
    try:
        from spectune.kernels.copy import copy, read

        copy(src, dst)
        read(src)
    except Exception as error:
        # Triton compiles at the first call and needs a C compiler and a matching driver: it fails in many
        # ways, none of which says anything about the memory.
        return streams, (f"without Triton's kernels: {type(error).__name__}: {error}".splitlines()[0],)
    streams.append(("triton copy", True, True, lambda: copy(src, dst)))
    streams.append(("triton read", False, False, lambda: read(src)))
    return streams, ()


def _time_runs(run: Callable[[], object], src: torch.Tensor, seconds: float) -> tuple[float, ...]:
    """Seconds of each run after one untimed run: at least FEWEST_RUNS, then until `seconds` have passed."""
    from spectune.measuring.clock import make_clock

    clock = make_clock(src.device)
    run()
    clock.sync()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < FEWEST_RUNS or (len(times) < MOST_RUNS and time.perf_counter() < deadline):
        start = clock.mark()
        run()
        end = clock.mark()
        clock.sync()
        times.append(clock.seconds(start, end))
    return tuple(times)


def _buffer_bytes(device: str) -> int:
    """A size that leaves three quarters of the free memory alone."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        largest = GPU_BUFFER_BYTES
    else:
        import psutil

        free, largest = psutil.virtual_memory().available, CPU_BUFFER_BYTES
    fitting = max(SMALLEST_BUFFER_BYTES, min(largest, free // 8))
    return fitting - fitting % SMALLEST_BUFFER_BYTES


def _cache_notes(buffer_bytes: int) -> tuple[str, ...]:
    cache = last_level_cache_bytes()
    if cache is None or buffer_bytes >= CACHES_BEYOND * cache:
        return ()
    return (
        f"the buffers of {buffer_bytes >> 20} MiB are not far beyond the caches of {cache >> 20} MiB, "
        "so the figure may be that of the cache",
    )
