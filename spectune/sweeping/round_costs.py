"""What a round costs, from rounds that were timed: in plain forwards of the place it was timed at.

A machine's speed drifts by more from one probe to the next than the costs differ that are to be compared. So a time
counts only beside the K = 0 of its own probe, which was timed in the same turns.

Verifying K tokens is the same work in many probes: of every suite, and of every drafter that drafts K each round. What
they find is drawn together as far as their own noise explains that they differ (`drawn_together`): on a steady machine
each keeps its figure, on a noisy one all have their mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spectune.engines.engine import RoundTiming
from spectune.speedup.shorter import Counts, rounds_at
from spectune.sweeping.cell import CellSpec
from spectune.sweeping.drafter_names import drafts_trees

_SMALLEST_ERROR = 1e-4  # of a time; nothing is known better

Place = tuple[str | None, str, int]  # drafter, suite, batch


class Probe(RoundTiming):
    """What a round takes on a suite's prompts.

    A drafter's probes tell what drafting takes. Without one, arbitrary tokens were verified; K = 0 is a plain step.
    `suites` are those that its verification stands for beside its own, since their contexts are similar;
    `cost_seconds` is this probe's share of what it took to find out, `asked` the largest K that was to be timed with
    it: there may have been no room for it.
    """

    drafter: str | None
    suite: str
    suites: tuple[str, ...] = ()
    batch: int
    cost_seconds: float
    asked: int = 0


@dataclass(frozen=True, slots=True)
class _Curves:
    """A place's costs by K, in forwards of its K = 0."""

    drafting: dict[int, float]  # overhead included
    verifying: dict[int, float]
    error: float
    fills: bool  # drafts K tokens in every round


class Costs:
    """Rounds in plain forwards: a round's own costs, and what a plain step is of them."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        by_place: dict[Place, dict[int, Probe]] = {}
        self._verified_on: dict[tuple[str, int], str] = {}  # by suite and batch: the suite timed in its place
        for p in probes:
            by_place.setdefault((p.drafter, p.suite, p.batch), {})[p.k] = p
            if p.drafter is None:
                self._verified_on |= {(suite, p.batch): p.suite for suite in p.suites}
        self._curves = {place: _curves(own) for place, own in by_place.items() if 0 in own}
        self._probed_on = {(name, batch): suite for name, suite, batch in self._curves if name is not None}
        self._draw_together()

    def _draw_together(self) -> None:
        alike: dict[tuple[int, int], list[_Curves]] = defaultdict(list)
        for (name, _, batch), own in self._curves.items():
            if name is None or own.fills:
                for k in own.verifying:
                    alike[batch, k].append(own)
        for (_, k), places in alike.items():
            values = np.log([own.verifying[k] for own in places])
            # A ratio has the errors of two times.
            variances = np.array([2 * own.error**2 for own in places])
            for own, value in zip(places, np.exp(drawn_together(values, variances)), strict=True):
                own.verifying[k] = float(value)

    def plain(self, spec: CellSpec) -> float | None:
        """A plain step: one forward and its overhead. None where it was not timed."""
        own = self._verification(spec.suite, spec.batch)
        return None if own is None else 1 + own.drafting[0]

    def _verification(self, suite: str, batch: int) -> _Curves | None:
        return self._curves.get((None, self._verified_on.get((suite, batch), suite), batch))

    def round(self, spec: CellSpec, counts: Counts) -> float | None:
        """A round of the cell's drafter, which offers what `counts` tell; None where it was not timed."""
        suite = self._probed_on.get((spec.drafter, spec.batch))
        here = self._verification(spec.suite, spec.batch)
        there = self._verification(suite, spec.batch) if suite else None
        if suite is None or here is None or there is None:
            return None
        own = self._curves[spec.drafter, suite, spec.batch]

        def change(k: float) -> float:
            """What verification takes more than on the suite of the drafter's probe."""
            return between(here.verifying, k) - between(there.verifying, k)

        # One that does not fill K was timed at widths nobody noted; a tree's was timed at its own.
        verifying = own.verifying if own.fills or drafts_trees(spec.drafter) else there.verifying

        def cost(k: float) -> float:
            # No verification takes less than a plain forward, whatever one bad time in a difference says.
            return between(own.drafting, k) + max(1.0, between(verifying, k) + change(k))

        if drafts_trees(spec.drafter):
            return cost(spec.k)
        return sum(share * cost(width) for width, share in widths(counts, spec.k, spec.batch).items())


def _curves(own: Mapping[int, Probe]) -> _Curves:
    forward = own[0].verify_seconds
    return _Curves(
        {k: (p.draft_seconds + p.overhead_seconds) / forward for k, p in own.items()},
        {k: p.verify_seconds / forward for k, p in own.items()},
        max(_SMALLEST_ERROR, max(p.error for p in own.values())),
        all(p.drafted >= p.k for p in own.values()) and not drafts_trees(own[0].drafter or ""),
    )


def drawn_together(values: npt.NDArray[np.float64], variances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Values of one quantity at several places, each drawn to their mean as far as noise explains its distance.

    The spread between places is estimated by moments, and each value is its posterior mean under it (DerSimonian and
    Laird, Controlled Clinical Trials 7, 1986; empirical Bayes).

    Args:
        values: [n].
        variances: [n] of each value's noise, above 0.
    """
    weights = 1 / variances
    mean = float(np.average(values, weights=weights))
    scale = weights.sum() - (weights**2).sum() / weights.sum()
    if scale <= 0:  # a single place
        return values
    excess = float((weights * (values - mean) ** 2).sum()) - (len(values) - 1)
    between_places = max(0.0, excess / float(scale))
    mean = float(np.average(values, weights=1 / (variances + between_places)))
    return mean + between_places / (between_places + variances) * (values - mean)


def widths(counts: Counts, k: int, rows: int) -> dict[int, float]:
    """How wide a verification of `rows` rows is, as shares of the rounds: as wide as the longest of their drafts.

    A row's drafts are taken to be as long as their neighbours' whatever the other rows do.
    """
    rounds: dict[int, float] = defaultdict(float)
    for (drafted, accepted), n in counts.items():
        rounds[min(drafted, k)] += n * rounds_at(drafted, accepted, k)
    total = sum(rounds.values())
    found, below, so_far = {}, 0.0, 0.0
    for width in sorted(rounds):
        so_far += rounds[width]
        chance = (so_far / total) ** rows
        found[width], below = chance - below, chance
    return found


def between(points: Mapping[int, float] | Mapping[float, float], x: float) -> float:
    """Linear interpolation; the nearest point's value outside of them."""
    xs, ys = zip(*sorted(points.items()), strict=True)
    return float(np.interp(x, xs, ys))
