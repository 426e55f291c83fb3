"""The measured acceptance of one configuration, in the form in which servers can be told to imitate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectune.speedup.profile import Config, Profile

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """Pooled over the rounds that had a draft: servers roll their dice in no others.

    `length` counts the target's own token of a round. `joint[i-1]` is the share of rounds that kept i tokens or more.
    """

    length: float
    joint: tuple[float, ...]


def measured_acceptance(choice: Config, profiles: Sequence[Profile]) -> MeasuredAcceptance | None:
    """Over all suites and batches at which `choice` was measured; None where nothing was drafted."""
    found = [p.acceptance for p in profiles if p.config == choice and p.excluded is None]
    drafted = sum(a.rounds - a.undrafted_rounds for a in found)
    if drafted == 0:
        return None
    kept = [sum((a.joint_acceptance[i] or 0.0) * a.rounds for a in found) for i in range(choice.k)]
    accepted = sum(a.accepted for a in found)
    joint = tuple(round(n / drafted, _DIGITS) for n in kept)
    return MeasuredAcceptance(round(1 + accepted / drafted, _DIGITS), joint)
