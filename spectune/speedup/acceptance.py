"""Acceptance: what became of the drafted tokens. Counts only, so free of timing noise.

A round offers `drafted` tokens and keeps the first `accepted` of them; one more token, the correction or the
bonus, follows. Everything is pooled over rounds: long requests weigh more than short ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from spectune.sweeping.cell import CellResult, RequestResult, RoundCount

# Drafts are shortened near the token limit, so a mean a little below K is no news.
_NEARLY = 0.95


class Counted(Protocol):
    """A request as far as its tokens and rounds are concerned."""

    @property
    def output_tokens(self) -> int: ...

    @property
    def rounds(self) -> Sequence[RoundCount]: ...


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of the speculative passes of a cell. None wherever the denominator is 0.

    `joint_acceptance[i-1]` and `conditional_acceptance[i-1]` belong to position i = 1…K. `offered[i-1]` is
    the share of rounds that drafted i tokens or more.
    """

    k: int
    rounds: int
    drafted: int
    accepted: int
    undrafted_rounds: int
    acceptance_length: float | None  # 1 + accepted / rounds: the bonus token is in it, plain decoding is 1
    acceptance_rate: float | None  # accepted / drafted, at this K only
    joint_acceptance: tuple[float | None, ...]  # rounds that kept >= i / rounds
    conditional_acceptance: tuple[float | None, ...]  # … / rounds that kept >= i-1 and drafted >= i
    offered: tuple[float | None, ...]
    drafted_per_round: float | None  # the effective K
    tokens_per_target_forward: float | None  # per row: 1 for plain decoding at every batch
    mean_request_acceptance_length: float | None  # the mean of each request's own length: not the pooled one

    @property
    def below_k(self) -> bool:
        """Whether the drafter offered clearly fewer tokens than the requested K."""
        return self.drafted_per_round is not None and self.drafted_per_round < _NEARLY * self.k


def acceptance(k: int, requests: Sequence[Counted]) -> Acceptance:
    """Pool the rounds of `requests`, which were decoded speculatively with `k` tokens asked for per round."""
    counts: Counter[tuple[int, int]] = Counter()
    for r in requests:
        for c in r.rounds:
            counts[c.drafted, c.accepted] += c.count
    rounds = counts.total()
    drafted = sum(d * n for (d, _), n in counts.items())
    accepted = sum(a * n for (_, a), n in counts.items())
    positions = range(1, k + 1)
    kept = [sum(n for (_, a), n in counts.items() if a >= i) for i in positions]
    offered = [sum(n for (d, _), n in counts.items() if d >= i) for i in positions]
    reached = [sum(n for (d, a), n in counts.items() if a >= i - 1 and d >= i) for i in positions]
    lengths = [length for r in requests if (length := request_acceptance_length(r)) is not None]
    emitted = sum(r.output_tokens - 1 for r in requests)
    return Acceptance(
        k=k,
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        undrafted_rounds=sum(n for (d, _), n in counts.items() if d == 0),
        acceptance_length=1 + accepted / rounds if rounds else None,
        acceptance_rate=_ratio(accepted, drafted),
        joint_acceptance=tuple(_ratio(n, rounds) for n in kept),
        conditional_acceptance=tuple(_ratio(n, of) for n, of in zip(kept, reached, strict=True)),
        offered=tuple(_ratio(n, rounds) for n in offered),
        drafted_per_round=_ratio(drafted, rounds),
        tokens_per_target_forward=_ratio(emitted, rounds),
        mean_request_acceptance_length=fmean(lengths) if lengths else None,
    )


def cell_acceptance(cell: CellResult) -> Acceptance:
    """The acceptance of all speculative passes of a cell together."""
    return acceptance(cell.spec.k, speculative_requests(cell))


def speculative_requests(cell: CellResult) -> list[RequestResult]:
    return [r for p in cell.passes if p.mode == "speculative" for r in p.requests]


def request_acceptance_length(request: Counted) -> float | None:
    """1 + accepted / rounds of one request, or None where it had no round."""
    rounds, accepted = rounds_and_accepted(request)
    return 1 + accepted / rounds if rounds else None


def miscounted(request: RequestResult) -> str | None:
    """Why tokens and rounds contradict each other, or None where they agree.

    Every round emits its accepted tokens and one more, except that a stop token or a limit may cut that one:
    1 + accepted <= output tokens <= 1 + accepted + rounds.
    """
    rounds, accepted = rounds_and_accepted(request)
    if 1 + accepted <= request.output_tokens <= 1 + accepted + rounds:
        return None
    return f"{request.id} has {request.output_tokens} tokens after {rounds} rounds with {accepted} accepted"


def rounds_and_accepted(request: Counted) -> tuple[int, int]:
    rounds = accepted = 0
    for c in request.rounds:
        rounds += c.count
        accepted += c.accepted * c.count
    return rounds, accepted


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
