"""The copy benchmark, the choice of the peak, and `spectune probe`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from spectune.cli.probe import probe
from spectune.errors import SpectuneError, UsageError
from spectune.measuring import bandwidth
from spectune.measuring.bandwidth import CopyBandwidth, Rate, measure_copy_bandwidth, peak_reading
from spectune.measuring.device import resolve_device
from spectune.measuring.probe import Probe, run_probe
from spectune.sweeping.cell import Reading

SMALL = 1 << 20


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "CPU_BUFFER_BYTES", SMALL)


def test_each_stream_counts_its_bytes_and_keeps_its_runs() -> None:
    measured = measure_copy_bandwidth("cpu", bytes_=SMALL, seconds=0.0)
    moved = {rate.method: (rate.writes, rate.bytes_moved) for rate in measured.rates}
    assert moved == {
        "torch copy_": (True, 2 * SMALL),
        "torch dot": (False, 2 * SMALL),
        "torch mv": (False, SMALL),
    }
    assert all(len(rate.seconds) == bandwidth.FEWEST_RUNS for rate in measured.rates)
    assert all(seconds > 0 for rate in measured.rates for seconds in rate.seconds)


def test_the_peak_is_the_fastest_stream_by_its_median_run() -> None:
    copy = Rate("copy", True, 200, (1.0, 2.0, 100.0))
    read = Rate("read", False, 100, (0.5, 0.5, 0.25))
    measured = CopyBandwidth("cpu", 100, (copy, read))
    assert copy.bytes_per_second == 100
    assert measured.copy_bytes_per_second == 100
    assert measured.read_bytes_per_second == measured.bytes_per_second == 200
    assert bandwidth.measured_reading(measured) == Reading(value=200.0, source="copy: read")


@pytest.mark.parametrize("odd", [1, 5, 4 * 1000 + 3])
def test_odd_buffer_sizes_work(odd: int) -> None:
    measured = measure_copy_bandwidth("cpu", bytes_=odd, seconds=0.0)
    assert measured.buffer_bytes == max(4, odd // 4 * 4)


def test_buffers_that_a_cache_holds_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda: SMALL)
    assert "that of the cache" in measure_copy_bandwidth("cpu", bytes_=2 * SMALL, seconds=0).notes[0]
    assert measure_copy_bandwidth("cpu", bytes_=4 * SMALL, seconds=0).notes == ()
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda: None)
    assert measure_copy_bandwidth("cpu", bytes_=SMALL, seconds=0).notes == ()


def test_little_free_memory_makes_the_buffers_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=80 << 20))
    assert measure_copy_bandwidth("cpu", seconds=0).buffer_bytes == 10 << 20


def test_the_default_buffers_stay_within_512_mb() -> None:
    assert 2 * bandwidth.CPU_BUFFER_BYTES <= 512 * 10**6


@pytest.mark.usefixtures("quick")
def test_the_benchmark_is_quick() -> None:
    start = time.perf_counter()
    reading = peak_reading("cpu")
    assert time.perf_counter() - start < 5  # 3 × 0.25 s on an idle machine
    assert reading.value is not None
    assert reading.value > 0
    assert (reading.source or "").startswith("copy: torch")


def test_the_users_peak_needs_no_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure_copy_bandwidth", None)
    assert peak_reading("cpu", 3.35e12) == Reading(value=3.35e12, source="user")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_peak_must_be_a_positive_number(value: float) -> None:
    with pytest.raises(UsageError, match="positive number"):
        peak_reading("cpu", value)


def test_a_benchmark_out_of_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str) -> CopyBandwidth:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(bandwidth, "measure_copy_bandwidth", fail)
    reading = peak_reading("cpu")
    assert reading == Reading(value=None, reason="the copy benchmark failed: CUDA out of memory.")


# Triton's streams, on CPU tensors with the kernels replaced


def test_a_gpu_is_streamed_by_torch_and_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = SimpleNamespace(copy=lambda src, dst: dst.copy_(src), read=torch.sum)
    monkeypatch.setitem(sys.modules, "spectune.kernels.copy", stub)
    streams, notes = bandwidth._cuda_streams(torch.ones(8), torch.zeros(8))
    assert [stream[0] for stream in streams] == ["torch copy_", "torch sum", "triton copy", "triton read"]
    assert notes == ()
    for *_, run in streams:
        run()


def test_kernels_that_do_not_compile_leave_the_torch_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError("no C compiler\nsecond line")

    monkeypatch.setitem(sys.modules, "spectune.kernels.copy", SimpleNamespace(copy=fail, read=fail))
    streams, notes = bandwidth._cuda_streams(torch.ones(8), torch.zeros(8))
    assert [stream[0] for stream in streams] == ["torch copy_", "torch sum"]
    assert notes == ("without Triton's kernels: FileNotFoundError: no C compiler",)


# Devices


@pytest.mark.parametrize("word", ["gpu", "cuda:x", "cuda0", "cuda:-1", "cpu:0", ""])
def test_unknown_devices_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        resolve_device(word)


def test_devices_are_checked_to_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="no CUDA device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [resolve_device(word) for word in ("auto", "cuda", "cuda:0")] == ["cuda:0", "cuda:1", "cuda:0"]
    with pytest.raises(UsageError, match="no cuda:2"):
        resolve_device("cuda:2")


# The command


def app() -> typer.Typer:
    wrapped = typer.Typer()
    wrapped.command()(probe)
    return wrapped


@pytest.mark.usefixtures("quick")
def test_probe_prints_json_only() -> None:
    result = CliRunner().invoke(app(), ["--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["device"] == "cpu"
    assert facts["peak_bytes_per_second"]["value"] > 0
    fastest = max(facts["copy_bytes_per_second"], facts["read_bytes_per_second"])
    assert fastest == facts["peak_bytes_per_second"]["value"]
    assert facts["derived_bytes_per_second"]["reason"] == "the device is cpu, not a GPU"
    assert facts["achievable_of_derived"]["value"] is None
    assert facts["throttle_reasons"] is None
    assert set(facts["clocks"]) == {"cpu_clock_mhz"}


@pytest.mark.usefixtures("quick")
def test_probe_prints_a_table() -> None:
    result = CliRunner().invoke(app(), ["--device", "cpu"])
    assert result.exit_code == 0, result.output
    for word in ("torch copy_", "reads + writes", "achievable peak", "GB/s", "n/a"):
        assert word in result.stdout


def test_probe_turns_torch_errors_into_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str) -> Probe:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("spectune.measuring.probe.run_probe", fail)
    result = CliRunner().invoke(app(), ["--device", "cpu"])
    assert isinstance(result.exception, SpectuneError)
    assert "out of memory" in result.exception.message


def test_the_share_of_the_derived_peak_is_stated_where_there_is_one() -> None:
    measured = CopyBandwidth("cuda:0", 100, (Rate("triton copy", True, 90, (1.0,)),))
    shown = Probe(measured, Reading(value=100.0, source="nvml"), {}, ())
    assert shown.share_of_derived == Reading(value=0.9, source="copy / nvml")


def test_the_commands_do_not_import_torch() -> None:
    code = (
        "import sys, spectune.cli.doctor, spectune.cli.probe;"
        "print({'torch', 'transformers', 'triton', 'pynvml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_with_triton_and_torch() -> None:
    shown = run_probe("cuda:0")
    assert {rate.method for rate in shown.bandwidth.rates} >= {"torch copy_", "triton copy", "triton read"}
    assert shown.derived.value is None or 0.3 < (shown.share_of_derived.value or 0) <= 1.0
