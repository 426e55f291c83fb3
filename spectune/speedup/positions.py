"""Acceptance by position in the draft, pooled over rounds, with intervals by bootstrap over prompts.

A prompt's rounds are not independent of each other, so prompts are drawn with replacement and everything is
recomputed from the drawn prompts' counts. Cells of one drafter with other K add their rounds: the first tokens of
a draft do not depend on how many follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectune.speedup.acceptance import rounds_and_accepted, speculative_requests
from spectune.speedup.curve import AcceptanceCurve, Array, CurvePoint, fit_curve, refit
from spectune.speedup.shorter import rounds_at
from spectune.speedup.uncertainty import RESAMPLES, Draws, draw_counts, ends
from spectune.sweeping.cell import CellResult, RequestResult


@dataclass(frozen=True, slots=True)
class Measured:
    """A value with its 95 % interval; `low` and `high` are None where it has none."""

    value: float
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float | None:
        """Half the interval, relative to the value."""
        if self.low is None or self.high is None or self.value == 0:
            return None
        return (self.high - self.low) / 2 / self.value


@dataclass(frozen=True, slots=True)
class Position:
    """`conditional`: the share of drafted tokens kept here, given that all before it were; None where none came here.

    `reached` counts those drafted tokens.
    """

    position: int
    reached: int
    conditional: Measured | None


@dataclass(frozen=True, slots=True)
class Positions:
    """The conditionals, and the curve a_j = a·g^((j-1)^p) through the acceptance lengths that they imply.

    Where the curve is None, `reason` says why.
    """

    positions: tuple[Position, ...]
    curve: AcceptanceCurve | None
    a: Measured | None
    g: Measured | None
    prompts: int
    reason: str | None


def fit_positions(cells: Sequence[CellResult], *, resamples: int = RESAMPLES) -> Positions:
    """Pool cells of one drafter, rule and suite. Raises ValueError where they are on several suites."""
    suites = {cell.spec.suite for cell in cells}
    if len(suites) != 1:
        raise ValueError(f"positions are pooled over one suite, not {len(suites)}")
    kept, reached, prompts = _by_prompt(cells)
    weights = None
    if prompts > 1:
        weights = draw_counts(zlib.crc32(suites.pop().encode()), prompts, resamples)
    conditional = _ratio(kept.sum(axis=0), reached.sum(axis=0))
    draws = None if weights is None else _ratio(weights @ kept, weights @ reached)  # [resamples, K]
    positions = tuple(
        Position(i + 1, int(n), None if n == 0 else measured(float(c), None if draws is None else draws[:, i]))
        for i, (n, c) in enumerate(zip(reached.sum(axis=0), conditional, strict=True))
    )
    depth = int(np.argmin(np.append(reached.sum(axis=0) > 0, False)))  # positions before the first that none reached
    if depth < 2:
        reason = (
            "not identifiable: no draft reached a second position" if depth else "not identifiable: nothing drafted"
        )
        return Positions(positions, None, None, None, prompts, reason)
    points = [CurvePoint.at(k, float(length)) for k, length in enumerate(_lengths(conditional[None, :depth])[0], 1)]
    curve = fit_curve(points)
    if curve is None:
        return Positions(positions, None, None, None, prompts, "not identifiable: too few positions")
    a, g = None, None
    if draws is not None:
        # A position that no drawn prompt reached adds nothing to the length there either.
        drawn = refit(curve, np.tri(depth), _lengths(np.nan_to_num(draws[:, :depth])))
        a, g = drawn[:, 0], drawn[:, 1]
    return Positions(positions, curve, measured(curve.a, a), measured(curve.g, g), prompts, None)


def acceptance_length(cell: CellResult, *, resamples: int = RESAMPLES) -> Measured | None:
    """The acceptance length of a cell with its interval; None where it had no round."""
    return pooled_length(cell.spec.suite, speculative_requests(cell), resamples=resamples)


def pooled_length(suite: str, requests: Sequence[RequestResult], *, resamples: int = RESAMPLES) -> Measured | None:
    """The same for requests of one suite, which were decoded speculatively."""
    sums = _sums(requests)
    accepted, rounds = sums.sum(axis=0)
    if not rounds:
        return None
    return measured(float(1 + accepted / rounds), _resampled(suite, sums, resamples))


def length_resamples(suite: str, requests: Sequence[RequestResult]) -> Draws | None:
    """Acceptance lengths over resampled prompts; None with fewer than two."""
    return _resampled(suite, _sums(requests), RESAMPLES)


def _sums(requests: Sequence[RequestResult]) -> Array:
    """Accepted tokens and rounds of each prompt: [prompts, 2]."""
    by_prompt: dict[str, list[float]] = {}
    for r in requests:
        counts = by_prompt.setdefault(r.prompt_id, [0.0, 0.0])
        rounds_of, accepted_of = rounds_and_accepted(r)
        counts[0] += accepted_of
        counts[1] += rounds_of
    return np.array([by_prompt[name] for name in sorted(by_prompt)]).reshape(-1, 2)


def _resampled(suite: str, sums: Array, resamples: int) -> Draws | None:
    if len(sums) < 2:
        return None
    drawn = draw_counts(zlib.crc32(suite.encode()), len(sums), resamples) @ sums
    return 1 + _ratio(drawn[:, 0], drawn[:, 1])


def length_draws(cells: Sequence[CellResult], k: int, draws: int) -> Array | None:
    """Acceptance lengths at 1 … k, [1 + draws, k]: of all prompts in the first row, then of resampled ones.

    Counted are all rounds of the cells, undrafted ones too, so the cells should share one large K. Smaller K follow
    from its runs, or with synthetic acceptance from its rounds (see `shorter`), beyond it the curve goes on. None where
    nothing was drafted, or where a curve is needed and not identifiable. With one prompt there is the first row alone.
    """
    requests = [r for cell in cells for r in speculative_requests(cell)]
    row = {name: i for i, name in enumerate(sorted({r.prompt_id for r in requests}))}
    depth = max(cell.spec.k for cell in cells)
    kept = np.zeros((len(row), depth + 1))  # rounds that kept i tokens or more, i = 0 … depth
    tokens = np.zeros((len(row), 1))
    rounds = np.zeros((len(row), depth))  # that K = 1 … depth would have taken
    for r in requests:
        at = row[r.prompt_id]
        for c in r.rounds:
            kept[at, : c.accepted + 1] += c.count
            tokens[at] += (c.accepted + 1) * c.count
            rounds[at] += [rounds_at(c.drafted, c.accepted, i) * c.count for i in range(1, depth + 1)]
    if not kept[:, 1:].any():
        return None
    weights = np.ones((1, len(row)))
    if len(row) > 1:
        resampled = draw_counts(zlib.crc32(cells[0].spec.suite.encode()), len(row), draws)
        weights = np.concatenate([weights, resampled])
    sums = weights @ kept
    joint = np.nan_to_num(_ratio(sums[:, 1:], sums[:, :1]))
    cut = 1 + np.cumsum(joint, axis=1)  # [1 + draws, depth]
    forced = cells[0].spec.synthetic is not None
    found = cut if forced else _ratio(weights @ tokens, weights @ rounds)
    if k <= depth:
        return np.asarray(found[:, :k])
    curve = fit_curve([CurvePoint.at(i, float(length)) for i, length in enumerate(cut[0], 1)])
    if curve is None:
        return None
    parameters = refit(curve, np.tri(depth), cut)
    later = np.minimum(1.0, parameters[:, :1] * parameters[:, 1:] ** (np.arange(depth, k) ** curve.p))
    return np.concatenate([found, found[:, -1:] + np.cumsum(joint[:, -1:] * np.cumprod(later, axis=1), axis=1)], axis=1)


def measured(value: float, draws: Array | None) -> Measured:
    """`value` with the percentile interval of its draws."""
    known = None if draws is None else draws[np.isfinite(draws)]
    if known is None or len(known) < 2:
        return Measured(value, None, None)
    low, high = map(float, ends(known))
    return Measured(value, low, high)


def _by_prompt(cells: Sequence[CellResult]) -> tuple[Array, Array, int]:
    """Drafted tokens kept and reached at each position: two arrays [prompts, K], and the number of prompts."""
    requests = [r for cell in cells for r in speculative_requests(cell)]
    row = {name: i for i, name in enumerate(sorted({r.prompt_id for r in requests}))}
    kept = np.zeros((len(row), max(cell.spec.k for cell in cells)))
    reached = np.zeros_like(kept)
    for r in requests:
        for c in r.rounds:
            kept[row[r.prompt_id], : c.accepted] += c.count
            reached[row[r.prompt_id], : min(c.drafted, c.accepted + 1)] += c.count
    return kept, reached, len(row)


def _lengths(conditional: Array) -> Array:
    """[draws, K] conditionals -> [draws, K] acceptance lengths at K = 1 …"""
    return np.asarray(1 + np.cumsum(np.cumprod(conditional, axis=1), axis=1))


def _ratio(part: Array, whole: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(part / whole)
