"""The GPM window: the share of DRAM bandwidth that was really used, measured by the GPU itself.

GPU Performance Monitoring (Hopper and newer) keeps hardware counters; two samples give the mean over the time
between them. So a window takes one sample before the measured work and one after it. This is the only NVML
reading that is a bandwidth: `utilization.memory` is the share of *time* in which any memory access was under
way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from spectune.measuring.nvml_device import Gpu, Nvml, NvmlUnavailable
from spectune.sweeping.cell import Reading

SHORTEST_SECONDS = 0.1  # NVML's documented minimum between two samples
DRAM_BANDWIDTH = 10  # NVML_GPM_METRIC_DRAM_BW_UTIL, in percent of the theoretical peak


class GpmWindow:
    """One window. `begin` and `end` never raise; `end` gives the reading (0 to 1) or null with the reason."""

    def __init__(self, nvml: Nvml, gpu: Gpu, now: Callable[[], float] = time.perf_counter) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._now = now
        self._samples: list[Any] = []
        self._began = 0.0
        self._failure: str | None = None

    def begin(self) -> None:
        try:
            self._check_support()
            for _ in range(2):
                self._samples.append(self._nvml.call("nvmlGpmSampleAlloc"))
            self._take(self._samples[0])
        except NvmlUnavailable as error:
            self._failure = str(error)
        self._began = self._now()

    def end(self) -> Reading:
        try:
            return self._measure()
        except NvmlUnavailable as error:
            return Reading(value=None, reason=str(error))
        finally:
            self._free()

    def _measure(self) -> Reading:
        if self._failure:
            raise NvmlUnavailable(self._failure)
        seconds = self._now() - self._began
        if seconds < SHORTEST_SECONDS:
            raise NvmlUnavailable(f"GPM needs {SHORTEST_SECONDS:g} s, the window was {seconds:.3f} s")
        self._take(self._samples[1])
        request = self._request()
        self._nvml.call("nvmlGpmMetricsGet", request)
        metric = request.metrics[0]
        if metric.nvmlReturn != 0:
            raise NvmlUnavailable(f"GPM returned error {metric.nvmlReturn} for DRAM bandwidth")
        if not math.isfinite(metric.value):
            raise NvmlUnavailable(f"GPM returned {metric.value} for DRAM bandwidth")
        return Reading(value=metric.value / 100, source="gpm")

    def _check_support(self) -> None:
        support = self._nvml.call("nvmlGpmQueryDeviceSupport", self._gpu.card)
        if not support.isSupportedDevice:
            raise NvmlUnavailable("this GPU has no GPM counters (Hopper or newer has)")

    def _take(self, sample: Any) -> None:
        if self._gpu.mig_instance is None:
            self._nvml.call("nvmlGpmSampleGet", self._gpu.card, sample)
        else:
            self._nvml.call("nvmlGpmMigSampleGet", self._gpu.card, self._gpu.mig_instance, sample)

    def _request(self) -> Any:
        request = self._nvml.call("c_nvmlGpmMetricsGet_t")
        request.version = 1
        request.numMetrics = 1
        request.sample1, request.sample2 = self._samples
        request.metrics[0].metricId = DRAM_BANDWIDTH
        return request

    def _free(self) -> None:
        for sample in self._samples:
            with suppress(NvmlUnavailable):
                self._nvml.call("nvmlGpmSampleFree", sample)
        self._samples.clear()
