"""K by batch: from the choices at each measured batch, in a form that all servers' modules read."""

from __future__ import annotations

from collections.abc import Sequence

from spectune.recommending.choice import Advice
from spectune.speedup.profile import Config

BatchK = tuple[int, int, int]  # first batch, last batch, K; 0: no speculation


def batch_schedule(choice: Config, by_batch: Sequence[Advice]) -> tuple[BatchK, ...]:
    """What `choice`'s drafter and rule should do at each batch; empty where one K does for all.

    A K holds up to the next measured batch, and the first from batch 1 on. Where the drafter is not clearly faster
    than plain decoding, K is 0.
    """
    measured = sorted((a.batch, _k(choice, a)) for a in by_batch if a.batch is not None)
    ranges: list[BatchK] = []
    for (batch, k), following in zip(measured, [*measured[1:], None], strict=True):
        last = batch if following is None else following[0] - 1
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], last, k)
        else:
            ranges.append((batch if ranges else 1, last, k))
    return tuple(ranges) if len(ranges) > 1 else ()


def _k(choice: Config, advice: Advice) -> int:
    """The K chosen at this batch, or the fastest of the same drafter where another drafter was chosen."""
    own = [advice.choice] if advice.choice else []
    own += [o.config for o in advice.ranking if o.speedup.verdict == "FASTER"]
    same = (c.k for c in own if (c.drafter, c.rule) == (choice.drafter, choice.rule))
    return next(same, 0)
