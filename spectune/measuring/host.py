"""The host: what the processor is, and how much of it this process may use.

A container often sees every core of a machine but may use a few of them; torch then starts one thread per
core and the kernel throttles them all. So the cores that count are the ones left by the affinity mask and the
cgroup quota.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CACHES = Path("/sys/devices/system/cpu")
CGROUP_OF_INIT = Path("/proc/1/cgroup")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
CONTAINER_WORDS = ("docker", "kubepods", "containerd", "libpod", "lxc")

# Instruction sets that decide how fast low-precision matrix products run.
X86_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
)
ARM_FLAGS = ("asimdhp", "bf16", "i8mm", "sve")
FLAGS_THAT_MATTER = frozenset((*X86_FLAGS, *ARM_FLAGS))
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_model() -> str:
    """The processor's marketing name, or the architecture where the system does not tell."""
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "unknown"


def cpu_flags() -> tuple[str, ...]:
    """Those of FLAGS_THAT_MATTER that the processor has, sorted."""
    stated = _cpuinfo("flags") or _cpuinfo("Features") or ""
    return tuple(sorted(FLAGS_THAT_MATTER.intersection(stated.split())))


def has_fast_bf16() -> bool:
    """Whether the processor multiplies bfloat16 natively; without it bf16 may be slower than fp32."""
    return any(flag in cpu_flags() for flag in BF16_FLAGS)


def core_counts() -> tuple[int | None, int | None]:
    """Physical and logical cores of the machine, None where unknown."""
    import psutil

    return psutil.cpu_count(logical=False), psutil.cpu_count(logical=True)


def usable_cores() -> int:
    """Cores this process may really use: the smaller of affinity mask and cgroup quota, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(allowed, math.ceil(quota)) if quota else allowed)


def last_level_cache_bytes() -> int | None:
    """Size of all last-level caches together, in bytes; None where the system does not tell."""
    sizes: dict[str, int] = {}
    for cpu in CACHES.glob("cpu[0-9]*"):
        indices = sorted((cpu / "cache").glob("index[0-9]*"))
        size = _read(indices[-1] / "size") if indices else ""
        if size[-1:] in _SUFFIXES and size[:-1].isdigit():
            # Cores that share a cache name the same list of cores.
            sizes[_read(indices[-1] / "shared_cpu_list")] = int(size[:-1]) * _SUFFIXES[size[-1]]
    return sum(sizes.values()) or None


def in_wsl() -> bool:
    return "microsoft" in platform.release().lower()


def in_container() -> bool:
    """Whether the process seems to run in a container. A well hidden one is not seen."""
    if any(mark.exists() for mark in CONTAINER_MARKS):
        return True
    return any(word in _read(CGROUP_OF_INIT) for word in CONTAINER_WORDS)


def _cgroup_quota() -> float | None:
    quota, _, period = _read(CPU_QUOTA).partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return int(quota) / int(period)
    return None


def _cpuinfo(key: str) -> str | None:
    for line in _read(CPUINFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip() or None
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
