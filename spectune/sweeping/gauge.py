"""The gauge of a real device: NVML around the passes, the bytes model behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from spectune.measuring.bytes_model import assess_bandwidth
from spectune.measuring.nvml import GpuMonitor, GpuReadings
from spectune.sweeping.cell import Bandwidth, CellSpec, ModelInfo, PassResult, Reading


class DeviceGauge:
    """Watches the target's device. `peak` is in bytes per second."""

    def __init__(self, target: ModelInfo, drafters: Mapping[str, ModelInfo | None], peak: Reading) -> None:
        self._target = target
        self._drafters = drafters
        self._peak = peak
        self._readings: GpuReadings | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        monitor = GpuMonitor(self._target.device)
        with monitor:
            yield
        self._readings = monitor.readings

    def assess(self, spec: CellSpec, passes: Sequence[PassResult]) -> tuple[Bandwidth, tuple[str, ...]]:
        draft = self._drafters[spec.drafter]
        return assess_bandwidth(self._target, draft, passes, spec.batch, self._peak, self._readings)
