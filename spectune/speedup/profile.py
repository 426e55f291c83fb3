"""A cell's profile: everything the analysis says about one cell, computed once and used by every output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from spectune.speedup.acceptance import Acceptance, cell_acceptance, miscounted, speculative_requests
from spectune.speedup.overlap import overlap_check
from spectune.speedup.run import Run
from spectune.speedup.timing import Timing, cell_timing
from spectune.speedup.uncertainty import Estimate, Rates, cell_rates, estimate, scaled
from spectune.sweeping.cell import LOSSY_RULES, CellResult, CellSpec

TOLERANCE = 1.1  # a round may seem this much cheaper than a plain step
FEW_PROMPTS = 5
MOST_BANDWIDTH = 1.1  # of the measured peak: some streams are a little faster than the benchmark's


@dataclass(frozen=True, slots=True)
class Config:
    """A way to speculate: what `recommend` chooses among."""

    drafter: str
    rule: str
    k: int
    synthetic: tuple[float, ...] | None = None  # forced conditional acceptance by position

    def __str__(self) -> str:
        lossy = f", {self.rule} acceptance (lossy)" if self.rule in LOSSY_RULES else ""
        synthetic = "" if self.synthetic is None else ", synthetic acceptance"
        return f"{self.drafter}, K {self.k}{lossy}{synthetic}"


@dataclass(frozen=True, slots=True)
class Profile:
    """`excluded` says why a cell has no speed; its `speedup` is then null for that reason.

    `notes` are warnings of the form "name: what was seen; what to do", those of the cell file first.
    """

    cell: CellResult
    acceptance: Acceptance
    timing: Timing
    rates: Rates
    speedup: Estimate
    pace: float  # what the rates are scaled by (see `profiles`)
    excluded: str | None
    notes: tuple[str, ...]

    @property
    def spec(self) -> CellSpec:
        return self.cell.spec

    @property
    def config(self) -> Config:
        return Config(self.spec.drafter, self.spec.rule, self.spec.k, self.spec.synthetic)


def profiles(run: Run) -> tuple[Profile, ...]:
    """The profile of every finished cell, in the order of the run.

    Plain decoding of a suite at a batch is the same work in every cell. Where it was not equally quick, the machine was
    not, and a cell's rates of both kinds are scaled to the median pace: rates of cells that were measured at different
    times can then be compared, and ratios stay what they were. Cells whose ratio cannot be believed stay as they are.
    """
    found = [profile(cell) for cell in run.cells]
    paces: dict[tuple[str, int], list[float]] = {}
    for p in found:
        if p.rates.plain and p.excluded is None and p.rates.doubt is None:
            paces.setdefault((p.spec.suite, p.spec.batch), []).append(p.rates.plain)
    return tuple(_at_pace(p, paces.get((p.spec.suite, p.spec.batch))) for p in found)


def _at_pace(p: Profile, rates: Sequence[float] | None) -> Profile:
    if not rates or not p.rates.plain or p.rates.doubt is not None:
        return p
    pace = median(rates) / p.rates.plain
    return replace(p, rates=scaled(p.rates, pace), pace=pace)


def profile(cell: CellResult) -> Profile:
    """Counts, times and the speedup with its interval. A cell whose output is wrong has no speedup."""
    counted, timed = cell_acceptance(cell), cell_timing(cell)
    rates = _believed(cell, cell_rates(cell), counted)
    excluded = _excluded(cell)
    speedup = estimate(rates)
    if excluded:
        speedup = Estimate(None, None, None, "CAN'T TELL", rates.prompts, rates.repeats, excluded)
    notes = (
        *cell.warnings,
        *_lossy(cell.spec),
        *_overlap(cell),
        *_notes(counted, timed, rates),
        *((f"{rates.doubt}; keep the machine free and sweep with --repeats 3",) if rates.doubt else ()),
    )
    return Profile(cell, counted, timed, rates, speedup, 1.0, excluded, notes)


def _lossy(spec: CellSpec) -> tuple[str, ...]:
    if spec.rule not in LOSSY_RULES:
        return ()
    return (
        f"lossy: {spec.rule} acceptance changes what the target would write, so this is not a speedup of the same "
        "output; --rule speculative keeps it",
    )


def _overlap(cell: CellResult) -> tuple[str, ...]:
    found = overlap_check(cell)
    if found is None or found.agrees is not False:
        return ()
    return (
        f"overlap: {found.counted:.1%} of {found.tokens} drafted tokens were kept where the overlap 1 − TV of the "
        f"distributions is {found.overlap:.1%}; run `spectune verify` on this drafter",
    )


def _believed(cell: CellResult, rates: Rates, counted: Acceptance) -> Rates:
    """A round costs about one plain step or more, so the acceptance length bounds the speedup.

    Where nothing was accepted, every round was a plain step with work on top: no gain can be.
    """
    length = counted.acceptance_length
    if length is None or not rates.plain or rates.speculative is None:
        return rates
    speedup = rates.speculative / rates.plain
    nothing = cell.spec.k > 0 and length == 1
    if speedup <= (1.0 if nothing else TOLERANCE * length):
        return rates
    where = f"{cell.spec.suite}, batch {cell.spec.batch}"
    text = f"{speedup:.2f} ({where}) exceeds the acceptance length {length:.2f}: something slowed the plain passes"
    return replace(rates, doubt=f"faster-than-possible: {text}")


def _excluded(cell: CellResult) -> str | None:
    if cell.output_check is not None and cell.output_check.verdict == "different":
        return "its tokens differ from plain decoding, and a wrong result has no speed"
    if (wrong := _too_fast(cell)) is not None:
        return wrong
    wrong = next((text for r in speculative_requests(cell) if (text := miscounted(r))), None)
    return f"its counts contradict each other: {wrong}" if wrong else None


def _too_fast(cell: CellResult) -> str | None:
    """A GPU cannot read its weights faster than its memory moves bytes; a CPU may hold them in a cache."""
    if not cell.spec.device.startswith("cuda"):
        return None
    for mode, used in (("plain", cell.bandwidth.mbu_plain), ("speculative", cell.bandwidth.mbu_speculative)):
        if used.value is not None and used.value > MOST_BANDWIDTH:
            return (
                f"its {mode} rounds would have used {used.value:.2f} of the peak bandwidth, and no time can be so short"
            )
    return None


def _notes(counted: Acceptance, timed: Timing, rates: Rates) -> tuple[str, ...]:
    found = []
    if counted.below_k:
        found.append(
            f"below-k: {counted.drafted_per_round:.2f} tokens were drafted per round where K is {counted.k}; "
            "fits use the smaller number"
        )
    if not timed.full_occupancy:
        found.append(
            "no-full-occupancy: a pass never had every slot busy, so speeds are over all its rounds; "
            "use more prompts or a smaller batch"
        )
    if rates.prompts < FEW_PROMPTS:
        found.append(
            f"few-prompts: the interval rests on {rates.prompts} prompt{'s' if rates.prompts > 1 else ''}; "
            "use more of the suite"
        )
    if rates.repeats == 1:
        found.append("one-repeat: drift between repeats is not in the interval; sweep with --repeats 3")
    return tuple(found)
