"""The metrics that a gate knows: what each is, which way is better, and how much worse is too much unless stated.

A direction is looked up here, never guessed from a name. Metrics of kind "exact" are counts: at fixed seeds a run
gives them again. Those of kind "timed" scatter, and are judged with their scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spectune.errors import UsageError

Kind = Literal["exact", "timed"]
Better = Literal["higher", "lower", "same"]
Level = Literal["error", "warn"]

STATISTICS = ("mean", "median", "min", "max", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Metric:
    """`tolerance` is the change for the worse that still passes: a share of the baseline, or with `absolute` a
    difference of shares. `by_request` metrics have statistics, the median if none is named. `always` metrics are right
    or wrong without a baseline and take no tolerance.
    """

    name: str
    kind: Kind
    better: Better
    meaning: str
    unit: str = ""
    tolerance: float = 0.0
    level: Level = "error"
    absolute: bool = False
    by_request: bool = False
    always: bool = False
    required: bool = True  # may stand in a requirement


METRICS = {
    m.name: m
    for m in (
        Metric("lossless", "exact", "same", "outputs are those of plain decoding", always=True, required=False),
        Metric(
            "counts_add_up",
            "exact",
            "same",
            "tokens = accepted + one per round, where an end may cut that one",
            always=True,
            required=False,
        ),
        Metric("outputs", "exact", "same", "share of requests whose tokens changed", absolute=True, required=False),
        Metric("rounds", "exact", "lower", "rounds of all requests"),
        Metric("target_forwards", "exact", "lower", "verifying forwards of the target"),
        Metric("drafted", "exact", "lower", "drafted tokens"),
        Metric("accepted", "exact", "higher", "accepted tokens"),
        Metric("acceptance_length", "exact", "higher", "1 + accepted / rounds"),
        Metric("acceptance_rate", "exact", "higher", "accepted / drafted, at the cell's K"),
        Metric("tokens_per_target_forward", "exact", "higher", "tokens per row and forward"),
        Metric(
            "joint_acceptance",
            "exact",
            "higher",
            "share of rounds that accepted i tokens or more, for each i",
            absolute=True,
            required=False,
        ),
        Metric("speedup", "timed", "higher", "speculative / plain tokens per second, paired", "x", 0.05),
        Metric("tokens_per_second", "timed", "higher", "with speculation", "tokens/s", 0.10, "warn"),
        Metric("plain_tokens_per_second", "timed", "higher", "without speculation", "tokens/s", 0.10, "warn"),
        Metric("tpot_ms", "timed", "lower", "time per token after the first", "ms", 0.10, "warn", by_request=True),
        Metric("ttft_ms", "timed", "lower", "time to the first token", "ms", 0.10, "warn", by_request=True),
    )
}


def metric(name: str, where: str) -> Metric:
    """The metric of that name. Raises UsageError, which lists all names, where there is none."""
    if name not in METRICS:
        raise UsageError(f"{where}: no metric {name!r}", f"known are {', '.join(METRICS)}")
    return METRICS[name]


def worse_by(m: Metric, before: float, now: float) -> float:
    """How much worse `now` is, as the metric's tolerance counts it; negative for better, and 0 for no change."""
    if before == now:
        return 0.0
    change = now - before if m.better == "lower" else before - now
    if m.better == "same":
        change = abs(change)
    if m.absolute:
        return change
    if before == 0:
        return float("inf") if change > 0 else -float("inf")
    return change / abs(before)


def exceeds(worse: float, tolerance: float) -> bool:
    """Whether a change is too much: it must be larger than the tolerance, so 5 % worse passes at 5 %."""
    return worse > tolerance * (1 + 1e-9) + 1e-12
