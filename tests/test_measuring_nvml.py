"""The GPU monitor against a fake NVML: which device is read, and what each failing call does."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass, field, fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from spectune.cli.doctor import doctor
from spectune.measuring import nvml_device
from spectune.measuring.bandwidth import derived_reading
from spectune.measuring.doctor import examine
from spectune.measuring.fingerprint import fingerprint, fingerprint_id
from spectune.measuring.gpm import DRAM_BANDWIDTH, GpmWindow
from spectune.measuring.nvml import GpuMonitor, GpuReadings
from spectune.measuring.nvml_device import CudaDevice, Nvml, find_gpu
from spectune.measuring.throttle import throttle_names
from spectune.sweeping.cell import Reading


class NVMLError(Exception):
    pass


NOT_SUPPORTED = NVMLError("Not Supported")


@dataclass
class FakeGpu:
    uuid: str
    bus: str
    busy: int = 0  # percent
    dram: float = 0.0  # percent
    throttle: int = 0
    mig_of: FakeGpu | None = None
    mig_mode: int = 0
    millijoules: list[int] = field(default_factory=lambda: [1_000_000, 1_600_000])


class FakeNvml(ModuleType):
    """NVML with the given GPUs, in NVML's own order. `errors` maps a function to what it raises."""

    def __init__(self, *gpus: FakeGpu) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.errors: dict[str, Exception] = {}
        self.gpm_supported = 1
        self.gpm_return = 0
        self.gpm_value: float | None = None
        self.open = 0
        self.samples = 0
        self.sampled: list[tuple[Any, int | None]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and (error := super().__getattribute__("errors").get(name)):

            def fail(*_: Any) -> None:
                raise error

            return fail
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.00"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def _find(self, key: str, value: str) -> FakeGpu:
        for gpu in self.gpus:
            if getattr(gpu, key) == value:
                return gpu
        raise NVMLError("Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        return self._find("uuid", uuid)

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> FakeGpu:
        return self._find("bus", bus)

    def nvmlDeviceIsMigDeviceHandle(self, gpu: FakeGpu) -> bool:
        return gpu.mig_of is not None

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: FakeGpu) -> FakeGpu | None:
        return gpu.mig_of

    def nvmlDeviceGetGpuInstanceId(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [gpu.mig_mode, gpu.mig_mode]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetIndex(self, gpu: FakeGpu) -> int:
        return self.gpus.index(gpu)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=99, memory=gpu.busy)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return 350_000

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        return gpu.millijoules.pop(0)

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return {1: 1755, 2: 2619}[kind]

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return {2: 2619}[kind]

    def nvmlDeviceGetMemoryBusWidth(self, gpu: FakeGpu) -> int:
        return 5120

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return 55

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return gpu.throttle

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        return gpu.throttle

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=self.gpm_supported)

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        self.samples += 1
        return SimpleNamespace(gpu=None)

    def nvmlGpmSampleFree(self, sample: SimpleNamespace) -> None:
        self.samples -= 1

    def nvmlGpmSampleGet(self, gpu: FakeGpu, sample: SimpleNamespace) -> None:
        sample.gpu = gpu
        self.sampled.append((gpu, None))

    def nvmlGpmMigSampleGet(self, gpu: FakeGpu, instance: int, sample: SimpleNamespace) -> None:
        sample.gpu = gpu
        self.sampled.append((gpu, instance))

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace()])

    def nvmlGpmMetricsGet(self, request: SimpleNamespace) -> None:
        assert (request.version, request.numMetrics) == (1, 1)
        (metric,) = request.metrics
        assert metric.metricId == DRAM_BANDWIDTH
        metric.nvmlReturn = self.gpm_return
        metric.value = request.sample1.gpu.dram if self.gpm_value is None else self.gpm_value


class ManualClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


IDLE = "11111111-0000-0000-0000-000000000000"
BUSY = "22222222-0000-0000-0000-000000000000"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """NVML sees an idle GPU 0 and a busy GPU 1; torch sees those in CUDA_VISIBLE_DEVICES, in its order."""
    module = FakeNvml(
        FakeGpu(f"GPU-{IDLE}", "00000000:3B:00.0"),
        FakeGpu(f"GPU-{BUSY}", "00000000:5E:00.0", busy=80, dram=62.5),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def visible() -> list[int]:
        return [int(word) for word in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")]

    def properties(index: int) -> SimpleNamespace:
        nvml_index = visible()[index]
        return SimpleNamespace(
            name="Fake GPU",
            total_memory=80 << 30,
            major=9,
            minor=0,
            uuid=(IDLE, BUSY)[nvml_index],
            pci_domain_id=0,
            pci_bus_id=(0x3B, 0x5E)[nvml_index],
            pci_device_id=0,
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Fake GPU")
    return module


def watch(device: str = "cuda:0", seconds: float = 2.0) -> GpuReadings:
    clock = ManualClock()
    with GpuMonitor(device, now=clock) as monitor:
        clock.seconds += seconds
    return monitor.readings


def numbers(readings: GpuReadings) -> dict[str, Reading]:
    named = {f.name: getattr(readings, f.name) for f in fields(readings)}
    return {name: value for name, value in named.items() if isinstance(value, Reading)}


# The right device (case 28)


@pytest.mark.parametrize(
    ("visible", "device", "nvml_index"),
    [("1", "cuda:0", 1), ("1", "cuda", 1), ("1,0", "cuda:0", 1), ("1,0", "cuda:1", 0), ("0,1", "cuda:1", 1)],
)
def test_a_gpu_is_found_by_its_uuid_however_cuda_numbers_it(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, device: str, nvml_index: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monitor = GpuMonitor(device)
    monitor.start()
    monitor.stop()
    assert monitor.gpu is not None
    assert monitor.gpu.nvml_index == nvml_index
    assert monitor.gpu.cuda_index == int(device.partition(":")[2] or 0)
    assert monitor.gpu.uuid == f"GPU-{(IDLE, BUSY)[nvml_index]}"
    assert monitor.readings.memory_busy.value is None  # the window was too short
    assert watch(device).memory_busy.value == (0.0, 0.8)[nvml_index]


def test_the_pci_address_serves_where_the_uuid_is_unknown(fake: FakeNvml) -> None:
    fake.errors["nvmlDeviceGetHandleByUUID"] = NOT_SUPPORTED
    assert watch("cuda:1").memory_busy.value == 0.8


def test_a_gpu_that_nvml_does_not_know_gives_reasons(fake: FakeNvml) -> None:
    fake.gpus = ()
    for reading in numbers(watch()).values():
        assert reading.value is None
        assert "no NVML device for cuda:0" in (reading.reason or "")
    assert fake.open == 0


def test_doctor_and_fingerprint_show_both_indices_and_the_uuid(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (gpu,) = [check for check in examine() if check.name == "gpu"]
    assert gpu.detail == f"cuda:0 is NVML device 1, GPU-{BUSY}"
    (entry,) = fingerprint("cuda:0")["gpus"]  # type: ignore[misc]
    assert (entry["cuda_index"], entry["nvml_index"], entry["uuid"]) == (0, 1, f"GPU-{BUSY}")
    assert (entry["driver"], entry["power_limit_watts"], entry["mig"]) == ("570.00", 700.0, False)


# Every reading


def test_all_readings_of_a_healthy_gpu(fake: FakeNvml) -> None:
    fake.gpus[1].throttle = 0x1 | 0x4 | 0x40
    readings = watch("cuda:1", seconds=2.0)
    assert readings.dram_utilization == Reading(value=0.625, source="gpm")
    assert readings.memory_busy == Reading(value=0.8, source="busy-time")
    assert readings.power_watts == Reading(value=350.0, source="nvml")
    assert readings.energy_joules == Reading(value=600.0, source="nvml")
    assert readings.sm_clock_mhz.value == 1755
    assert readings.mem_clock_mhz.value == 2619
    assert readings.temperature_c.value == 55
    assert readings.throttle_reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert readings.throttle_unknown is None


def test_a_session_gives_back_everything(fake: FakeNvml) -> None:
    watch()
    fake.gpus[0].millijoules[:] = [1, 2]
    watch()
    assert (fake.open, fake.samples) == (0, 0)


def test_the_share_of_time_is_never_named_a_bandwidth(fake: FakeNvml) -> None:
    fake.gpm_supported = 0
    readings = watch("cuda:1")
    assert readings.memory_busy.source == "busy-time"
    assert readings.dram_utilization.value is None  # not filled in from the busy time
    bandwidths = [name for name, reading in numbers(readings).items() if reading.source == "gpm"]
    assert bandwidths == []


def test_samples_taken_during_the_window_are_averaged(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spectune.measuring.nvml.SAMPLE_SECONDS", 0.001)
    watts = iter([100_000, 200_000, 300_000])
    taken = []

    def power(_: FakeGpu) -> int:
        taken.append(next(watts, 300_000))
        return taken[-1]

    monkeypatch.setattr(fake, "nvmlDeviceGetPowerUsage", power)
    clock = ManualClock()
    with GpuMonitor("cuda:0", now=clock) as monitor:
        deadline = time.monotonic() + 10
        while len(taken) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        clock.seconds = 2.0
    assert monitor.readings.power_watts.value == pytest.approx(sum(taken) / len(taken) / 1e3)
    assert len(taken) > 3  # the last one when the window closes


# Failing calls (case 29)

CALLS = {
    "nvmlDeviceGetUtilizationRates": {"memory_busy"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_joules"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "mem_clock_mhz"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlGpmQueryDeviceSupport": {"dram_utilization"},
    "nvmlGpmSampleAlloc": {"dram_utilization"},
    "nvmlGpmSampleGet": {"dram_utilization"},
    "nvmlGpmMetricsGet": {"dram_utilization"},
    "nvmlGpmSampleFree": set(),
    "nvmlDeviceIsMigDeviceHandle": set(),
    "nvmlDeviceGetMigMode": set(),
    "nvmlDeviceGetUUID": set(),
    "nvmlDeviceGetIndex": set(),
    "nvmlShutdown": set(),
    "nvmlDeviceGetCurrentClocksEventReasons": set(),
}


@pytest.mark.parametrize(("function", "lost"), CALLS.items())
def test_a_call_that_is_not_supported_costs_its_own_reading_only(fake: FakeNvml, function: str, lost: set[str]) -> None:
    fake.errors[function] = NOT_SUPPORTED
    readings = numbers(watch("cuda:1"))
    assert {name for name, reading in readings.items() if reading.value is None} == lost
    for name in lost:
        assert readings[name].reason == f"{function}: Not Supported"


def test_the_new_name_of_the_temperature_is_preferred(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "nvmlDeviceGetTemperatureV", lambda gpu, sensor: 66, raising=False)
    assert watch().temperature_c.value == 66


def test_the_old_name_of_the_throttle_reasons_is_tried(fake: FakeNvml) -> None:
    fake.gpus[0].throttle = 0x20
    fake.errors["nvmlDeviceGetCurrentClocksEventReasons"] = AttributeError("no such function")
    assert watch().throttle_reasons == ("sw_thermal_slowdown",)
    fake.gpus[0].millijoules[:] = [1, 2]
    fake.errors["nvmlDeviceGetCurrentClocksThrottleReasons"] = NOT_SUPPORTED
    readings = watch()
    assert readings.throttle_reasons == ()
    assert readings.throttle_unknown == "nvmlDeviceGetCurrentClocksThrottleReasons: Not Supported"


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda m, f: m.setitem(sys.modules, "pynvml", None), "pynvml is missing"),
        (lambda m, f: f.errors.update(nvmlInit=NVMLError("NVML Shared Library Not Found")), "Shared Library"),
        (lambda m, f: m.setattr(torch.cuda, "is_available", lambda: False), "torch sees no CUDA device"),
    ],
    ids=["no module", "no library", "no CUDA"],
)
def test_without_nvml_every_reading_is_null_with_the_reason(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, prepare: Any, reason: str
) -> None:
    prepare(monkeypatch, fake)
    readings = watch()
    for reading in (*numbers(readings).values(), derived_reading("cuda:0")):
        assert reading.value is None
        assert reason in (reading.reason or "")
    assert readings.throttle_reasons == ()


def test_a_cpu_has_no_gpu_readings(fake: FakeNvml) -> None:
    assert watch("cpu").power_watts.reason == "the device is cpu, not a GPU"


@pytest.mark.parametrize("broken", ["nvmlDeviceGetUtilizationRates", "nvmlInit"])
def test_doctor_says_what_failed_and_exits_0(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr("spectune.cli.doctor.WINDOW_SECONDS", 0.0)
    fake.errors[broken] = NOT_SUPPORTED
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == 0
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    failed = checks["memory busy" if broken == "nvmlDeviceGetUtilizationRates" else "nvml"]
    assert (failed["status"], failed["detail"]) == ("missing", f"{broken}: Not Supported")
    assert checks["torch"]["status"] == "ok"


# GPM (case 30)


def test_a_gpu_without_gpm_has_no_dram_bandwidth(fake: FakeNvml) -> None:
    fake.gpm_supported = 0
    reading = watch("cuda:1").dram_utilization
    assert reading.value is None
    assert "no GPM counters" in (reading.reason or "")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gpm_value_that_is_no_number_is_null_with_the_reason(fake: FakeNvml, value: float) -> None:
    fake.gpm_value = value
    readings = watch("cuda:1")
    assert readings.dram_utilization.value is None
    assert str(value) in (readings.dram_utilization.reason or "")
    assert readings.memory_busy.value == 0.8


def test_the_return_code_of_the_gpm_metric_itself_counts(fake: FakeNvml) -> None:
    fake.gpm_return = 3
    assert watch("cuda:1").dram_utilization.reason == "GPM returned error 3 for DRAM bandwidth"


def test_a_short_window_has_no_gpm_busy_time_or_energy(fake: FakeNvml) -> None:
    readings = watch("cuda:1", seconds=0.05)
    for reading in (readings.dram_utilization, readings.memory_busy, readings.energy_joules):
        assert reading.value is None
        assert "0.050 s" in (reading.reason or "")
    assert readings.power_watts.value == 350.0
    assert fake.samples == 0


def test_an_energy_counter_that_was_reset_is_null(fake: FakeNvml) -> None:
    fake.gpus[0].millijoules[:] = [5_000_000, 1_000]
    assert watch().energy_joules.reason == "the energy counter did not advance"


def test_a_mig_slice_is_sampled_through_its_card(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    card = fake.gpus[0]
    card.mig_mode = 1
    card.dram = 12.5
    fake.gpus = (card, FakeGpu("MIG-abc", "", mig_of=card, busy=10))
    monkeypatch.setattr(nvml_device, "cuda_device", lambda device: CudaDevice(0, IDLE, None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-abc")
    readings = watch()
    assert fake.sampled == [(card, 7), (card, 7)]
    assert readings.dram_utilization.value == 0.125
    assert readings.memory_busy.value == 0.1
    assert "only a part" in (derived_reading("cuda:0").reason or "")


def test_a_card_in_mig_mode_is_not_taken_for_its_slice(fake: FakeNvml) -> None:
    fake.gpus[0].mig_mode = 1
    assert "does not tell which slice" in (watch().dram_utilization.reason or "")


# Derived peak and throttle reasons


def test_the_derived_peak_is_two_transfers_per_clock(fake: FakeNvml) -> None:
    peak = derived_reading("cuda:0")
    assert peak == Reading(value=2 * 2619e6 * 5120 / 8, source="nvml")


def test_a_derived_peak_of_zero_is_null(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "nvmlDeviceGetMemoryBusWidth", lambda gpu: 0)
    assert derived_reading("cuda:0").value is None


def test_throttle_reasons_are_merged_named_and_idle_is_none_of_them() -> None:
    assert throttle_names([]) == ()
    assert throttle_names([0x1]) == ()
    assert throttle_names([0x80, 0x1, 0x8]) == ("hw_slowdown", "hw_power_brake")
    assert throttle_names([0x4000]) == ("reason_0x4000",)


def test_comparable_gpus_have_equal_fingerprints(fake: FakeNvml) -> None:
    first, second = fingerprint("cuda:0"), fingerprint("cuda:1")
    assert fingerprint_id(first) == fingerprint_id(second)  # two equal cards
    assert fingerprint_id(first) != fingerprint_id(fingerprint("cpu"))
    gpus = [{**gpu, "power_limit_watts": 400.0} for gpu in first["gpus"]]  # type: ignore[attr-defined]
    assert fingerprint_id(first) != fingerprint_id({**first, "gpus": gpus})


# The real module


def test_constants_and_structures_are_those_of_the_real_module() -> None:
    import pynvml

    assert pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL == DRAM_BANDWIDTH
    assert pynvml.NVML_CLOCK_SM == nvml_device.CLOCK_SM
    assert pynvml.NVML_CLOCK_MEM == nvml_device.CLOCK_MEMORY
    assert pynvml.NVML_TEMPERATURE_GPU == nvml_device.TEMPERATURE_GPU
    assert pynvml.NVML_DEVICE_MIG_ENABLE == nvml_device.MIG_ENABLED
    assert throttle_names([pynvml.nvmlClocksEventReasonSwPowerCap]) == ("sw_power_cap",)
    assert throttle_names([pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown]) == ("hw_power_brake",)


def test_the_gpm_request_fits_the_real_structure(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    import pynvml

    monkeypatch.setitem(sys.modules, "pynvml", fake)
    requests = []

    def answer(request: Any) -> None:
        requests.append(request)
        request.metrics[0].value = 50.0

    monkeypatch.setattr(fake, "nvmlGpmSampleAlloc", pynvml.c_nvmlGpmSample_t)
    monkeypatch.setattr(fake, "nvmlGpmSampleGet", lambda gpu, sample: None)
    monkeypatch.setattr(fake, "c_nvmlGpmMetricsGet_t", pynvml.c_nvmlGpmMetricsGet_t)
    monkeypatch.setattr(fake, "nvmlGpmMetricsGet", answer)
    nvml, clock = Nvml(), ManualClock()
    window = GpmWindow(nvml, find_gpu(nvml, CudaDevice(0, IDLE, None)), clock)
    window.begin()
    clock.seconds = 1.0
    assert window.end() == Reading(value=0.5, source="gpm")
    assert requests[0].version == pynvml.NVML_GPM_METRICS_GET_VERSION
    assert requests[0].numMetrics == 1
    assert requests[0].metrics[0].metricId == DRAM_BANDWIDTH
