"""The waterfall: from the ideal K + 1 tokens per plain step down to the measured speedup, one loss at a time.

    ideal        drafted + 1 tokens for every plain step
    acceptance   the acceptance length instead
    draft        and the draft's own time
    verify       and verifying costs more than a plain step
    overhead     and the round's overhead
    batch        and all of these cost more at this batch than at batch 1
    plain        but plain decoding has an overhead too
    measured     what is left: rounds with idle slots, requests of other lengths, noise

Draft, verify and overhead are taken at batch 1 where the same configuration was measured there, so that `batch` is
what the larger batch adds; otherwise they are this cell's own and `batch` is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from spectune.speedup.profile import Profile
from spectune.speedup.timing import Timing

STEPS = ("ideal", "acceptance", "draft", "verify", "overhead", "batch", "plain", "measured")


@dataclass(frozen=True, slots=True)
class Step:
    """`speedup` is what would be reached if the losses ended here; `factor` is this step's share of it."""

    name: str
    speedup: float | None
    factor: float | None


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Empty `steps` come with a reason."""

    steps: tuple[Step, ...]
    reason: str | None


def waterfall(p: Profile, alone: Profile | None = None) -> Waterfall:
    """The waterfall of a cell. `alone` is the same configuration on the same suite at batch 1, if measured."""
    counted, own = p.acceptance, _parts(p.timing)
    if counted.drafted_per_round is None or counted.acceptance_length is None:
        return Waterfall((), "nothing was decoded speculatively")
    if own is None:
        return Waterfall((), "a time of the round is unknown or zero")
    if p.speedup.value is None:
        return Waterfall((), p.speedup.reason or "the speedup is unknown")
    single = None
    if alone is not None and p.spec.batch > 1:
        single = _parts(alone.timing)
    draft, verify, overhead = single or own
    length = counted.acceptance_length
    here = length / sum(own)
    plain = p.timing.plain_round_seconds
    step = p.timing.target_step_seconds
    reached: list[float | None] = [
        counted.drafted_per_round + 1,
        length,
        length / (draft + 1),
        length / (draft + verify),
        length / (draft + verify + overhead),
        here if single else None,
        here * plain / step if plain and step else None,
        p.speedup.value,
    ]
    steps: list[Step] = []
    before: float | None = None
    for name, value in zip(STEPS, reached, strict=True):
        factor = None if value is None or not before else value / before
        steps.append(Step(name, value, factor))
        before = before if value is None else value
    return Waterfall(tuple(steps), None)


def _parts(timing: Timing) -> tuple[float, float, float] | None:
    """Draft, verification and overhead of a round in plain steps."""
    step = timing.target_step_seconds
    seconds = timing.draft_seconds, timing.verify_seconds, timing.overhead_seconds
    if not step or any(s is None for s in seconds):
        return None
    draft, verify, overhead = (s / step for s in seconds if s is not None)
    return (draft, verify, overhead) if draft + verify + overhead > 0 else None
