"""Regret: what is lost against an oracle that uses the best measured configuration at every batch and suite.

    off        plain decoding everywhere
    static     one drafter and K everywhere
    schedule   one drafter, K by batch, true plain decoding where K is 0
    resting    the same, but K = 0 stays inside the speculative loop, where that was measured
    oracle     the best per suite and batch, plain decoding included

Every batch is busy for the same time under plain decoding, as in the overall answer. All are chosen and scored on the
same prompts, so the oracle is flattered: regrets are upper bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from spectune.recommending.choice import suites_as_one
from spectune.recommending.schedule import Schedule, Speeds
from spectune.speedup.profile import Profile
from spectune.speedup.uncertainty import Estimate, Rates, estimate, interval, over_batches, ratio_draws

Policy = Literal["off", "static", "schedule", "resting", "oracle"]


@dataclass(frozen=True, slots=True)
class Regret:
    """`speedup` over plain decoding; `loss` is oracle speed / this speed, 1 for no regret. `by_batch` are speedups."""

    policy: Policy
    of: tuple[str, str] | None  # drafter and rule, where it is one
    what: str
    speedup: Estimate
    loss: Estimate
    by_batch: dict[int, float | None]


def regrets(
    profiles: Sequence[Profile], measured: Speeds, found: Sequence[Schedule], shares: Mapping[str, float]
) -> tuple[Regret, ...]:
    """The table, from no speculation to the oracle. Empty where no drafter was measured at every batch."""
    batches = sorted({batch for _, _, k, batch in measured if k > 0})
    if not batches:
        return ()
    idle = {b: _idle(next(rates for place, rates in measured.items() if place[3] == b)) for b in batches}
    best_at = {b: suites_as_one(_best_per_suite(profiles, b, shares), shares) for b in batches}
    rows: list[tuple[Policy, tuple[str, str] | None, str, dict[int, Rates]]] = [("off", None, "plain decoding", idle)]
    everywhere = [
        (d, r, k)
        for d, r, k in dict.fromkeys(place[:3] for place in measured)
        if k > 0 and all((d, r, k, b) in measured for b in batches)
    ]
    if everywhere:
        best = max(everywhere, key=lambda c: _value(_pooled({b: measured[*c, b] for b in batches})))
        rows.append(("static", best[:2], f"{best[0]}, K {best[2]}", {b: measured[*best, b] for b in batches}))
    plans = [s for s in found if [row.batch for row in s.rows] == batches]
    if plans:

        def at(s: Schedule, b: int) -> Rates:
            return measured[s.drafter, s.rule, s.k_at(b), b] if s.k_at(b) else idle[b]

        plan = max(plans, key=lambda s: _value(_pooled({b: at(s, b) for b in batches})))
        of = plan.drafter, plan.rule
        rows.append(("schedule", of, f"{plan.drafter}, K by batch", {b: at(plan, b) for b in batches}))
        resting = {b: measured.get((plan.drafter, plan.rule, plan.k_at(b), b)) for b in batches}
        if any(plan.k_at(b) == 0 for b in batches) and all(resting.values()):
            rows.append(("resting", of, "the same, K 0 in the loop", {b: r for b, r in resting.items() if r}))
    rows.append(("oracle", None, "the best of each suite and batch", best_at))
    return tuple(_row(*row, _pooled(best_at)) for row in rows)


def _row(policy: Policy, of: tuple[str, str] | None, what: str, by_batch: Mapping[int, Rates], oracle: Rates) -> Regret:
    rates = _pooled(by_batch)
    mine, best = ratio_draws(rates), ratio_draws(oracle)
    draws = None if mine is None or best is None else best / mine
    loss = interval(_value(oracle) / _value(rates), draws, rates.prompts, rates.repeats, rates.reason)
    return Regret(policy, of, what, estimate(rates), loss, {b: estimate(r).value for b, r in by_batch.items()})


def _best_per_suite(profiles: Sequence[Profile], batch: int, shares: Mapping[str, float]) -> list[tuple[str, Rates]]:
    found = []
    for suite in shares:
        own = [
            p.rates
            for p in profiles
            if p.excluded is None
            and (p.spec.suite, p.spec.batch) == (suite, batch)
            and p.rates.plain
            and p.rates.speculative
        ]
        found.append((suite, max([*own, _idle(own[0])], key=_value)))
    return found


def _pooled(by_batch: Mapping[int, Rates]) -> Rates:
    parts = list(by_batch.values())
    return parts[0] if len(parts) == 1 else over_batches(parts)


def _idle(rates: Rates) -> Rates:
    """Plain decoding as if it were a way to speculate."""
    return replace(rates, speculative=rates.plain, speculative_draws=rates.plain_draws)


def _value(rates: Rates) -> float:
    return rates.speculative / rates.plain if rates.plain and rates.speculative else 0.0
