"""The choice: which drafter, rule and K to use, or none, at each place and over several.

A configuration is recommended only if its whole 95 % interval lies above 1; otherwise the answer is OFF.
Within 1 % of the best the optimum counts as flat, and the smallest such K of the best drafter is taken: it
wastes the least when a workload accepts less than the measured one. Measured speeds decide, no model does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from spectune.recommending import why
from spectune.speedup.profile import Config, Profile
from spectune.speedup.run import Run
from spectune.speedup.uncertainty import FLAT, Estimate, Rates, Verdict, estimate, over_batches, over_suites
from spectune.sweeping.cell import CellSpec

Place = tuple[str, int]  # suite, batch
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Option:
    """A configuration that was measured everywhere in a scope, with its speedup there."""

    config: Config
    speedup: Estimate


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer for one scope. `suite` and `batch` are None where the scope covers all of them.

    `choice` None means OFF. `speedup` and `verdict` are those of `best`: the choice, or for OFF the option that came
    closest. `ranking` goes from fast to slow, `flat`
    is the part of it within 1 % of the best.
    """

    suite: str | None
    batch: int | None
    choice: Config | None
    verdict: Verdict
    best: Config | None
    speedup: Estimate | None
    flat: tuple[Config, ...]
    ranking: tuple[Option, ...]
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A measured cell that takes no part in the choice."""

    spec: CellSpec
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    overall: Advice  # one static choice over all measured batches and suites
    by_batch: tuple[Advice, ...]  # over suites
    by_suite: tuple[Advice, ...]  # over batches
    by_place: tuple[Advice, ...]
    excluded: tuple[Exclusion, ...]


def recommend(run: Run, profiles: Sequence[Profile], *, mix: Mapping[str, float] | None = None) -> Recommendation:
    """Choose at every place of the run, and over its suites and batches.

    `mix` gives each suite's share of the tokens wherever suites are pooled, and leaves the others out there.
    """
    specs = [p.spec for p in profiles] + [f.spec for f in run.failed]
    places = sorted(dict.fromkeys((s.suite, s.batch) for s in specs), key=lambda place: (place[0], place[1]))
    usable = [p for p in profiles if p.excluded is None and p.speedup.value is not None and p.spec.k > 0]
    suites, batches = _distinct(s for s, _ in places), sorted(_distinct(b for _, b in places))
    mixed = [p for p in places if mix is None or p[0] in mix]
    return Recommendation(
        overall=_advise(None, None, mixed, usable, mix),
        by_batch=tuple(_advise(None, b, [p for p in mixed if p[1] == b], usable, mix) for b in batches),
        by_suite=tuple(_advise(s, None, [p for p in places if p[0] == s], usable) for s in suites),
        by_place=tuple(_advise(s, b, [(s, b)], usable) for s, b in places),
        excluded=tuple(Exclusion(p.spec, p.cell.key, p.excluded) for p in profiles if p.excluded),
    )


def pooled(members: Sequence[Profile], mix: Mapping[str, float] | None = None) -> Rates:
    """One configuration's cells as one workload: suites of a batch first, with `mix` as weights, then the batches."""
    by_batch: dict[int, list[Profile]] = {}
    for p in members:
        by_batch.setdefault(p.spec.batch, []).append(p)
    batches = [suites_as_one([(p.spec.suite, p.rates) for p in own], mix) for own in by_batch.values()]
    return batches[0] if len(batches) == 1 else over_batches(batches)


def suites_as_one(parts: Sequence[tuple[str, Rates]], mix: Mapping[str, float] | None = None) -> Rates:
    """The rates of several suites, by name, at one batch as one workload."""
    if len(parts) == 1:
        return parts[0][1]
    return over_suites([rates for _, rates in parts], None if mix is None else [mix[suite] for suite, _ in parts])


def _advise(
    suite: str | None,
    batch: int | None,
    places: Sequence[Place],
    usable: Sequence[Profile],
    mix: Mapping[str, float] | None = None,
) -> Advice:
    inside = [p for p in usable if (p.spec.suite, p.spec.batch) in places]
    measured = _distinct((p.spec.suite, p.spec.batch) for p in inside)
    members = {c: [p for p in inside if p.config == c] for c in _distinct(p.config for p in inside)}
    everywhere = {c: own for c, own in members.items() if len(own) == len(measured)}
    options = [Option(c, estimate(pooled(own, mix))) for c, own in everywhere.items()]
    ranking = sorted(options, key=lambda o: -(o.speedup.value or 0.0))
    limits = why.limits(
        unmeasured=[p for p in places if p not in measured],
        partial=len(members) - len(everywhere),
        only_batch_1=batch is None and {b for _, b in measured} == {1},
    )
    if not ranking:
        nothing = "no cell has a usable speed"
        if members:
            nothing = "no configuration was measured everywhere: see the choices by suite and batch, or sweep more"
        return Advice(suite, batch, None, "CAN'T TELL", None, None, (), (), (f"{nothing}.", *limits))
    faster = [o for o in ranking if o.speedup.verdict == "FASTER"]
    if not faster:
        best = ranking[0]
        unsure = sum(o.speedup.verdict == "CAN'T TELL" for o in ranking[1:])
        reasons = why.off(best.config, best.speedup, everywhere[best.config], len(ranking))
        return Advice(
            suite,
            batch,
            None,
            best.speedup.verdict,
            best.config,
            best.speedup,
            (),
            tuple(ranking),
            (*reasons, *(why.unsure(unsure) if best.speedup.verdict == "SLOWER" else ()), *limits),
        )
    chosen, flat = _smallest_of_flat(faster)
    own = everywhere[chosen.config]
    reasons = (
        *why.on(chosen.config, chosen.speedup, own),
        *why.uncertain_rival(ranking[0].config, ranking[0].speedup),
        *why.flat(chosen.config, [o.config for o in flat]),
        *_where_not_faster(own, mix),
    )
    return Advice(
        suite,
        batch,
        chosen.config,
        "FASTER",
        chosen.config,
        chosen.speedup,
        tuple(o.config for o in flat),
        tuple(ranking),
        (*reasons, *limits),
    )


def _smallest_of_flat(faster: Sequence[Option]) -> tuple[Option, list[Option]]:
    """The chosen option and all within FLAT of the best. `faster` is sorted, fastest first."""
    top = faster[0].speedup.value or 0.0
    flat = [o for o in faster if (o.speedup.value or 0.0) >= (1 - FLAT) * top]
    drafter, rule = faster[0].config.drafter, faster[0].config.rule
    same = [o for o in flat if (o.config.drafter, o.config.rule) == (drafter, rule)]
    return min(same, key=lambda o: o.config.k), flat


def _where_not_faster(members: Sequence[Profile], mix: Mapping[str, float] | None) -> tuple[str, ...]:
    """A static choice may lose at some of the batches it covers."""
    by_batch: dict[int, list[Profile]] = {}
    for p in members:
        by_batch.setdefault(p.spec.batch, []).append(p)
    if len(by_batch) < 2:
        return ()
    found = [(batch, estimate(pooled(own, mix))) for batch, own in sorted(by_batch.items())]
    return tuple(why.not_faster_at(batch, speedup) for batch, speedup in found if speedup.verdict != "FASTER")


def _distinct(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))
