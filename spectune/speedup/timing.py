"""Times of a cell: speeds, latencies and what a round is made of. All in seconds and tokens per second.

Speeds are paired: plain and speculative passes of one repeat ran next to each other, in the same engine, at
the same batch. Rates are those with every slot busy (`sweeping.figures`); where a cell has no such round, both
modes fall back to the time that decoding took, which understates neither against the other but mixes occupancies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from spectune.sweeping.cell import CellResult, PassResult, RequestResult, RoundTimes
from spectune.sweeping.figures import decode_rate


@dataclass(frozen=True, slots=True)
class Timing:
    """None where nothing was measured or a denominator is 0. A time of a round is its mean over the cell."""

    full_occupancy: bool  # False: the decode rates are over rounds with idle slots too
    plain_tokens_per_second: float | None
    speculative_tokens_per_second: float | None
    repeat_speedups: tuple[float, ...]  # speculative / plain of each repeat
    plain_end_to_end_tokens_per_second: float
    speculative_end_to_end_tokens_per_second: float
    plain_ttft_seconds: float | None  # median over requests
    speculative_ttft_seconds: float | None
    plain_tpot_seconds: float | None
    speculative_tpot_seconds: float | None
    target_step_seconds: float | None  # T_t: one target forward of one token per row
    plain_overhead_seconds: float | None
    draft_step_seconds: float | None  # T_d; a drafter without forwards has one step per round
    draft_steps: float | None  # per round
    draft_seconds: float | None
    verify_seconds: float | None
    overhead_seconds: float | None
    mean_context: float | None

    @property
    def cost_ratio(self) -> float | None:
        """T_d / T_t."""
        return ratio(self.draft_step_seconds, self.target_step_seconds)

    @property
    def verify_inflation(self) -> float | None:
        """t_verify / T_t: 1 if verifying a draft costs what one token costs."""
        return ratio(self.verify_seconds, self.target_step_seconds)

    @property
    def round_seconds(self) -> float | None:
        parts = (self.draft_seconds, self.verify_seconds, self.overhead_seconds)
        known = [part for part in parts if part is not None]
        return math.fsum(known) if len(known) == len(parts) else None

    @property
    def overhead_share(self) -> float | None:
        """Of a round's time."""
        return ratio(self.overhead_seconds, self.round_seconds)

    @property
    def plain_round_seconds(self) -> float | None:
        if self.target_step_seconds is None or self.plain_overhead_seconds is None:
            return None
        return self.target_step_seconds + self.plain_overhead_seconds

    @property
    def break_even_length(self) -> float | None:
        """The acceptance length above which speculation pays: a round's time / a plain round's."""
        return ratio(self.round_seconds, self.plain_round_seconds)


def cell_timing(cell: CellResult) -> Timing:
    """All times of a finished cell."""
    plain = [p for p in cell.passes if p.mode == "plain"]
    speculative = [p for p in cell.passes if p.mode == "speculative"]
    full = has_full_rounds(cell)
    before, after = (decode_rate(passes, cell.spec.batch, full=full) for passes in (plain, speculative))
    steps = _weighted([p.times for p in speculative], lambda t: t.draft_steps_mean)
    draft = _weighted([p.times for p in speculative], lambda t: t.draft_mean)
    return Timing(
        full_occupancy=full,
        plain_tokens_per_second=before,
        speculative_tokens_per_second=after,
        repeat_speedups=_repeat_speedups(cell, full),
        plain_end_to_end_tokens_per_second=_end_to_end(plain),
        speculative_end_to_end_tokens_per_second=_end_to_end(speculative),
        plain_ttft_seconds=_median(plain, lambda r: r.ttft_seconds),
        speculative_ttft_seconds=_median(speculative, lambda r: r.ttft_seconds),
        plain_tpot_seconds=_median(plain, tpot),
        speculative_tpot_seconds=_median(speculative, tpot),
        target_step_seconds=_weighted([p.times for p in plain], lambda t: t.verify_mean),
        plain_overhead_seconds=_weighted([p.times for p in plain], lambda t: t.overhead_mean),
        draft_step_seconds=draft if steps == 0 else ratio(draft, steps),
        draft_steps=steps,
        draft_seconds=draft,
        verify_seconds=_weighted([p.times for p in speculative], lambda t: t.verify_mean),
        overhead_seconds=_weighted([p.times for p in speculative], lambda t: t.overhead_mean),
        mean_context=_weighted([p.times for p in speculative], lambda t: t.mean_context),
    )


def has_full_rounds(cell: CellResult) -> bool:
    """Whether every pass decoded something with all slots busy."""
    return all(
        sum(r.full_tokens for r in p.requests) > 0 and sum(r.full_seconds for r in p.requests) > 0 for p in cell.passes
    )


def tpot(request: RequestResult) -> float | None:
    """Seconds per token after the first; None for a single token."""
    return request.decode_seconds / (request.output_tokens - 1) if request.output_tokens > 1 else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole, or None where either is missing or the denominator is 0."""
    if part is None or not whole:
        return None
    return part / whole


def _repeat_speedups(cell: CellResult, full: bool) -> tuple[float, ...]:
    found = []
    for repeat in sorted({p.repeat for p in cell.passes}):
        rates = {p.mode: decode_rate([p], cell.spec.batch, full=full) for p in cell.passes if p.repeat == repeat}
        speedup = ratio(rates["speculative"], rates["plain"])
        if speedup is not None:
            found.append(speedup)
    return tuple(found)


def _end_to_end(passes: Sequence[PassResult]) -> float:
    tokens = sum(r.output_tokens for p in passes for r in p.requests)
    return tokens / math.fsum(p.wall_seconds for p in passes)


def _median(passes: Sequence[PassResult], value: Callable[[RequestResult], float | None]) -> float | None:
    known = [v for p in passes for r in p.requests if (v := value(r)) is not None]
    return median(known) if known else None


def _weighted(times: Sequence[RoundTimes], value: Callable[[RoundTimes], float | None]) -> float | None:
    """Mean weighted by rounds; None where a pass with rounds does not tell."""
    pairs = [(value(t), t.rounds) for t in times if t.rounds]
    known = [(v, n) for v, n in pairs if v is not None]
    if not known or len(known) < len(pairs):
        return None
    return math.fsum(v * n for v, n in known) / sum(n for _, n in known)
