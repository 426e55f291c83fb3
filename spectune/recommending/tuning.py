"""Everything that follows from a run beside the choice: schedule, crossover, regret, Pareto set, advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectune.recommending.advice import advise
from spectune.recommending.finding import Finding
from spectune.recommending.mix import Mix
from spectune.recommending.objective import Answer, Objective, ServiceLevel, answer
from spectune.recommending.regret import Regret, regrets
from spectune.recommending.schedule import Schedule, schedules, speeds
from spectune.speedup.crossing import Crossing
from spectune.speedup.profile import Profile
from spectune.speedup.run import Run


@dataclass(frozen=True, slots=True)
class ContextCrossing:
    """For the schedule's K at a batch; None with a reason."""

    batch: int
    k: int
    found: Crossing | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Tuning:
    """`answers` are for the whole workload and then each suite; `shares` says what the workload is made of."""

    shares: Mix
    answers: tuple[Answer, ...]
    schedules: tuple[Schedule, ...]
    best_schedule: Schedule | None  # of the drafter that is fastest over the batches
    contexts: tuple[ContextCrossing, ...]
    regrets: tuple[Regret, ...]
    advice: tuple[Finding, ...]


def tune(
    run: Run,
    profiles: Sequence[Profile],
    *,
    mix: Mix | None = None,
    objective: Objective = "throughput",
    slo: ServiceLevel | None = None,
) -> Tuning:
    """All answers for a mix of suites; without one every suite has the same share."""
    suites = dict.fromkeys(p.spec.suite for p in profiles)
    shares = mix or dict.fromkeys(suites, 1 / max(1, len(suites)))
    name = ", ".join(f"{suite} {share:.0%}" for suite, share in shares.items())
    measured = speeds(profiles, shares)
    found = schedules(measured)
    table = regrets(profiles, measured, found, shares)
    best = next((s for s in found for r in table if r.policy == "schedule" and r.of == (s.drafter, s.rule)), None)
    answers = [answer(profiles, objective, slo, shares, name)]
    if len(suites) > 1:
        answers += [answer(profiles, objective, slo, {suite: 1.0}, suite) for suite in suites]
    return Tuning(
        shares,
        tuple(answers),
        found,
        best,
        _contexts(best, profiles) if best else (),
        table,
        advise(run, profiles, found),
    )


def _contexts(schedule: Schedule, profiles: Sequence[Profile]) -> tuple[ContextCrossing, ...]:
    """Where the schedule speculates. The surfaces are only fitted where contexts vary enough to tell their cost."""
    from spectune.speedup.context import VARIED, context_crossing
    from spectune.speedup.latency import round_cost, run_surfaces

    usable = [p for p in profiles if p.excluded is None]
    contexts = [p.timing.mean_context for p in usable if p.timing.mean_context]
    rows = [row for row in schedule.rows if row.k > 0]
    if not contexts or max(contexts) < VARIED * min(contexts):
        span = f"{min(contexts):.0f} to {max(contexts):.0f} tokens" if contexts else "unknown"
        reason = f"the measured contexts are too alike ({span}): sweep suites of other lengths"
        return tuple(ContextCrossing(row.batch, row.k, None, reason) for row in rows)
    surfaces = run_surfaces(usable)
    found = []
    for row in rows:
        members = [
            p
            for p in usable
            if (p.spec.drafter, p.spec.rule, p.spec.k, p.spec.batch)
            == (schedule.drafter, schedule.rule, row.k, row.batch)
        ]
        cost, why = round_cost(members, surfaces)
        found.append(ContextCrossing(row.batch, row.k, context_crossing(cost) if cost else None, why))
    return tuple(found)
