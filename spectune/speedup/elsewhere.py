"""The time of a forward on a device that was not there: a roofline from its published peaks and ranges of efficiency.

    t = layers·launch + (memory^4 + compute^4)^(1/4)
    memory  = (weight bytes + KV bytes·B·ctx) / (bandwidth·e_m)
    compute = 2·weights read·B·q / (FLOP/s·e_c)

It is the form of the latency surface. Efficiencies and the time per layer come from the run's own surface where it was
measured on a GPU of the table and determines them; otherwise from the wide ranges below, which are assumptions. One
draw of them holds for target and draft alike, so much of the uncertainty cancels in a speedup.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spectune.speedup.curve import Array
from spectune.speedup.devices import Device
from spectune.speedup.surface import Surface
from spectune.sweeping.cell import ModelInfo
from spectune.sweeping.memory import BYTES

Range = tuple[float, float]
# Assumed, where nothing was measured.
MEMORY_EFFICIENCY: Range = (0.5, 0.9)
COMPUTE_EFFICIENCY: Range = (0.3, 0.8)
LAYER_SECONDS: Range = (5e-6, 50e-6)  # recorded graphs … separate launches
OVERHEAD_SECONDS: Range = (50e-6, 1e-3)  # of a speculative round; a plain one has a share of it, 0 to 1
_SHARPNESS = 4
_BYTES = 2  # per weight and cached value: bfloat16


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Ranges that the draws come from; `measured` names those that the run determined."""

    memory: Range = MEMORY_EFFICIENCY
    compute: Range = COMPUTE_EFFICIENCY
    layer_seconds: Range = LAYER_SECONDS
    measured: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """A device with its efficiencies drawn, [draws] each."""

    device: Device
    memory: Array
    compute: Array
    layer_seconds: Array
    overhead_seconds: Array
    plain_overhead_seconds: Array

    def seconds(self, model: ModelInfo, rows: Array, query: Array | float, context: float) -> Array:
        """One forward of a model stored in bfloat16: [draws, batches, K] for rows and queries [batches, K]."""
        memory_share, compute_share, launch = (
            drawn[:, None, None] for drawn in (self.memory, self.compute, self.layer_seconds)
        )
        weights, cached = bytes_read(model)
        memory = (weights + cached * rows * context) / (self.device.bandwidth * memory_share)
        compute = weights / _BYTES * 2 * rows * query / (self.device.flops * compute_share)
        return np.asarray(model.layers * launch + (memory**_SHARPNESS + compute**_SHARPNESS) ** (1 / _SHARPNESS))


def draw(device: Device, efficiency: Efficiency, draws: int) -> DeviceDraws:
    """Efficiencies uniform over their ranges, times uniform over the logarithms of theirs. Always the same draws."""
    random = np.random.default_rng(0)
    overhead = _log_uniform(random, OVERHEAD_SECONDS, draws)
    return DeviceDraws(
        device,
        random.uniform(*efficiency.memory, draws),
        random.uniform(*efficiency.compute, draws),
        _log_uniform(random, efficiency.layer_seconds, draws),
        overhead,
        overhead * random.uniform(0, 1, draws),
    )


def efficiency_of(surface: Surface | None, model: ModelInfo, device: Device | None) -> Efficiency:
    """What the target's surface says about the device that it was measured on; the assumed ranges for the rest."""
    if surface is None or device is None or model.dtype not in ("bfloat16", "float16"):
        return Efficiency()
    known = {c.name: (c.low, c.high) for c in surface.coefficients if c.low and c.high}
    weights, _ = bytes_read(model)
    ranges: dict[str, Range] = {}
    if "weights" in known:
        low, high = known["weights"]
        ranges["memory"] = weights / high / device.bandwidth, weights / low / device.bandwidth
    if "token" in known:
        low, high = known["token"]
        ranges["compute"] = weights / high / device.flops, weights / low / device.flops  # 2 operations, 2 bytes
    if "fixed" in known and model.layers:
        low, high = known["fixed"]
        ranges["layer_seconds"] = low / model.layers, high / model.layers
    # An efficiency above 1 says that the bytes model is wrong there, so it is not carried elsewhere.
    sound = {name: r for name, r in ranges.items() if name == "layer_seconds" or r[1] <= 1}
    return Efficiency(
        memory=sound.get("memory", MEMORY_EFFICIENCY),
        compute=sound.get("compute", COMPUTE_EFFICIENCY),
        layer_seconds=sound.get("layer_seconds", LAYER_SECONDS),
        measured=tuple(sound),
    )


def bytes_read(model: ModelInfo) -> tuple[float, float]:
    """Bytes of weights that one forward reads, and of keys and values per cached token, in bfloat16."""
    of_weights = _BYTES / (1 if model.int8 else BYTES.get(model.dtype, _BYTES))
    of_cache = _BYTES / BYTES.get(model.dtype, _BYTES)
    return model.weight_bytes_per_step * of_weights, model.kv_bytes_per_token * of_cache


def _log_uniform(random: np.random.Generator, span: Range, draws: int) -> Array:
    return np.asarray(np.exp(random.uniform(np.log(span[0]), np.log(span[1]), draws)))
