"""Which prompts a cell measures: all of its suite, or so many that its acceptance length is known well enough."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from spectune.engines.engine import Request
from spectune.speedup.positions import pooled_length
from spectune.speedup.precision import SamplePlan, plan_sample
from spectune.sweeping.cell import CellSpec, PassResult

_FIRST = 8  # prompts measured before their spread is looked at


@dataclass(slots=True)
class Sample:
    """Hands out a cell's prompts in portions. `requests` are all there are; `taken` those handed out so far.

    With a precision the order is random, but the same for every cell, so that cells share their prompts. Each portion
    fills the batch.
    """

    spec: CellSpec
    requests: Sequence[Request]
    taken: list[Request] = field(default_factory=list)

    def next(self, passes: Sequence[PassResult]) -> list[Request]:
        """The prompts to measure after these passes; none when that is enough."""
        left = self._order()[len(self.taken) :]
        if self.spec.precision is None:
            some = left
        elif not self.taken:
            some = left[: max(_FIRST, self.spec.batch)]
        else:
            plan = self._plan(passes)
            some = [] if plan.enough else left[: max(plan.prompts - len(self.taken), self.spec.batch)]
        if len(left) - len(some) < self.spec.batch:
            some = left if some else some  # what is left would not fill a batch
        self.taken += some
        return some

    def shortfall(self, passes: Sequence[PassResult]) -> tuple[str, ...]:
        """A warning where all prompts were too few."""
        if self.spec.precision is None or (plan := self._plan(passes)).enough:
            return ()
        known = "unknown" if plan.half_width is None else f"known to ±{plan.half_width:.1%}"
        return (
            f"precision-not-reached: the acceptance length is {known} after all {len(self.taken)} prompts, "
            f"asked for was ±{self.spec.precision:.1%}; measure {plan.prompts} next",
        )

    def _plan(self, passes: Sequence[PassResult]) -> SamplePlan:
        assert self.spec.precision is not None
        requests = [r for p in passes if p.mode == "speculative" for r in p.requests]
        prompts = len({r.prompt_id for r in requests})
        return plan_sample(pooled_length(self.spec.suite, requests), prompts, self.spec.precision)

    def _order(self) -> list[Request]:
        if self.spec.precision is None:
            return list(self.requests)
        return sorted(self.requests, key=lambda r: hashlib.sha256(r.id.encode()).digest())
