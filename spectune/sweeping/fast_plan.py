"""The fast plan: which few cells of a grid to measure, and what the others will be.

    survey   one cell per drafter and suite, at the largest K: what is offered and accepted
    probes   a few rounds of some K per batch, with each drafter and on suites of different contexts: what drafting and
             verifying cost
    predict  every cell of the grid: tokens per round over seconds per round, against the plain step
    choose   the most promising cells of each suite and batch, all cells of the configurations that promise most over
             a batch, a suite or the whole grid, those of the best drafter's best K at each batch, and some other cells
             to check the predictions on
    again    what promises most now that some predictions have become measurements

What a chain accepts at one K tells what it accepts at a smaller one (`length_at`). A tree has its nodes elsewhere at
another K: it is surveyed at the smallest K too, and between the two its length grows with the logarithm of K.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean

from spectune.speedup.shorter import Counts, cut_length_at, length_at
from spectune.sweeping.cell import CellResult, CellSpec, Positive, Record
from spectune.sweeping.counts import spread
from spectune.sweeping.drafter_names import drafts_trees
from spectune.sweeping.figures import speculative_rounds
from spectune.sweeping.round_costs import Costs, Probe, between

SMALL_GRID = 36  # cells that are measured whole rather than planned
WORTH_A_PLAN = 0.6  # a fast plan that measures more of the grid than this is not worth its probes
CLOSE = 0.04  # cells predicted within this of the best of their suite and batch are measured too
MOST_CLOSE = 2  # but no more than so many beside the best
CHECKED = 0.02  # share of the grid that is measured for the predictions' sake
_LEAST_CHECKED, _MOST_CHECKED = 3, 6  # cells; more would tell little more of the predictions
SIMILAR = 2.0  # suites whose contexts differ by no more than this factor are verified alike
_PROBED = 4  # K per place


class Prediction(Record):
    """What a cell of the grid is expected to show."""

    key: str
    acceptance_length: Positive
    speedup: Positive


@dataclass(frozen=True, slots=True)
class Choice:
    """Cells to measure: the promising ones, and those that check the predictions."""

    promising: tuple[CellSpec, ...]
    checks: tuple[CellSpec, ...]


def survey(grid: Sequence[CellSpec], prompts: int, infeasible: Container[str] = ()) -> tuple[CellSpec, ...]:
    """The cells that tell what is accepted, in the order of the grid. infeasible: keys that do not fit the device.

    Acceptance does not depend on the batch, and a large one takes the least time for it: as large as so many `prompts`
    (of the smallest suite) fill without being repeated, and as fits with the largest K that fits at all.
    """
    by_name: dict[tuple[str, str], list[CellSpec]] = {}
    for spec in grid:
        if spec.k and spec.key not in infeasible:
            by_name.setdefault((spec.drafter, spec.suite), []).append(spec)
    wanted: set[str] = set()
    for (drafter, _), own in by_name.items():
        most = max(spec.k for spec in own)
        batches = {spec.batch for spec in own if spec.k == most}
        batch = max((b for b in batches if b <= prompts), default=min(batches))
        here = [spec for spec in own if spec.batch == batch]
        ks = {most, min(spec.k for spec in here)} if drafts_trees(drafter) else {most}
        wanted |= {spec.key for spec in here if spec.k in ks}
    return tuple(spec for spec in grid if spec.key in wanted)


def probed_ks(grid: Sequence[CellSpec]) -> tuple[int, ...]:
    """Some K of the grid, spread evenly from the smallest to the largest, and 0."""
    ks = sorted({spec.k for spec in grid if spec.k})
    return (0, *spread(ks, _PROBED))


@dataclass(frozen=True, slots=True)
class ProbePlace:
    """Rounds to time: of a drafter, or of verification alone where it is None.

    `specs` are cells of it on one suite each, the first to be tried first. Verification on one of these suites stands
    for that on all of them.
    """

    drafter: str | None
    specs: tuple[CellSpec, ...]

    @property
    def spec(self) -> CellSpec:
        return self.specs[0]

    @property
    def suites(self) -> tuple[str, ...]:
        return tuple(spec.suite for spec in self.specs)


def probe_places(
    grid: Sequence[CellSpec], contexts: Mapping[str, float], infeasible: Container[str] = ()
) -> tuple[ProbePlace, ...]:
    """At every batch each drafter on the first suite it fits on, and verification once for suites of similar contexts.

    More probes of the same work would only bring their own noise along.

    Args:
        contexts: tokens that a row of each suite has, on average.
        infeasible: keys that do not fit the device.
    """
    found = []
    usable = [spec for spec in grid if spec.k and spec.key not in infeasible]
    for batch in sorted({spec.batch for spec in usable}):
        own = [spec for spec in usable if spec.batch == batch]
        groups: list[list[CellSpec]] = []
        for spec in _first_of(own, lambda spec: spec.suite):
            group = next((g for g in groups if _are_similar(contexts[g[0].suite], contexts[spec.suite])), None)
            if group is None:
                groups.append([spec])
            else:
                group.append(spec)
        found += [ProbePlace(None, tuple(group)) for group in groups]
        for drafter in dict.fromkeys(spec.drafter for spec in own):
            mine = [spec for spec in own if spec.drafter == drafter]
            found.append(ProbePlace(drafter, tuple(_first_of(mine, lambda spec: spec.suite))))
    return tuple(found)


def _are_similar(one: float, other: float) -> bool:
    return max(one, other) <= SIMILAR * min(one, other)


def _first_of(specs: Iterable[CellSpec], name: Callable[[CellSpec], str]) -> list[CellSpec]:
    """The first cell of each name, in the order of the cells."""
    found: dict[str, CellSpec] = {}
    for spec in specs:
        found.setdefault(name(spec), spec)
    return list(found.values())


def is_worth_it(grid: Sequence[CellSpec], surveyed: int) -> bool:
    """Whether the fast plan, with so many surveyed cells, measures clearly less than the grid."""
    chosen = 2 * len(_places(grid)) + _checked(grid)
    return len(grid) > SMALL_GRID and surveyed > 0 and surveyed + chosen < WORTH_A_PLAN * len(grid)


def predict(grid: Iterable[CellSpec], surveyed: Sequence[CellResult], probes: Sequence[Probe]) -> dict[str, Prediction]:
    """Predictions by key, for every cell whose drafter was surveyed on its suite and whose place was probed."""
    counts = _counts(surveyed)
    costs = Costs(probes)
    found = {}
    for spec in grid:
        known = counts.get((spec.drafter, spec.suite))
        if known is None:
            continue
        plain, cost = costs.plain(spec), costs.round(spec, known[max(known)])
        if plain is None or cost is None:
            continue
        length = _length(known, spec)
        found[spec.key] = Prediction(key=spec.key, acceptance_length=length, speedup=length * plain / cost)
    return found


def choose(grid: Sequence[CellSpec], predictions: Mapping[str, Prediction], measured: Iterable[str]) -> Choice:
    """What to measure next. measured: keys that are known already; they are not chosen again."""
    known = set(measured)
    promising = {s.key: s for s in _static(grid, predictions)}
    for place in _places(grid):
        known_here = [s for s in grid if (s.suite, s.batch) == place and s.key in predictions]
        here = sorted((s for s in known_here if s.k), key=lambda s: -predictions[s.key].speedup)
        if here:
            best = predictions[here[0].key].speedup
            close = [s for s in here[1:] if predictions[s.key].speedup >= (1 - CLOSE) * best]
            close.sort(key=lambda s: s.key not in promising)  # those that are measured anyway count first
            # What the best drafter costs at rest tells whether its loop may run on where drafts do not pay.
            rest = [s for s in known_here if s.k == 0 and s.drafter == here[0].drafter]
            promising |= {s.key: s for s in (here[0], *close[:MOST_CLOSE], *rest)}
    taken = known | set(promising)
    # Keys are hashes: their order is random, and the same in every process.
    others = sorted((s for s in grid if s.key in predictions and s.key not in taken), key=lambda s: s.key)
    return Choice(tuple(s for s in grid if s.key in promising and s.key not in known), tuple(others[: _checked(grid)]))


def second_look(
    grid: Sequence[CellSpec], predictions: Mapping[str, Prediction], measured: Mapping[str, float]
) -> tuple[CellSpec, ...]:
    """Cells to measure since others have disappointed: what promises most of each scope, see `_static`, and of a suite
    and batch what promises clearly more than the best that was measured there.

    Args:
        measured: speedups by key; they stand in for the predictions of their cells.
    """
    believed = {
        key: p.model_copy(update={"speedup": measured[key]}) if key in measured else p for key, p in predictions.items()
    }
    promising = {s.key for s in _static(grid, believed)}
    for place in _places(grid):
        here = [s for s in grid if (s.suite, s.batch) == place and s.k and s.key in believed]
        best = max(here, key=lambda s: believed[s.key].speedup, default=None)
        known = max((measured[s.key] for s in here if s.key in measured), default=0.0)
        if best is None:
            continue
        if (1 - CLOSE) * believed[best.key].speedup > known:
            promising.add(best.key)
        # Another drafter may be the best now: what it costs at rest, as in `choose`.
        promising |= {s.key for s in grid if (s.suite, s.batch, s.drafter, s.k) == (*place, best.drafter, 0)}
    return tuple(s for s in grid if s.key in promising and s.key not in measured)


def _static(grid: Sequence[CellSpec], predictions: Mapping[str, Prediction]) -> list[CellSpec]:
    """The cells of the best single configuration of each batch, of each suite and of the whole grid.

    And of the best K at each batch of the drafter that is best over the whole grid: its K by batch is a table of its
    own. Only what was measured at every place of a scope can be recommended for it. Suites are pooled by equal tokens
    and batches by equal time, both times a harmonic mean of speedups (`speedup.uncertainty`).
    """
    places = _places(s for s in grid if s.key in predictions)
    batches = {tuple(p for p in places if p[1] == batch) for _, batch in places}
    suites = {tuple(p for p in places if p[0] == suite) for suite, _ in places}
    configs: dict[tuple[str, int], dict[tuple[str, int], CellSpec]] = {}
    for spec in grid:
        if spec.k and spec.key in predictions:
            configs.setdefault((spec.drafter, spec.k), {})[spec.suite, spec.batch] = spec

    def best(scope: Sequence[tuple[str, int]], drafter: str | None = None) -> list[CellSpec]:
        own = [cells for (name, _), cells in configs.items() if drafter in (None, name)]
        everywhere = [[cells[p] for p in scope] for cells in own if all(p in cells for p in scope)]
        return max(everywhere, key=lambda cells: harmonic_mean([predictions[s.key].speedup for s in cells]), default=[])

    overall = best(places) if places else []
    found = [*overall, *(spec for scope in batches | suites for spec in best(scope))]
    if overall:
        found += (spec for scope in batches for spec in best(scope, overall[0].drafter))
    return found


def _places(grid: Iterable[CellSpec]) -> list[tuple[str, int]]:
    """Suite and batch."""
    return list(dict.fromkeys((spec.suite, spec.batch) for spec in grid))


def prediction_errors(predictions: Mapping[str, Prediction], speedups: Mapping[str, float | None]) -> list[float]:
    """|predicted / measured - 1| of the cells that have both, ascending."""
    return sorted(
        abs(p.speedup / measured - 1) for key, p in predictions.items() if (measured := speedups.get(key)) is not None
    )


def _checked(grid: Sequence[CellSpec]) -> int:
    return min(_MOST_CHECKED, max(_LEAST_CHECKED, math.ceil(CHECKED * len(grid))))


def _counts(surveyed: Sequence[CellResult]) -> dict[tuple[str, str], dict[int, Counts]]:
    """By drafter and suite, and by K."""
    found: dict[tuple[str, str], dict[int, Counts]] = {}
    for cell in surveyed:
        counts: Counts = Counter()
        for c in speculative_rounds(cell):
            counts[c.drafted, c.accepted] += c.count
        if counts:
            found.setdefault((cell.spec.drafter, cell.spec.suite), {})[cell.spec.k] = counts
    return found


def _length(known: Mapping[int, Counts], spec: CellSpec) -> float:
    """Acceptance length at a cell's K, the target's own token included."""
    if spec.k == 0:
        return 1.0
    if not drafts_trees(spec.drafter):
        counts = known[max(known)]
        return length_at(counts, spec.k) if spec.synthetic is None else cut_length_at(counts, spec.k)
    return between({math.log(k): length_at(counts, k) for k, counts in known.items()}, math.log(spec.k))
