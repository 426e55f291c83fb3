"""The bytes model: what a forward must read, and what that predicts before anything is measured.

Decoding at a small batch is limited by memory: each forward reads every weight once, and each row's KV cache.
Plain decoding pays that per token, a speculative round pays it once for the target and once per step for the
draft. So

    step  = weights + batch × context × KV per token
    round = target step + draft steps × draft step

and bytes / time / peak is the model bandwidth utilisation (MBU). Dividing by the time per *token* instead
would exceed 100 % under speculation, which emits several tokens per read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spectune.sweeping.cell import Bandwidth, ModelInfo, PassResult, Reading, RoundTimes

if TYPE_CHECKING:
    from spectune.measuring.nvml import GpuReadings


@dataclass(frozen=True, slots=True)
class BatchTheory:
    """Plain decoding of `batch` rows if memory is the only limit."""

    batch: int
    weight_bytes: int  # per step
    kv_bytes: int  # per step
    ceiling_tokens_per_second: Reading  # batch × peak / bytes

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class DraftTheory:
    """What K tokens from a drafter cost at one batch, and how good they must be.

    `cost_ratio` is draft bytes / target bytes per step, None where the target's are zero.
    """

    drafter: str
    batch: int
    k: int
    cost_ratio: float | None
    break_even_acceptance: float | None  # None: cannot pay, or the ratio is unknown


@dataclass(frozen=True, slots=True)
class TheoryCard:
    """What the bytes model predicts; printed before the measurement, which then confirms or refutes it."""

    mean_context: float
    peak_bytes_per_second: Reading
    batches: tuple[BatchTheory, ...]
    drafts: tuple[DraftTheory, ...]  # one per drafter, batch and K, in this order


def bytes_per_step(model: ModelInfo, batch: int, mean_context: float) -> int:
    """Bytes that one forward of `batch` rows with `mean_context` cached tokens each reads."""
    return model.weight_bytes_per_step + _kv_bytes(model, batch, mean_context)


def bytes_per_round(
    target: ModelInfo,
    draft: ModelInfo | None,
    *,
    batch: int,
    mean_context: float,
    draft_steps: float,
) -> int:
    """Bytes of one round: one target forward and `draft_steps` draft forwards (a mean need not be whole).

    A drafter without weights (None) reads nothing.
    """
    step = bytes_per_step(draft, batch, mean_context) if draft else 0
    return bytes_per_step(target, batch, mean_context) + round(draft_steps * step)


def mbu(bytes_: float, seconds: float | None, peak: Reading) -> Reading:
    """Share of the peak that reading `bytes_` in `seconds` is: 1 is all of it, more is not clipped.

    The source is `model`; null with the reason where the time or the peak is unknown or zero.
    """
    if seconds is None:
        return Reading(value=None, reason="the round time is unknown")
    if not seconds > 0:
        return Reading(value=None, reason="the round time is zero")
    if not peak.value:
        return Reading(value=None, reason=peak.reason or "the peak bandwidth is zero")
    return Reading(value=bytes_ / seconds / peak.value, source="model")


def assess_bandwidth(
    target: ModelInfo,
    draft: ModelInfo | None,
    passes: Sequence[PassResult],
    batch: int,
    peak: Reading,
    readings: GpuReadings | None,
) -> tuple[Bandwidth, tuple[str, ...]]:
    """A cell's bandwidth figures and the warnings they call for.

    Means over the passes of a mode are weighted by rounds. `readings` is None where no GPU monitor ran.
    """
    plain, speculative = (_Rounds.of(passes, mode) for mode in ("plain", "speculative"))
    step_bytes = bytes_per_step(target, batch, plain.context or 0)
    round_bytes = bytes_per_round(
        target,
        draft,
        batch=batch,
        mean_context=speculative.context or 0,
        draft_steps=speculative.draft_steps or 0,
    )
    mbu_plain = mbu(step_bytes, plain.seconds, peak)
    if draft and draft.device != target.device:
        reason = f"the draft is read on {draft.device} and the target on {target.device}: two peaks"
        mbu_speculative = Reading(value=None, reason=reason)
    elif draft and speculative.draft_steps is None:
        mbu_speculative = Reading(value=None, reason="the number of draft steps is unknown")
    else:
        mbu_speculative = mbu(round_bytes, speculative.seconds, peak)
    draft_bytes = round_bytes - bytes_per_step(target, batch, speculative.context or 0)
    if mbu_speculative.value is None:
        mbu_draft = mbu_speculative
    elif not draft_bytes:
        mbu_draft = Reading(value=None, reason="the drafter reads no weights")
    else:
        mbu_draft = mbu(draft_bytes, speculative.draft_seconds, peak)
    missing = Reading(value=None, reason="no GPU monitor ran")
    bandwidth = Bandwidth(
        bytes_per_plain_step=step_bytes,
        bytes_per_round=round_bytes,
        peak_bytes_per_second=peak,
        mbu_plain=mbu_plain,
        mbu_speculative=mbu_speculative,
        mbu_draft=mbu_draft,
        mbu_verify=mbu(round_bytes - draft_bytes, speculative.verify_seconds, peak),
        dram_utilization=readings.dram_utilization if readings else missing,
        memory_busy=readings.memory_busy if readings else missing,
        power_watts=readings.power_watts if readings else missing,
        sm_clock_mhz=readings.sm_clock_mhz if readings else missing,
        throttle_reasons=readings.throttle_reasons if readings else (),
    )
    return bandwidth, _warnings(bandwidth, plain, speculative)


def theory_card(
    target: ModelInfo,
    drafters: Mapping[str, ModelInfo | None],
    *,
    batches: Sequence[int],
    ks: Sequence[int],
    mean_context: float,
    peak: Reading,
) -> TheoryCard:
    """Predict ceilings and break-even acceptances.

    `drafters` maps a name to its model, or to None where the drafter has no weights.
    """
    plain = tuple(_batch_theory(target, batch, mean_context, peak) for batch in batches)
    drafts = []
    for name, draft in drafters.items():
        for theory in plain:
            draft_bytes = bytes_per_step(draft, theory.batch, mean_context) if draft else 0
            ratio = draft_bytes / theory.step_bytes if theory.step_bytes else None
            for k in ks:
                needed = None if ratio is None else break_even_acceptance(k, ratio)
                drafts.append(DraftTheory(name, theory.batch, k, ratio, needed))
    return TheoryCard(mean_context, peak, plain, tuple(drafts))


def break_even_acceptance(k: int, cost_ratio: float) -> float | None:
    """The smallest per-token acceptance α at which drafting `k` tokens pays for itself, None where it cannot.

    Solves 1 + α + … + α^k = 1 + k × cost_ratio: tokens per round against its cost in plain steps, if
    verifying k + 1 tokens costs as much as one step. The left side is (1 − α^(k+1)) / (1 − α) (Leviathan et
    al. 2023, eq. 1).
    """
    if cost_ratio > 1:
        return None
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if math.fsum(middle**i for i in range(1, k + 1)) < k * cost_ratio:
            low = middle
        else:
            high = middle
    return high if cost_ratio > 0 else 0.0


def _kv_bytes(model: ModelInfo, batch: int, mean_context: float) -> int:
    return round(batch * mean_context * model.kv_bytes_per_token)


def _batch_theory(target: ModelInfo, batch: int, mean_context: float, peak: Reading) -> BatchTheory:
    weights, kv = target.weight_bytes_per_step, _kv_bytes(target, batch, mean_context)
    if peak.value is None:
        ceiling = peak
    elif weights + kv == 0:
        ceiling = Reading(value=None, reason="the target reads no bytes")
    else:
        ceiling = Reading(value=batch * peak.value / (weights + kv), source="model")
    return BatchTheory(batch, weights, kv, ceiling)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Means over all rounds of one mode; None where a pass with rounds does not tell."""

    mode: str
    seconds: float | None
    context: float | None
    draft_steps: float | None
    draft_seconds: float | None
    verify_seconds: float | None

    @classmethod
    def of(cls, passes: Sequence[PassResult], mode: Literal["plain", "speculative"]) -> _Rounds:
        times = [p.times for p in passes if p.mode == mode and p.times.rounds]
        return cls(
            mode,
            _weighted([_round_seconds(t, mode) for t in times], times),
            _weighted([t.mean_context for t in times], times),
            _weighted([t.draft_steps_mean for t in times], times),
            _weighted([t.draft_mean for t in times], times),
            _weighted([t.verify_mean for t in times], times),
        )


def _round_seconds(times: RoundTimes, mode: str) -> float | None:
    # A plain pass drafts nothing, whether it says so with a zero or a null.
    draft = times.draft_mean if mode == "speculative" else times.draft_mean or 0.0
    if draft is None or times.verify_mean is None or times.overhead_mean is None:
        return None
    return draft + times.verify_mean + times.overhead_mean


def _weighted(values: Sequence[float | None], times: Sequence[RoundTimes]) -> float | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return math.fsum(v * t.rounds for v, t in zip(known, times, strict=True)) / sum(t.rounds for t in times)


def _warnings(bandwidth: Bandwidth, *modes: _Rounds) -> tuple[str, ...]:
    found = []
    for rounds, utilisation in zip(modes, (bandwidth.mbu_plain, bandwidth.mbu_speculative), strict=True):
        if utilisation.value is not None and utilisation.value > 1:
            found.append(
                f"{rounds.mode} decoding would use {utilisation.value:.2f} of the peak bandwidth: "
                "the bytes model or the peak is wrong, or the weights stay in a cache"
            )
        if utilisation.value is not None and rounds.context is None:
            found.append(f"the context of {rounds.mode} rounds is unknown, so their KV bytes are left out")
    if bandwidth.throttle_reasons:
        found.append(f"the GPU held its clocks down: {', '.join(bandwidth.throttle_reasons)}")
    return tuple(found)
