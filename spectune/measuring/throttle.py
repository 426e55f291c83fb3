"""Throttle reasons: why a GPU runs below the clocks it could reach, decoded from NVML's bit mask."""

from __future__ import annotations

from collections.abc import Iterable

GPU_IDLE = 0x1
_NAMES = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x100: "display_clock_setting",
}


def throttle_names(masks: Iterable[int]) -> tuple[str, ...]:
    """The reasons set in any of the masks, lowest bit first; an unknown bit is named by its value.

    The idle bit is left out: a GPU that waits for its host between two kernels is slow for no fault of its
    clocks.
    """
    seen = 0
    for mask in masks:
        seen |= mask
    seen &= ~GPU_IDLE
    bits = (1 << position for position in range(seen.bit_length()))
    return tuple(_NAMES.get(bit, f"reason_{bit:#x}") for bit in bits if seen & bit)
