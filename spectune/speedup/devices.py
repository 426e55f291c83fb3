"""The device table: published peaks of GPUs. See devices.toml for the sources."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spectune.errors import UsageError

_TABLE = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks: bytes per second of memory, dense bfloat16 operations per second, bytes of memory."""

    key: str
    name: str
    bandwidth: float
    flops: float
    memory_bytes: float
    match: tuple[str, ...]  # all of them are words of the name that the driver gives


@cache
def devices() -> dict[str, Device]:
    """All devices by their key."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {
        key: Device(
            key, row["name"], row["bandwidth"] * 1e9, row["tflops"] * 1e12, row["memory"] * 1e9, tuple(row["match"])
        )
        for key, row in table.items()
    }


def device(name: str) -> Device:
    """The device that a user names, in any case, with or without dashes. Raises UsageError for an unknown one."""
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    aliases = {"a100": "a10080gb", "h100sxm": "h100"}
    wanted = aliases.get(wanted, wanted)
    for found in devices().values():
        if wanted in (re.sub("-", "", found.key), re.sub(r"[^a-z0-9]", "", found.name.lower())):
            return found
    raise UsageError(f"--gpu does not know {name!r}", f"choose from {', '.join(devices())}")


def used_gpu(environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a run's environment holds about the GPU that it used; None for a run without one."""
    kind, _, index = str(environment.get("device")).partition(":")
    gpus = environment.get("gpus")
    if kind != "cuda" or not isinstance(gpus, list) or len(gpus) <= int(index or 0):
        return None
    found: dict[str, Any] = gpus[int(index or 0)]
    return found


def device_of(driver_name: str) -> Device | None:
    """The device behind a driver's name such as "NVIDIA H100 80GB HBM3"; None where it is not in the table."""
    words = set(re.split(r"[\s_-]+", driver_name.lower()))
    fitting = [d for d in devices().values() if set(d.match) <= words]
    return max(fitting, key=lambda d: len(d.match), default=None)
