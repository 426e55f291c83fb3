"""Speculative output against plain output of the same requests, token by token.

Where the two part, the target itself is asked how near the two tokens are, and how near rounding may bring them (see
`noise`). Behind a numeric tie the texts are no longer the same, so there every token is compared with what the target,
given the text before it, chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

from spectune.decoding.decoder import Run
from spectune.decoding.generation import Generation
from spectune.engines.difference import first_difference
from spectune.engines.engine import Request
from spectune.engines.native import NativeEngine
from spectune.sweeping.cell import CellSpec
from spectune.verifying.noise import Noise
from spectune.verifying.record import IdentityCheck, Parting


def check_identity(
    engine: NativeEngine, spec: CellSpec, requests: Sequence[Request], plain: Run, speculative: Run
) -> IdentityCheck:
    """Compare two runs of the same requests, greedy or sampled with the requests' seeds."""
    triples = list(zip(requests, plain.generations, speculative.generations, strict=True))
    partings = [partings_of(engine, spec, *triple) for triple in triples]
    rounds = [r for g in speculative.generations for r in g.rounds]
    return IdentityCheck(
        kind="greedy" if spec.sampling.greedy else "seeded",
        requests=len(triples),
        identical=sum(not found for found in partings),
        tokens=sum(len(g.tokens) for g in speculative.generations),
        drafted=sum(r.drafted for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        partings=tuple(p for found in partings for p in found),
    )


def partings_of(
    engine: NativeEngine, spec: CellSpec, request: Request, plain: Generation, speculative: Generation
) -> list[Parting]:
    """Where one request's outputs part, up to the first place that rounding does not explain."""
    expected, found = plain.tokens, speculative.tokens
    if expected == found:
        return []
    noise = Noise(engine.loaded.model, request, found, spec)

    def judge(place: int, other: Sequence[int]) -> Parting:
        if place >= min(len(found), len(other)):  # one output ends early: no rounding does that
            return _parting(request, place, found, other)
        tokens = (found[place], other[place])
        return _parting(
            request,
            place,
            found,
            other,
            margin=noise.margin(place),
            gap=noise.gap(place, tokens),
            noise=noise.at(place, tokens),
            is_tie=noise.explains(place, tokens),
        )

    first = first_difference(expected, found)
    partings = [judge(first, expected)]
    for place in range(first + 1, len(found)):
        if not partings[-1].is_tie:
            return partings
        if noise.choices[place] != found[place]:
            partings.append(judge(place, [*found[:place], noise.choices[place]]))
    if partings[-1].is_tie and not _ended_rightly(engine, spec, request, speculative):
        partings.append(_parting(request, len(found), found, found))
    return partings


def _parting(
    request: Request,
    place: int,
    found: Sequence[int],
    expected: Sequence[int],
    *,
    margin: float | None = None,
    gap: float = 0.0,
    noise: float = 0.0,
    is_tie: bool = False,
) -> Parting:
    return Parting(
        id=request.id,
        position=place,
        expected=expected[place] if place < len(expected) else None,
        found=found[place] if place < len(found) else None,
        margin=margin,
        gap=gap,
        noise=noise,
        is_tie=is_tie,
    )


def _ended_rightly(engine: NativeEngine, spec: CellSpec, request: Request, generation: Generation) -> bool:
    """Whether an output ends with its first stop token, or without one at its limit."""
    stop_ids = frozenset() if spec.ignore_eos else engine.loaded.stop_ids
    limit = min(request.max_new_tokens, engine.target.max_context - len(request.token_ids))
    at = next((i + 1 for i, token in enumerate(generation.tokens) if token in stop_ids), limit)
    return len(generation.tokens) == min(at, limit)
