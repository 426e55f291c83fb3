"""Predicting cells that were not measured: acceptance from the curve, times from the latency surfaces.

S(K, B) = AL(K) · (T_t + plain overhead) / (K·T_d + t_verify(B, K + 1) + overhead)         T_t = t_target(B, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectune.speedup.curve import AcceptanceCurve
from spectune.speedup.surface import Surface
from spectune.speedup.uncertainty import FLAT


@dataclass(frozen=True, slots=True)
class Optimum:
    """`flat` are all K within 1 % of the best, ascending: the first wastes the least where less is accepted."""

    k: int
    speedup: float
    flat: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundModel:
    """Everything a round of one drafter needs.

    A draft step's time comes from the draft's surface, or is `draft_step_seconds` where its surface is unknown; a
    drafter that proposes all K at once takes `draft_seconds` a round.
    """

    curve: AcceptanceCurve
    target: Surface
    draft: Surface | None = None
    draft_step_seconds: float = 0.0
    draft_seconds: float = 0.0
    overhead_seconds: float = 0.0
    plain_overhead_seconds: float = 0.0

    def round_seconds(self, k: int, rows: float, context: float) -> float:
        """One round at `k`. Raises UsageError beyond twice the range that was measured."""
        if k == 0:
            return self.target.seconds(rows, 1, context) + self.plain_overhead_seconds
        step = self.draft_step_seconds
        if self.draft is not None:
            step = self.draft.seconds(rows, 1, context)
        drafting = self.draft_seconds + k * step
        verifying = self.target.seconds(rows, k + 1, context)
        return drafting + verifying + self.overhead_seconds

    def speedup(self, k: int, rows: float, context: float) -> float:
        """Over plain decoding at the same batch and context; K = 0 is plain decoding, 1."""
        plain = self.round_seconds(0, rows, context)
        return self.curve.length_at(k) * plain / self.round_seconds(k, rows, context)

    def optimum(self, ks: Sequence[int], rows: float, context: float) -> Optimum:
        """The best of `ks` and plain decoding, K = 0."""
        speeds = {k: self.speedup(k, rows, context) for k in sorted({0, *ks})}
        best = max(speeds, key=lambda k: speeds[k])
        return Optimum(best, speeds[best], tuple(k for k, s in speeds.items() if s >= (1 - FLAT) * speeds[best]))
