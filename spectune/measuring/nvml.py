"""The GPU monitor: what NVML says about one GPU during one measured window.

The name of a reading says what it is. `dram_utilization` is a share of bandwidth (source `gpm`);
`memory_busy` is a share of time (source `busy-time`) and says nothing about bandwidth, since one slow access
keeps the memory as busy as a saturated stream. Where a number cannot be had, the reading is null with the
reason, and the benchmark goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from statistics import fmean
from types import TracebackType

from spectune.measuring.gpm import GpmWindow
from spectune.measuring.nvml_device import (
    CLOCK_MEMORY,
    CLOCK_SM,
    TEMPERATURE_GPU,
    Gpu,
    Nvml,
    NvmlUnavailable,
    open_gpu,
)
from spectune.measuring.throttle import throttle_names
from spectune.sweeping.cell import Reading

SAMPLE_SECONDS = 0.1
SHORTEST_BUSY_SECONDS = 1 / 6  # NVML averages utilization over its last 1/6 to 1 second
SHORTEST_ENERGY_SECONDS = 1.0  # the counter moves every 20 to 100 ms

# NVML renames functions; the new name comes first.
TEMPERATURE_FUNCTIONS = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
THROTTLE_FUNCTIONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """Readings of one window. Utilisations are shares from 0 to 1."""

    dram_utilization: Reading  # of the theoretical bandwidth, from GPM
    memory_busy: Reading  # of the time: never a bandwidth
    power_watts: Reading  # mean; NVML itself averages over the last second on Ampere and newer
    energy_joules: Reading
    sm_clock_mhz: Reading  # mean
    mem_clock_mhz: Reading  # mean
    temperature_c: Reading  # highest
    throttle_reasons: tuple[str, ...]  # every reason seen at any sample
    throttle_unknown: str | None = None  # why no sample of the throttle reasons could be taken

    @classmethod
    def unavailable(cls, reason: str) -> GpuReadings:
        null = Reading(value=None, reason=reason)
        return cls(null, null, null, null, null, null, null, (), reason)


@dataclass(frozen=True, slots=True)
class _Meter:
    """A quantity that is sampled during the window."""

    source: str
    read: Callable[[Nvml, Gpu], float]
    combine: Callable[[list[float]], float] = fmean
    shortest_seconds: float = 0.0


_METERS = {
    "memory_busy": _Meter(
        "busy-time",
        lambda nvml, gpu: nvml.call("nvmlDeviceGetUtilizationRates", gpu.handle).memory / 100,
        shortest_seconds=SHORTEST_BUSY_SECONDS,
    ),
    "power_watts": _Meter("nvml", lambda nvml, gpu: nvml.call("nvmlDeviceGetPowerUsage", gpu.handle) / 1e3),
    "sm_clock_mhz": _Meter("nvml", lambda nvml, gpu: _clock(nvml, gpu, CLOCK_SM)),
    "mem_clock_mhz": _Meter("nvml", lambda nvml, gpu: _clock(nvml, gpu, CLOCK_MEMORY)),
    "temperature_c": _Meter(
        "nvml",
        lambda nvml, gpu: _first_known(nvml, TEMPERATURE_FUNCTIONS, gpu.card, TEMPERATURE_GPU),
        combine=max,
    ),
}


@dataclass(slots=True)
class _Samples:
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _METERS})
    failures: dict[str, str] = field(default_factory=dict)
    throttles: list[int] = field(default_factory=list)

    def take(self, nvml: Nvml, gpu: Gpu) -> None:
        for name, meter in _METERS.items():
            try:
                self.values[name].append(float(meter.read(nvml, gpu)))
            except NvmlUnavailable as error:
                self.failures[name] = str(error)
        try:
            self.throttles.append(_first_known(nvml, THROTTLE_FUNCTIONS, gpu.card))
        except NvmlUnavailable as error:
            self.failures["throttle"] = str(error)

    def reading(self, name: str, seconds: float) -> Reading:
        meter = _METERS[name]
        if not self.values[name]:
            return Reading(value=None, reason=self.failures.get(name, "no sample was taken"))
        if seconds < meter.shortest_seconds:
            return Reading(value=None, reason=f"NVML averages over longer than the window of {seconds:.3f} s")
        return Reading(value=meter.combine(self.values[name]), source=meter.source)


class GpuMonitor:
    """Brackets a measured window: `start()` … `stop()`, or a `with` block that sets `readings` at its end.

    Nothing here raises. The caller waits for the device before `stop()`, or the end of the work is missed. A
    light thread samples what NVML only tells about the present; `now` is a clock in seconds.
    """

    def __init__(self, device: str, *, now: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.gpu: Gpu | None = None  # set by start() where the device is found
        self.readings = GpuReadings.unavailable("the monitor has not run yet")
        self._now = now
        self._window: _Window | None = None
        self._failure = ""

    def start(self) -> None:
        session = ExitStack()
        try:
            nvml, self.gpu = session.enter_context(open_gpu(self.device))
        except NvmlUnavailable as error:
            self._failure = str(error)
        else:
            self._window = _Window(nvml, self.gpu, session, self._now)

    def stop(self) -> GpuReadings:
        if self._window is None:
            self.readings = GpuReadings.unavailable(self._failure or "the monitor was not started")
        else:
            self.readings = self._window.close()
            self._window = None
        return self.readings

    def __enter__(self) -> GpuMonitor:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class _Window:
    def __init__(self, nvml: Nvml, gpu: Gpu, session: ExitStack, now: Callable[[], float]) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._session = session
        self._now = now
        self._samples = _Samples()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="spectune-nvml", daemon=True)
        self._gpm = GpmWindow(nvml, gpu, now)
        self._thread.start()
        self._joules_before = self._joules()
        self._began = now()
        self._gpm.begin()

    def _sample(self) -> None:
        # Waits first: utilization and power are averages over the recent past, not yet in the window.
        while not self._ended.wait(SAMPLE_SECONDS):
            self._samples.take(self._nvml, self._gpu)

    def close(self) -> GpuReadings:
        dram = self._gpm.end()
        joules_after = self._joules()
        seconds = self._now() - self._began
        self._ended.set()
        self._thread.join()
        self._samples.take(self._nvml, self._gpu)
        self._session.close()
        return GpuReadings(
            dram_utilization=dram,
            energy_joules=_energy(self._joules_before, joules_after, seconds),
            throttle_reasons=throttle_names(self._samples.throttles),
            throttle_unknown=None if self._samples.throttles else self._samples.failures.get("throttle"),
            **{name: self._samples.reading(name, seconds) for name in _METERS},
        )

    def _joules(self) -> Reading:
        try:
            millijoules = self._nvml.call("nvmlDeviceGetTotalEnergyConsumption", self._gpu.handle)
        except NvmlUnavailable as error:
            return Reading(value=None, reason=str(error))
        return Reading(value=millijoules / 1e3, source="nvml")


def _energy(before: Reading, after: Reading, seconds: float) -> Reading:
    for counter in (before, after):
        if counter.value is None:
            return counter
    if seconds < SHORTEST_ENERGY_SECONDS:
        needed = f"the energy counter needs {SHORTEST_ENERGY_SECONDS:g} s"
        return Reading(value=None, reason=f"{needed}, the window was {seconds:.3f} s")
    joules = (after.value or 0.0) - (before.value or 0.0)
    if joules <= 0:
        return Reading(value=None, reason="the energy counter did not advance")
    return Reading(value=joules, source="nvml")


def _clock(nvml: Nvml, gpu: Gpu, kind: int) -> float:
    return float(nvml.call("nvmlDeviceGetClockInfo", gpu.card, kind))


def _first_known(nvml: Nvml, functions: tuple[str, ...], *arguments: object) -> int:
    *newer, oldest = functions
    for function in newer:
        with suppress(NvmlUnavailable):
            return int(nvml.call(function, *arguments))
    return int(nvml.call(oldest, *arguments))
