"""What if: the speedup at a K and batch that were not measured, here or on another GPU.

    S = AL(K)·(T_t + plain overhead) / (drafting + t_target(B, K + 1) + overhead)

Acceptance travels: it depends on the models and the text. Latency does not: here it comes from the run's surfaces, on
another GPU from `elsewhere`. All of it is drawn from its uncertainty, and a figure is the median of the draws with the
95 % interval. Nothing here was measured, so each row says from where its latency is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spectune.errors import UsageError
from spectune.speedup.crossing import Crossing, crossing
from spectune.speedup.curve import Array
from spectune.speedup.devices import Device, device_of, used_gpu
from spectune.speedup.elsewhere import DeviceDraws, Efficiency, bytes_read, draw, efficiency_of
from spectune.speedup.latency import Surfaces, round_cost, run_surfaces
from spectune.speedup.positions import Measured, length_draws
from spectune.speedup.profile import Profile
from spectune.speedup.run import Run
from spectune.speedup.surface import REACH, Surface
from spectune.speedup.uncertainty import FLAT, Verdict, ends, verdict
from spectune.sweeping.cell import ModelInfo
from spectune.sweeping.drafter_names import drafts_at_once, drafts_trees
from spectune.sweeping.memory import is_part_of, own_kv_bytes

DRAWS = 400
_MOST = 10_000  # places at once: each has DRAWS draws
_FILL = 0.9  # of a device's memory
_NORMAL = 0.6745  # the median absolute error of a normal distribution of standard deviation 1

Source = Literal["surfaces of this run", "device table"]


@dataclass(frozen=True, slots=True)
class Row:
    """An estimate. Rates in tokens/s. `fits` None where the device's memory is unknown.

    `extrapolated`: the K lies beyond twice the largest that was drafted, or the size beyond twice the timed range.
    """

    batch: int
    k: int
    speedup: Measured
    verdict: Verdict
    per_user: Measured
    in_all: Measured
    fits: bool | None
    extrapolated: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """One drafter on one suite. Without rows there is a `reason`.

    `best` holds for each batch the smallest K within 1 % of the best, 0 where no K is FASTER; `flat` are all of those.
    """

    suite: str
    drafter: str
    rule: str
    context: float
    rows: tuple[Row, ...]
    best: dict[int, int]
    flat: dict[int, tuple[int, ...]]
    crossover: Crossing | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class WhatIf:
    source: Source
    device: str | None
    efficiency: Efficiency | None
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True)
class _Clock:
    """Draws of a round's time: plain [DRAWS, batches], speculative [DRAWS, batches, K].

    `beyond` and `fits` are [batches, K]; `fits` None where the device's memory is unknown.
    """

    plain: Array
    speculative: Array
    beyond: NDArray[np.bool_]
    fits: NDArray[np.bool_] | None


def what_if(
    run: Run,
    profiles: Sequence[Profile],
    ks: Sequence[int],
    batches: Sequence[int],
    *,
    gpu: Device | None = None,
    context: float | None = None,
    drafters: Collection[str] | None = None,
) -> WhatIf:
    """Every drafter and suite of the run at every K and batch, at the suite's mean context unless one is given.

    Args:
        profiles: of all cells, since all of them tell what the target's forwards take.
        drafters: predict only these.

    Raises UsageError for more than 10 000 places.
    """
    if len(ks) * len(batches) > _MOST:
        raise UsageError(f"{len(ks)} K at {len(batches)} batches are more than {_MOST} places", "ask for fewer")
    usable = [p for p in profiles if p.excluded is None and p.spec.k > 0]
    surfaces = run_surfaces(profiles)
    efficiency, drawn = None, None
    if gpu is not None:
        efficiency = efficiency_of(surfaces.target.best, run.info.target, _own_device(run))
        drawn = draw(gpu, efficiency, DRAWS)
    groups: dict[tuple[str, str, str], list[Profile]] = {}
    for p in usable:
        if drafters is None or p.spec.drafter in drafters:
            groups.setdefault((p.spec.suite, p.spec.drafter, p.spec.rule), []).append(p)
    found = []
    for name, members in groups.items():
        typical = [p.timing.mean_context for p in members if p.timing.mean_context is not None]
        where = context if context is not None else fmean(typical) if typical else 0.0
        found.append(_predict(name, members, ks, batches, where, run, surfaces, drawn))
    source: Source = "surfaces of this run" if gpu is None else "device table"
    return WhatIf(source, gpu.name if gpu else None, efficiency, tuple(found))


def _predict(
    name: tuple[str, str, str],
    members: Sequence[Profile],
    ks: Sequence[int],
    batches: Sequence[int],
    context: float,
    run: Run,
    surfaces: Surfaces,
    drawn: DeviceDraws | None,
) -> Prediction:
    def nothing(reason: str | None) -> Prediction:
        return Prediction(*name, context, (), {}, {}, None, reason)

    if drafts_trees(name[1]):
        return nothing("trees are not predicted: what a wider tree would accept was not counted")
    largest = max(p.spec.k for p in members)
    deepest = [p.cell for p in members if p.spec.k == largest]
    lengths = length_draws(deepest, max(ks), DRAWS)
    if lengths is None:
        return nothing(f"the acceptance beyond K {largest} is not identifiable")
    ks, batches = sorted(ks), sorted(batches)
    places = np.array([[(b, k + 1, context) for k in ks] for b in batches], dtype=float)  # [batches, K, (B, q, ctx)]
    clock, reason = _device_clock(name[1], run, drawn, places) if drawn else _own_clock(members, surfaces, places)
    if clock is None:
        return nothing(reason)
    length = lengths[1:] if len(lengths) > 1 else np.repeat(lengths, DRAWS, axis=0)  # [DRAWS, largest K]
    speeds = length[:, None, [k - 1 for k in ks]] / clock.speculative  # tokens/s of a row: [DRAWS, batches, K]
    speedups = speeds * clock.plain[:, :, None]
    per_user, sped = _middles(speeds), _middles(speedups)
    rows = []
    for i, b in enumerate(batches):
        for j, k in enumerate(ks):
            own, user = sped[i][j], per_user[i][j]
            outside = k > REACH * largest or bool(clock.beyond[i, j])
            answer: Verdict = verdict(own.low, own.high) if len(lengths) > 1 else "CAN'T TELL"
            fits = None if clock.fits is None else bool(clock.fits[i, j])
            rows.append(Row(b, k, own, answer, user, _times(user, b), fits, outside))
    flat = {b: _flat([r for r in rows if r.batch == b]) for b in batches}
    crossover = None
    if len(batches) > 1:
        top = [max(range(len(ks)), key=lambda j, i=i: sped[i][j].value) for i in range(len(batches))]  # type: ignore[misc]
        matrix = np.stack([speedups[:, i, j] for i, j in enumerate(top)], axis=1)
        crossover = crossing(batches, [sped[i][j].value for i, j in enumerate(top)], matrix)
    return Prediction(
        *name, context, tuple(rows), {b: f[0] if f else 0 for b, f in flat.items()}, flat, crossover, None
    )


def _flat(rows: Sequence[Row]) -> tuple[int, ...]:
    faster = [r for r in rows if r.verdict == "FASTER" and r.fits is not False]
    best = max((r.speedup.value for r in faster), default=0.0)
    return tuple(r.k for r in faster if r.speedup.value >= (1 - FLAT) * best)


def _middles(draws: Array) -> list[list[Measured]]:
    """[DRAWS, batches, K] -> median and 95 % interval of each batch and K."""
    (low, high), middle = ends(draws), np.median(draws, axis=0)
    return [
        [Measured(float(middle[i, j]), float(low[i, j]), float(high[i, j])) for j in range(draws.shape[2])]
        for i in range(draws.shape[1])
    ]


def _times(found: Measured, factor: float) -> Measured:
    low, high = (None if end is None else end * factor for end in (found.low, found.high))
    return Measured(found.value * factor, low, high)


def _own_clock(members: Sequence[Profile], surfaces: Surfaces, places: Array) -> tuple[_Clock | None, str | None]:
    """From the run's surfaces: their coefficients are drawn, and each time has their held-out error on top."""
    cost, reason = round_cost(members, surfaces)
    if cost is None:
        return None, reason
    random = np.random.default_rng(0)
    single = places[:, :1].copy()
    single[:, :, 1] = 1
    plain, verify = _drawn(cost.target, random, (single, places))
    step: Array | float = cost.step_seconds
    if cost.draft is not None:
        (step,) = _drawn(cost.draft, random, (single,))
    drafting = cost.drafting_seconds + (places[0, :, 1] - 1) * step
    low, high = np.array(cost.target.ranges).T
    beyond = ((places > REACH * high) | (places < low / REACH)).any(axis=2)
    return _Clock(
        plain[:, :, 0] + cost.plain_overhead_seconds,
        np.asarray(drafting + verify + cost.overhead_seconds),
        beyond,
        None,
    ), None


def _drawn(surface: Surface, random: np.random.Generator, groups: Sequence[Array]) -> list[Array]:
    """Times [DRAWS, batches, K] at each group of places [batches, K, (B, q, ctx)]; one error per draw and group."""
    seconds = surface.draws(random, DRAWS, np.concatenate([places.reshape(-1, 3) for places in groups]))
    width = (surface.held_out_median or 0.0) / _NORMAL
    found, first = [], 0
    for places in groups:
        shape, after = places.shape[:2], first + places.size // 3
        errors = np.exp(random.normal(0, width, (DRAWS, 1, 1)))
        found.append(seconds[:, first:after].reshape(DRAWS, *shape) * errors)
        first = after
    return found


def _device_clock(drafter: str, run: Run, drawn: DeviceDraws, places: Array) -> tuple[_Clock | None, str | None]:
    target, draft = run.info.target, run.info.drafters.get(drafter)
    rows, query, context = places[:, :, 0], places[:, :, 1], places[0, 0, 2]
    speculative = drawn.seconds(target, rows, query, context) + drawn.overhead_seconds[:, None, None]
    if draft is not None:
        steps = 1.0 if drafts_at_once(drafter) else query - 1
        speculative = speculative + steps * drawn.seconds(draft, rows[:, :1], 1, context)
    plain = drawn.seconds(target, rows[:, :1], 1, context)[:, :, 0] + drawn.plain_overhead_seconds[:, None]
    held = _bytes_held(target, draft, rows * (context + query))
    nowhere = np.zeros(rows.shape, dtype=bool)
    return _Clock(plain, speculative, nowhere, np.asarray(held <= _FILL * drawn.device.memory_bytes)), None


def _bytes_held(target: ModelInfo, draft: ModelInfo | None, tokens: Array) -> Array:
    """Weights and caches in bfloat16; a draft made of the target's layers shares both."""
    own = [target] if draft is None or is_part_of(target, draft) else [target, draft]
    weights = sum(2 * m.parameters for m in own)
    caches = [target] if draft is None or own_kv_bytes(target, draft) == 0 else [target, draft]
    return np.asarray(weights + sum(bytes_read(m)[1] for m in caches) * tokens)


def _own_device(run: Run) -> Device | None:
    gpu = used_gpu(run.info.environment)
    return None if gpu is None else device_of(str(gpu.get("name")))
