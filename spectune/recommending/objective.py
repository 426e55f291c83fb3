"""The objective: what a user wants most, and the configuration and batch that give it.

    latency      tokens per second of one user: the whole batch's rate / batch
    throughput   tokens per second of the whole batch
    goodput      the same, counting only tokens of requests that meet the service level (DistServe, Zhong et al. 2024)

Plain decoding at every batch competes. Speculation is chosen only if the whole interval of its ratio to the best of
plain decoding lies above 1. A TTFT here runs from when a request gets its slot: no queue is in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spectune.errors import UsageError
from spectune.recommending.pareto import pareto_set
from spectune.speedup.positions import Measured, measured
from spectune.speedup.profile import Config, Profile
from spectune.speedup.timing import tpot
from spectune.speedup.uncertainty import (
    FLAT,
    Draws,
    Estimate,
    Rates,
    Verdict,
    cell_rates,
    doubted,
    interval,
    over_suites,
    scaled,
)
from spectune.sweeping.cell import RequestResult

Objective = Literal["latency", "throughput", "goodput"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
_UNITS = {"ms": 1e-3, "s": 1.0}
_EXAMPLE = "write for instance --slo ttft=200ms,tpot=20ms"


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The most seconds that a request may take to its first token, and per token after it. None: no limit."""

    ttft: float | None = None
    tpot: float | None = None

    def met_by(self, request: RequestResult, pace: float = 1.0) -> bool:
        """Had the machine been `pace` times as quick. A request of one token has no time per token to exceed."""
        per_token = tpot(request)
        in_time = self.ttft is None or request.ttft_seconds <= pace * self.ttft
        return in_time and (self.tpot is None or per_token is None or per_token <= pace * self.tpot)

    @property
    def option(self) -> str:
        """What --slo takes."""
        return ",".join(f"{name}={value:g}ms" for name, value in self._milliseconds())

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} at most {value:g} ms" for name, value in self._milliseconds())

    def _milliseconds(self) -> list[tuple[str, float]]:
        limits = (("ttft", self.ttft), ("tpot", self.tpot))
        return [(name, value * 1e3) for name, value in limits if value is not None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to decode at one batch, `config` None being plain decoding. Rates in tokens per second.

    `value` is what the objective counts. `gain` holds it against the best of plain decoding.
    """

    config: Config | None
    batch: int
    per_user: Measured
    in_all: Measured
    value: Measured
    gain: Estimate | None

    def __str__(self) -> str:
        return f"{self.config or 'OFF'} at batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The best way for one workload; `choice.config` None means OFF, `choice` None that nothing has a value.

    `verdict` and `gain` are those of the choice, or for OFF of the speculative candidate that came closest. `ranking`
    goes from best to worst, `pareto` is its part that no other candidate beats both per user and in all.
    """

    objective: Objective
    slo: ServiceLevel | None
    workload: str
    choice: Candidate | None
    gain: Estimate | None
    flat: tuple[Candidate, ...]
    ranking: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Way:
    """Rates of a workload [resamples], and those of its tokens that count; both in plain and speculative form."""

    all: Rates
    counted: Rates


def parse_slo(text: str) -> ServiceLevel:
    """`ttft=200ms,tpot=0.02s`; a number without a unit is in seconds. Raises UsageError for anything else."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        unit = next((u for u in _UNITS if number.endswith(u)), "s")
        try:
            seconds = float(number.removesuffix(unit)) * _UNITS[unit]
        except ValueError:
            seconds = -1.0
        if name not in ("ttft", "tpot") or name in found or not 0 < seconds < math.inf:
            raise UsageError(f"--slo takes ttft and tpot with a time, not {part!r}", _EXAMPLE)
        found[name] = seconds
    return ServiceLevel(**found)


def parse_objective(objective: str | None, slo: str | None) -> tuple[Objective, ServiceLevel | None] | None:
    """The two options checked together; None where neither is given."""
    if objective is None:
        if slo is not None:
            raise UsageError("--slo without an objective", "add --objective goodput")
        return None
    known = next((name for name in OBJECTIVES if name == objective), None)
    if known is None:
        raise UsageError(f"--objective does not know {objective!r}", f"choose from {', '.join(OBJECTIVES)}")
    if (known == "goodput") != (slo is not None):
        hint = _EXAMPLE if slo is None else "use --objective goodput"
        raise UsageError("goodput and --slo go together", hint)
    return known, None if slo is None else parse_slo(slo)


def answer(
    profiles: Sequence[Profile],
    objective: Objective,
    slo: ServiceLevel | None,
    shares: Mapping[str, float],
    workload: str,
) -> Answer:
    """The best configuration and batch for a workload made of suites with these shares of the tokens."""
    usable = [
        p for p in profiles if p.excluded is None and p.rates.plain and p.rates.speculative and p.spec.suite in shares
    ]
    plain = [
        _plain(batch, objective, found)
        for batch in _batches(usable)
        if (found := _plain_way(usable, batch, slo, shares))
    ]
    best_plain = max(plain, key=lambda c: c[0].value.value, default=None)
    groups: dict[tuple[Config, int], dict[str, Profile]] = {}
    for p in usable:
        if p.spec.k > 0:
            groups.setdefault((p.config, p.spec.batch), {})[p.spec.suite] = p
    speculative: list[Candidate] = []
    doubtful: list[Candidate] = []
    for (config, batch), own in groups.items():
        if len(own) == len(shares):
            way = _mixed([(shares[s], _way(own[s], slo)) for s in shares])
            kind = speculative if way.all.doubt is None else doubtful
            kind.append(_candidate(config, batch, objective, way, best_plain))
    plain_candidates = [c for c, _ in plain]
    believed = sorted([*speculative, *plain_candidates], key=lambda c: -c.value.value)
    pareto = tuple(believed[i] for i in pareto_set([(c.per_user.value, c.in_all.value) for c in believed]))
    ranking = sorted([*believed, *doubtful], key=lambda c: -c.value.value)
    if not ranking or ranking[0].value.value == 0:
        reason = "no configuration was measured on all of it" if not ranking else "no request meets the service level"
        return Answer(objective, slo, workload, None, None, (), tuple(ranking), pareto, reason)
    faster = [c for c in ranking if c.gain is not None and c.gain.verdict == "FASTER"]
    if not faster:
        closest = next((c for c in ranking if c.config is not None), None)
        off = best_plain[0] if best_plain else None
        return Answer(
            objective, slo, workload, off, closest.gain if closest else None, (), tuple(ranking), pareto, None
        )
    flat = tuple(c for c in faster if c.value.value >= (1 - FLAT) * faster[0].value.value)
    choice = min((c for c in flat if _same_way(c, faster[0])), key=lambda c: c.config.k if c.config else 0)
    return Answer(objective, slo, workload, choice, choice.gain, flat, tuple(ranking), pareto, None)


def _same_way(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates differ in K alone."""
    names = [(c.batch, c.config.drafter, c.config.rule) if c.config else None for c in (one, other)]
    return names[0] == names[1]


def _batches(profiles: Sequence[Profile]) -> list[int]:
    return sorted({p.spec.batch for p in profiles})


def _way(p: Profile, slo: ServiceLevel | None) -> _Way:
    if slo is None:
        return _Way(p.rates, p.rates)
    counted = cell_rates(p.cell, counts=lambda request: slo.met_by(request, p.pace))
    return _Way(p.rates, scaled(counted, p.pace))


def _plain_way(
    usable: Sequence[Profile], batch: int, slo: ServiceLevel | None, shares: Mapping[str, float]
) -> _Way | None:
    """Plain decoding at a batch: the plain passes of all its cells. None where a suite was not measured."""
    parts = []
    for suite, share in shares.items():
        own = [p for p in usable if (p.spec.suite, p.spec.batch) == (suite, batch)]
        # Where something slowed a cell's plain passes, those of others tell more.
        ways = [_way(p, slo) for p in own if p.rates.doubt is None] or [_way(p, slo) for p in own]
        if not ways:
            return None
        parts.append((share, _mixed([(1.0, way) for way in ways])))
    return _mixed(parts)


def _mixed(parts: Sequence[tuple[float, _Way]]) -> _Way:
    """The rate of all tokens is a harmonic mean; what counts of them is a share, and shares add up."""
    shares = [share / math.fsum(s for s, _ in parts) for share, _ in parts]
    ways = [way for _, way in parts]
    whole = over_suites([w.all for w in ways], shares)
    plain = [_share(w.counted.plain, w.all.plain) for w in ways]
    speculative = [_share(w.counted.speculative, w.all.speculative) for w in ways]
    plain_draws = [_share_draws(w.counted.plain_draws, w.all.plain_draws) for w in ways]
    speculative_draws = [_share_draws(w.counted.speculative_draws, w.all.speculative_draws) for w in ways]
    counted = Rates(
        _weighed(whole.plain, plain, shares),
        _weighed(whole.speculative, speculative, shares),
        _weighed_draws(whole.plain_draws, plain_draws, shares),
        _weighed_draws(whole.speculative_draws, speculative_draws, shares),
        whole.prompts,
        whole.repeats,
        whole.reason,
        whole.doubt,
    )
    return _Way(whole, counted)


def _share(part: float | None, whole: float | None) -> float:
    return (part or 0.0) / whole if whole else 0.0


def _share_draws(part: Draws | None, whole: Draws | None) -> Draws | None:
    return None if part is None or whole is None else part / whole


def _weighed(rate: float | None, parts: Sequence[float], shares: Sequence[float]) -> float | None:
    return None if rate is None else rate * math.fsum(s * p for s, p in zip(shares, parts, strict=True))


def _weighed_draws(rate: Draws | None, parts: Sequence[Draws | None], shares: Sequence[float]) -> Draws | None:
    known = [s * p for s, p in zip(shares, parts, strict=True) if p is not None]
    if rate is None or len(known) < len(parts):
        return None
    total: Draws = sum(known[1:], known[0])
    return rate * total


def _plain(batch: int, objective: Objective, way: _Way) -> tuple[Candidate, Draws | None]:
    """Plain decoding as a candidate, and the resamples of its value."""
    scale = 1 / batch if objective == "latency" else 1.0
    value = (way.counted.plain or 0.0) * scale
    draws = None if way.counted.plain_draws is None else way.counted.plain_draws * scale
    rates = _pair(way.all.plain, way.all.plain_draws, batch)
    return Candidate(None, batch, *rates, measured(value, draws), None), draws


def _candidate(
    config: Config, batch: int, objective: Objective, way: _Way, best: tuple[Candidate, Draws | None] | None
) -> Candidate:
    scale = 1 / batch if objective == "latency" else 1.0
    value = (way.counted.speculative or 0.0) * scale
    draws = None if way.counted.speculative_draws is None else way.counted.speculative_draws * scale
    reference, reference_draws = (best[0].value.value, best[1]) if best else (0.0, None)
    if best is not None and best[0].batch == batch and way.counted.plain:  # its own plain passes are paired with it
        reference = way.counted.plain * scale
        reference_draws = None if way.counted.plain_draws is None else way.counted.plain_draws * scale
    rates = _pair(way.all.speculative, way.all.speculative_draws, batch)
    gain = _gain(value, draws, reference, reference_draws, way.all)
    return Candidate(config, batch, *rates, measured(value, draws), gain)


def _pair(rate: float | None, draws: Draws | None, batch: int) -> tuple[Measured, Measured]:
    """Per user and in all."""
    value = rate or 0.0
    return measured(value / batch, None if draws is None else draws / batch), measured(value, draws)


def _gain(value: float, draws: Draws | None, plain: float, plain_draws: Draws | None, rates: Rates) -> Estimate:
    if plain == 0:
        reason = "no request of plain decoding meets the service level"
        low = measured(value, draws).low
        verdict: Verdict = "FASTER" if low is not None and low > 0 else "CAN'T TELL"
        return Estimate(None, None, None, verdict, rates.prompts, rates.repeats, reason)
    both = None if draws is None or plain_draws is None else _share_draws(draws, plain_draws)
    return doubted(interval(value / plain, both, rates.prompts, rates.repeats, rates.reason), rates.doubt)
