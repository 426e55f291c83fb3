"""Parts of `report --json` that only the page shows: drafts side by side, memory, samples, and other runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from spectune.recommending.choice import Option
from spectune.reporting.row import place
from spectune.reporting.summary import Summary
from spectune.speedup.comparison import Difference, Pair, compare
from spectune.speedup.profile import Profile
from spectune.speedup.uncertainty import Estimate


def drafts(summary: Summary) -> list[dict[str, Any]]:
    """Each drafter's best K at each batch, over the suites: its size, what is accepted, and the speedup."""
    rows = []
    for advice in summary.recommendation.by_batch:
        best: dict[tuple[str, str], Option] = {}
        for option in advice.ranking:  # from fast to slow
            best.setdefault((option.config.drafter, option.config.rule), option)
        rows += [_draft(summary, option, advice.batch) for option in best.values()]
    return rows


def _draft(summary: Summary, option: Option, batch: int | None) -> dict[str, Any]:
    own = [p for p in summary.profiles if p.config == option.config and p.spec.batch == batch]
    info, target = summary.run.info.drafters.get(option.config.drafter), summary.run.info.target
    rounds = sum(p.acceptance.rounds for p in own)
    accepted = sum(p.acceptance.accepted for p in own)
    ratios = [p.timing.cost_ratio for p in own if p.timing.cost_ratio is not None]
    read = None if info is None else info.weight_bytes_per_step
    return {
        "batch": batch,
        "drafter": option.config.drafter,
        "rule": option.config.rule,
        "k": option.config.k,
        "parameters": None if info is None else info.parameters,
        "bytes_per_step": read,
        "bytes_of_target": read / target.weight_bytes_per_step if read and target.weight_bytes_per_step else None,
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "cost_ratio": fmean(ratios) if ratios else None,
        "speedup": option.speedup.value,
        "speedup_low": option.speedup.low,
        "speedup_high": option.speedup.high,
        "verdict": option.speedup.verdict,
    }


def memory(summary: Summary) -> list[dict[str, Any]]:
    """The cell of each drafter and batch that needs the most."""
    largest: dict[tuple[str, int], Profile] = {}
    for p in summary.profiles:
        at = p.spec.drafter, p.spec.batch
        if p.cell.memory and (at not in largest or _predicted(p) > _predicted(largest[at])):
            largest[at] = p
    rows = []
    for p in largest.values():
        if p.cell.memory is not None:
            known = p.cell.memory
            plan = known.plan.model_dump()
            measured = known.measured_bytes
            rows.append(
                {
                    "key": p.cell.key,
                    **place(p.spec),
                    **plan,
                    "predicted_bytes": known.predicted_bytes,
                    "measured_bytes": measured.value,
                    "measured_reason": measured.reason,
                }
            )
    return rows


def _predicted(p: Profile) -> int:
    return p.cell.memory.predicted_bytes if p.cell.memory else 0


def samples(summary: Summary) -> list[dict[str, Any]]:
    """What each drafter wrote on each suite, at the K that was fastest there."""
    best: dict[tuple[str, str], Profile] = {}
    for p in summary.profiles:
        at = p.spec.suite, p.spec.drafter
        if p.cell.excerpt and (at not in best or (p.speedup.value or 0) > (best[at].speedup.value or 0)):
            best[at] = p
    return [
        {"key": p.cell.key, **place(p.spec), **p.cell.excerpt.model_dump(mode="json")}
        for p in best.values()
        if p.cell.excerpt
    ]


def comparisons(summary: Summary, others: Sequence[Summary]) -> list[dict[str, Any]]:
    """The first run against each of the others."""
    return [_comparison(summary, other) for other in others]


def _comparison(summary: Summary, other: Summary) -> dict[str, Any]:
    found = compare(summary.profiles, other.profiles)
    return {
        "a": summary.run.info.name,
        "b": other.run.info.name,
        "caveats": list(other.caveats),
        "differs": {name: list(values) for name, values in found.differs.items()},
        "other_weights": _other_weights(found.pairs),
        "pairs": [_pair(p) for p in found.pairs],
        "only_a": [place(s) for s in found.only_a],
        "only_b": [place(s) for s in found.only_b],
    }


def _other_weights(pairs: Sequence[Pair]) -> list[str]:
    """Models that go by one name and are not the same."""
    named = [(p.a.spec.target, p.a.spec.target_digest, p.b.spec.target, p.b.spec.target_digest) for p in pairs]
    named += [(p.a.spec.drafter, p.a.spec.drafter_digest, p.b.spec.drafter, p.b.spec.drafter_digest) for p in pairs]
    return list(dict.fromkeys(a for a, digest, b, other in named if a == b and digest != other))


def _pair(p: Pair) -> dict[str, Any]:
    return {
        **place(p.a.spec),
        "key_a": p.a.cell.key,
        "key_b": p.b.cell.key,
        "speedup_a": p.a.speedup.value,
        "speedup_b": p.b.speedup.value,
        **_estimate("speedup_ratio", p.speedup),
        **_estimate("rate_ratio", p.rate),
        **_difference(p.acceptance_length),
        "verdict": p.rate.verdict,
        "reason": p.rate.reason,
    }


def _estimate(name: str, found: Estimate) -> dict[str, float | None]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _difference(found: Difference) -> dict[str, Any]:
    return {f"acceptance_length_{name}": value for name, value in asdict(found).items() if name != "reason"}
