"""The few figures that the sweep itself shows. None wherever a denominator is 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.sweeping.cell import CellResult, PassResult, RequestResult, RoundCount


@dataclass(frozen=True, slots=True)
class CellFigures:
    """Pooled over requests and repeats. Rates are decoded tokens per second at full occupancy."""

    acceptance_length: float | None
    acceptance_rate: float | None
    plain_tokens_per_second: float | None
    speculative_tokens_per_second: float | None
    speedup: float | None


def figures(result: CellResult) -> CellFigures:
    """The headline figures of a cell; `acceptance_rate` belongs to the cell's K."""
    plain = [p for p in result.passes if p.mode == "plain"]
    speculative = [p for p in result.passes if p.mode == "speculative"]
    counts = speculative_rounds(result)
    rounds = sum(c.count for c in counts)
    drafted = sum(c.drafted * c.count for c in counts)
    accepted = sum(c.accepted * c.count for c in counts)
    batch = result.spec.batch
    before, after = decode_rate(plain, batch), decode_rate(speculative, batch)
    return CellFigures(
        acceptance_length=1 + accepted / rounds if rounds else None,
        acceptance_rate=accepted / drafted if drafted else None,
        plain_tokens_per_second=before,
        speculative_tokens_per_second=after,
        speedup=after / before if before and after else None,
    )


def speculative_rounds(result: CellResult) -> list[RoundCount]:
    """The counts of all speculative passes."""
    return [c for p in result.passes if p.mode == "speculative" for r in p.requests for c in r.rounds]


def decode_rate(passes: Sequence[PassResult], batch: int, *, full: bool = True) -> float | None:
    """Tokens per second of the batch: each of its rows counts the same seconds."""
    pairs = [pair for p in passes for pair in tokens_and_seconds(p, full=full)]
    tokens, seconds = sum(tokens for tokens, _ in pairs), math.fsum(seconds for _, seconds in pairs)
    return batch * tokens / seconds if seconds > 0 else None


def tokens_and_seconds(done: PassResult, *, full: bool) -> list[tuple[int, float]]:
    """Per request the tokens it decoded and the seconds they count for: with every slot busy, or as it was.

    Towards the end of a pass slots fall idle, and the rows that still decode are the slow ones. A rate over the rounds
    before that would flatter: it counts the quick rows' tokens in full and the slow ones' in part. So all rounds count,
    each for the time that a round took the same request while every slot was busy, or the whole pass if none of the
    request's rounds was such.
    """
    if not full:
        return [(r.output_tokens - 1, r.decode_seconds) for r in done.requests]
    rounds = sum(r.full_rounds or 0 for r in done.requests)
    usual = math.fsum(r.full_seconds for r in done.requests) / rounds if rounds else 0.0
    return [_at_full_occupancy(r, usual) for r in done.requests]


def _at_full_occupancy(r: RequestResult, usual: float) -> tuple[int, float]:
    if r.full_rounds is None:
        return r.full_tokens, r.full_seconds
    round_seconds = r.full_seconds / r.full_rounds if r.full_rounds else usual
    return r.output_tokens - 1, round_seconds * sum(c.count for c in r.rounds)
