"""The NVML library, and the one NVML device that a torch CUDA device is.

Two facts shape this module. CUDA and NVML number the GPUs differently (CUDA_VISIBLE_DEVICES, its order, a
fastest-first default), so a device is found by its UUID or PCI address and never by its index. And any NVML
call may be unsupported on any device, in any container, at any time, so each call fails on its own and its
failure is a reason, not an error.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from spectune.sweeping.cell import Reading

# NVML's enumerations, written out so that reading a constant cannot fail on an old module.
CLOCK_SM = 1
CLOCK_MEMORY = 2
TEMPERATURE_GPU = 0
MIG_ENABLED = 1


class NvmlUnavailable(Exception):
    """One NVML call, or all of NVML, cannot be used here. The text is the reason shown to the user."""


class Nvml:
    """An initialised NVML library. Close it; NVML counts how often it was opened."""

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlUnavailable("the Python module pynvml is missing (pip install nvidia-ml-py)") from error
        self.call("nvmlInit")

    def call(self, function: str, *arguments: Any) -> Any:
        """What the NVML function returns. Raises NvmlUnavailable for every way in which it can fail."""
        try:
            return getattr(self.module, function)(*arguments)
        except Exception as error:
            # The module's own error classes, a function that an older module lacks, a library that does
            # not load: a measurement must survive all of them.
            raise NvmlUnavailable(f"{function}: {error}") from error

    def close(self) -> None:
        with suppress(NvmlUnavailable):
            self.call("nvmlShutdown")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU as torch sees it: `uuid` without a prefix, `pci_bus_id` like 00000000:3B:00.0."""

    index: int
    uuid: str | None
    pci_bus_id: str | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """The same GPU as NVML sees it.

    `handle` is what the process computes on; `card` is the whole board, another handle only for a MIG slice.
    """

    handle: Any
    card: Any
    mig_instance: int | None
    cuda_index: int
    nvml_index: int | None
    uuid: str | None


def cuda_device(device: str) -> CudaDevice:
    """Identify a torch device. Raises NvmlUnavailable where it is no CUDA device that torch can use."""
    if not device.startswith("cuda"):
        raise NvmlUnavailable(f"the device is {device}, not a GPU")
    import torch

    if not torch.cuda.is_available():
        raise NvmlUnavailable("torch sees no CUDA device")
    index = torch.device(device).index
    if index is None:
        index = torch.cuda.current_device()
    try:
        properties = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:
        raise NvmlUnavailable(f"torch cannot describe cuda:{index}: {error}") from error
    uuid = getattr(properties, "uuid", None)  # torch before 2.4 and some vendors have none
    bus = getattr(properties, "pci_bus_id", None)
    domain = getattr(properties, "pci_domain_id", 0)
    slot = getattr(properties, "pci_device_id", 0)
    return CudaDevice(
        index=index,
        uuid=None if uuid is None else str(uuid),
        pci_bus_id=None if bus is None else f"{domain:08X}:{bus:02X}:{slot:02X}.0",
    )


def find_gpu(nvml: Nvml, cuda: CudaDevice) -> Gpu:
    """The NVML device with the UUID or, failing that, the PCI address of `cuda`.

    Raises NvmlUnavailable, with every attempt, where NVML knows neither.
    """
    tried: list[str] = []
    lookups = [("nvmlDeviceGetHandleByUUID", name) for name in _uuid_names(cuda)]
    if cuda.pci_bus_id:
        lookups.append(("nvmlDeviceGetHandleByPciBusId", cuda.pci_bus_id))
    for function, name in lookups:
        try:
            return _describe(nvml, nvml.call(function, name), cuda)
        except NvmlUnavailable as error:
            tried.append(f"{name}: {error}")
    raise NvmlUnavailable(
        f"no NVML device for cuda:{cuda.index} ({'; '.join(tried) or 'torch tells no UUID or PCI address'})"
    )


@contextmanager
def open_gpu(device: str) -> Iterator[tuple[Nvml, Gpu]]:
    """An NVML session and the torch device in it. Raises NvmlUnavailable where there is none."""
    cuda = cuda_device(device)
    nvml = Nvml()
    try:
        yield nvml, find_gpu(nvml, cuda)
    finally:
        nvml.close()


def derived_peak(nvml: Nvml, gpu: Gpu) -> Reading:
    """Bytes per second that the memory's clock and width allow: 2 transfers × clock × bus width / 8."""
    if gpu.mig_instance is not None:
        return Reading(value=None, reason="a MIG slice has only a part of the card's memory bandwidth")
    try:
        clock_mhz = nvml.call("nvmlDeviceGetMaxClockInfo", gpu.card, CLOCK_MEMORY)
        width_bits = nvml.call("nvmlDeviceGetMemoryBusWidth", gpu.card)
    except NvmlUnavailable as error:
        return Reading(value=None, reason=str(error))
    peak = 2 * clock_mhz * 1e6 * width_bits / 8
    if not (math.isfinite(peak) and peak > 0):
        return Reading(value=None, reason=f"NVML states {clock_mhz} MHz and {width_bits} bit")
    return Reading(value=peak, source="nvml")


def _uuid_names(cuda: CudaDevice) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name.strip() for name in visible[cuda.index : cuda.index + 1] if name.strip().startswith("MIG-")]
    if cuda.uuid:
        bare = cuda.uuid.removeprefix("GPU-").removeprefix("MIG-")
        # A slice first: torch may state its UUID, while the card's would give the readings of all its slices.
        names += [f"MIG-{bare}", f"GPU-{bare}"]
    return names


def _describe(nvml: Nvml, handle: Any, cuda: CudaDevice) -> Gpu:
    card, instance = handle, None
    if try_call(nvml, "nvmlDeviceIsMigDeviceHandle", handle):
        card = nvml.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        instance = nvml.call("nvmlDeviceGetGpuInstanceId", handle)
    elif (try_call(nvml, "nvmlDeviceGetMigMode", handle) or [None])[0] == MIG_ENABLED:
        # The card's readings would mix the work of every slice.
        raise NvmlUnavailable("MIG is on and NVML does not tell which slice this process uses")
    uuid = try_call(nvml, "nvmlDeviceGetUUID", handle)
    return Gpu(handle, card, instance, cuda.index, try_call(nvml, "nvmlDeviceGetIndex", card), text(uuid))


def text(value: Any) -> str | None:
    """An NVML string; older modules return bytes."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if value is None else str(value)


def try_call(nvml: Nvml, function: str, *arguments: Any) -> Any:
    """Like `Nvml.call`, but None where the call fails."""
    try:
        return nvml.call(function, *arguments)
    except NvmlUnavailable:
        return None
