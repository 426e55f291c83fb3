"""The probe: the copy benchmark together with the clocks it ran at.

A bandwidth measured while the GPU was hot or power-limited is true for that moment only, so both are shown
together.
"""

from __future__ import annotations

from dataclasses import dataclass

from spectune.measuring.bandwidth import (
    CopyBandwidth,
    derived_reading,
    measure_copy_bandwidth,
    measured_reading,
)
from spectune.measuring.nvml import GpuMonitor
from spectune.sweeping.cell import Reading


@dataclass(frozen=True, slots=True)
class Probe:
    """`clocks` are named with their units.

    `throttle_reasons` were seen during the benchmark; None where the device does not tell.
    """

    bandwidth: CopyBandwidth
    derived: Reading
    clocks: dict[str, Reading]
    throttle_reasons: tuple[str, ...] | None

    @property
    def achievable(self) -> Reading:
        return measured_reading(self.bandwidth)

    @property
    def share_of_derived(self) -> Reading:
        """Achievable over derived peak; near 0.9 is usual."""
        if self.derived.value is None:
            return Reading(value=None, reason=self.derived.reason)
        return Reading(value=self.bandwidth.bytes_per_second / self.derived.value, source="copy / nvml")


def run_probe(device: str) -> Probe:
    """Benchmark `device`. Raises RuntimeError where the buffers do not fit."""
    with GpuMonitor(device) as monitor:
        bandwidth = measure_copy_bandwidth(device)
    readings = monitor.readings
    if device.startswith("cuda"):
        clocks = {
            "sm_clock_mhz": readings.sm_clock_mhz,
            "mem_clock_mhz": readings.mem_clock_mhz,
            "temperature_c": readings.temperature_c,
            "power_watts": readings.power_watts,
        }
    else:
        clocks = {"cpu_clock_mhz": _cpu_clock()}
    throttle = None if readings.throttle_unknown else readings.throttle_reasons
    return Probe(bandwidth, derived_reading(device), clocks, throttle)


def _cpu_clock() -> Reading:
    import psutil

    # Missing from psutil itself on systems that have no such figure.
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    if not frequency or not frequency.current:
        return Reading(value=None, reason="the system does not tell the CPU's clock")
    return Reading(value=float(frequency.current), source="os")
