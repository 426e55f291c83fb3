"""The few figures that the sweep itself shows. None wherever a denominator is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectune.sweeping.cell import CellResult, PassResult, RoundCount


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


def decode_rate(passes: Sequence[PassResult], batch: int) -> float | None:
    """Tokens per second over the rounds with every slot busy."""
    requests = [r for p in passes for r in p.requests]
    seconds = sum(r.full_seconds for r in requests)
    tokens = sum(r.full_tokens for r in requests)
    # Each of the batch's rows counts the same seconds.
    return tokens * batch / seconds if seconds > 0 else None
