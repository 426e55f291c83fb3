"""Advice about the machine and the measurement: memory, context drift, throttling, noise."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spectune.recommending.finding import Finding
from spectune.speedup.acceptance import rounds_and_accepted, speculative_requests
from spectune.speedup.curve import Array
from spectune.speedup.devices import used_gpu
from spectune.speedup.positions import measured
from spectune.speedup.profile import Profile
from spectune.speedup.run import Run
from spectune.speedup.timing import has_full_rounds
from spectune.speedup.uncertainty import RESAMPLES
from spectune.sweeping.cell import RequestResult
from spectune.sweeping.figures import decode_rate

TIGHT = 0.9  # of the device's memory
NOISY = 0.05  # spread of one plain workload between cells, relative
DRIFT = 0.1  # relative change of the acceptance length
_LONGER = 1.5  # the longer half's median context / the shorter's, from which a drift can show


def doubts(run: Run, profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Findings about usable cells."""
    yield from _memory(run, profiles)
    yield from _drift(profiles)
    yield from _throttled(profiles)
    yield from _noise(profiles)


def device_bytes(environment: Mapping[str, object]) -> tuple[str, int] | None:
    """Name and memory of the GPU that the run used, or of the host for a run on its processor; None where unknown."""
    gpu = used_gpu(environment)
    if gpu is not None:
        total = gpu.get("memory_bytes")
        return (str(gpu.get("name")), int(total)) if total else None
    total = environment.get("memory_bytes") if environment.get("device") == "cpu" else None
    return ("this machine", total) if isinstance(total, int) else None


def _memory(run: Run, profiles: Sequence[Profile]) -> Iterator[Finding]:
    for failed in run.failed:
        if failed.reason in ("oom", "infeasible"):
            where = f"{failed.spec.drafter}, K {failed.spec.k}, batch {failed.spec.batch}"
            text = f"{failed.message}: use a smaller batch, a shorter context or a smaller draft"
            yield Finding("memory-tight", where, "cells that did not fit", 1, 0, text)
    device = device_bytes(run.info.environment)
    used = [(p.cell.memory.measured_bytes.value or p.cell.memory.predicted_bytes, p) for p in profiles if p.cell.memory]
    if device is None or not used:
        return
    most, p = max(used, key=lambda pair: pair[0])
    share = most / device[1]
    if share > TIGHT and p.cell.memory is not None:
        plan = p.cell.memory.plan
        text = (
            f"{most / 1e9:.2f} GB are {share:.0%} of {device[0]}: weights {plan.weight_bytes / 1e9:.2f} GB, key-value "
            f"caches {plan.kv_bytes / 1e9:.2f} GB, logits {plan.logits_bytes / 1e9:.2f} GB; little room is left"
        )
        where = f"{p.spec.drafter}, K {p.spec.k}, batch {p.spec.batch}"
        yield Finding("memory-tight", where, "share of memory", share, TIGHT, text)


def _drift(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """The acceptance length of the requests with the longer contexts against that of the others."""
    groups: dict[tuple[str, str, str], list[RequestResult]] = {}
    for p in profiles:
        if p.spec.k > 0 and p.spec.synthetic is None:
            groups.setdefault((p.spec.drafter, p.spec.rule, p.spec.suite), []).extend(speculative_requests(p.cell))
    for (drafter, _, suite), requests in groups.items():
        # [accepted, rounds, context] of each prompt
        prompts: dict[str, list[float]] = {}
        for r in requests:
            own = prompts.setdefault(r.prompt_id, [0.0, 0.0, 0.0])
            rounds, accepted = rounds_and_accepted(r)
            own[0] += accepted
            own[1] += rounds
            own[2] = max(own[2], r.prompt_tokens + r.output_tokens / 2)
        rows = np.array(sorted((row for row in prompts.values() if row[1]), key=lambda row: row[2]))
        if len(rows) < 8:
            continue
        short, long = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        contexts = float(np.median(short[:, 2])), float(np.median(long[:, 2]))
        if contexts[1] < _LONGER * contexts[0]:
            continue
        random = np.random.default_rng(zlib.crc32(suite.encode()))
        draws = _length(_resampled(long, random)) / _length(_resampled(short, random)) - 1
        change = measured(float((_length(long[None]) / _length(short[None]))[0]) - 1, draws)
        if change.high is not None and change.value < -DRIFT and change.high < 0:
            text = (
                f"the acceptance length changes by {change.value:+.0%} ({change.low:+.0%} to {change.high:+.0%}) from "
                f"contexts of about {contexts[0]:.0f} to {contexts[1]:.0f} tokens: measure at those that you serve"
            )
            yield Finding("context-drift", f"{drafter}, {suite}", "relative change", change.value, -DRIFT, text)


def _resampled(rows: Array, random: np.random.Generator) -> Array:
    """[prompts, 3] -> [resamples, prompts, 3]"""
    return np.asarray(rows[random.integers(len(rows), size=(RESAMPLES, len(rows)))])


def _length(rows: Array) -> Array:
    """Acceptance lengths of [draws, prompts, (accepted, rounds, …)]."""
    return np.asarray(1 + rows[:, :, 0].sum(axis=1) / rows[:, :, 1].sum(axis=1))


def _throttled(profiles: Sequence[Profile]) -> Iterator[Finding]:
    slowed = [p for p in profiles if p.cell.bandwidth.throttle_reasons]
    if slowed:
        reasons = sorted({reason for p in slowed for reason in p.cell.bandwidth.throttle_reasons})
        cells = f"{len(slowed)} of {len(profiles)} cells"
        text = f"the GPU slowed itself down ({', '.join(reasons)}) in {cells}: cool it, or cap its clocks"
        yield Finding("throttled", "the machine", "cells", len(slowed), 0, text)


def _noise(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Plain decoding of the same prompts at one batch is the same work in every cell and repeat."""
    groups: dict[tuple[str, int, frozenset[str]], list[float]] = {}
    for p in profiles:
        full = has_full_rounds(p.cell)
        for done in p.cell.passes:
            rate = decode_rate([done], p.spec.batch, full=full) if done.mode == "plain" else None
            if rate is not None:
                prompts = frozenset(r.prompt_id for r in done.requests)  # --precision takes them in portions
                groups.setdefault((p.spec.suite, p.spec.batch, prompts), []).append(rate)
    spreads = {place: float(np.std(rates) / np.mean(rates)) for place, rates in groups.items() if len(rates) > 1}
    if spreads:
        most, spread = max(spreads.items(), key=lambda item: item[1])
        if spread > NOISY:
            text = (
                f"plain decoding, the same work each time, varies by {spread:.0%} (standard deviation) between "
                f"{len(groups[most])} passes: keep the machine free and use more repeats"
            )
            yield Finding("noisy-machine", f"{most[0]}, batch {most[1]}", "relative spread", spread, NOISY, text)
