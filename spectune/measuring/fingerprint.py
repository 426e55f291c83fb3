"""The environment fingerprint: where a run was measured, and whether two runs may be compared.

Timings depend on hardware, on its settings and on the libraries that choose the kernels. The fingerprint
records all of that and nothing about the person: no user or host name, no path, no environment variable.
"""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spectune import __version__
from spectune.measuring import host
from spectune.measuring.nvml_device import NvmlUnavailable, open_gpu, text, try_call

LIBRARIES = ("torch", "transformers", "triton")  # those whose kernels are timed


def fingerprint(device: str) -> dict[str, object]:
    """Facts about this machine and its software, JSON-serialisable; null where a fact cannot be had.

    `device` is the torch device that the target runs on. `gpus` lists the GPUs that torch sees, in its order.
    """
    import psutil
    import torch

    physical, logical = host.core_counts()
    return {
        "device": device,
        "os": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "wsl": host.in_wsl(),
        "container": host.in_container(),
        "cpu": host.cpu_model(),
        "cpu_flags": list(host.cpu_flags()),
        "physical_cores": physical,
        "logical_cores": logical,
        "usable_cores": host.usable_cores(),
        "last_level_cache_bytes": host.last_level_cache_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
        "python": platform.python_version(),
        "spectune": __version__,
        **{library: installed_version(library) for library in LIBRARIES},
        "torch": str(torch.__version__),  # unlike the metadata it names the build: 2.9.0+cu128
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
    }


def fingerprint_id(environment: dict[str, object]) -> str:
    """A short hash of what makes timings comparable: equal ids, comparable timings.

    Left out: spectune's own version, which a comparison may be about; the GPU's UUID, since equal cards are
    comparable; memory sizes and kernel patch levels; and on a CPU run the GPUs that it did not use.
    """
    keys = ("os", "machine", "wsl", "cpu", "cpu_flags", "physical_cores", "usable_cores", "torch_threads")
    facts = {key: environment.get(key) for key in (*keys, *LIBRARIES)}
    facts["python"] = str(environment.get("python")).rpartition(".")[0]
    kind, _, index = str(environment.get("device")).partition(":")
    facts["device"] = kind
    gpus = environment.get("gpus")
    if kind == "cuda" and isinstance(gpus, list):
        used = gpus[int(index or 0) : int(index or 0) + 1]
        kept = ("name", "memory_bytes", "driver", "power_limit_watts", "mig")
        facts["gpu"] = [{key: gpu.get(key) for key in kept} for gpu in used]
        facts["cuda"] = environment.get("cuda")
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def installed_version(package: str) -> str | None:
    """The version in the package's metadata, without importing it; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [_gpu(index) for index in range(count)]


def _gpu(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    seen_by_torch = {
        "cuda_index": index,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }
    try:
        with open_gpu(f"cuda:{index}") as (nvml, gpu):
            milliwatts = try_call(nvml, "nvmlDeviceGetEnforcedPowerLimit", gpu.card)
            return {
                **seen_by_torch,
                "uuid": gpu.uuid,
                "nvml_index": gpu.nvml_index,
                "driver": text(try_call(nvml, "nvmlSystemGetDriverVersion")),
                "power_limit_watts": None if milliwatts is None else milliwatts / 1e3,
                "mig": gpu.mig_instance is not None,
            }
    except NvmlUnavailable as error:
        return {**seen_by_torch, "nvml": str(error)}
