"""How much times scatter: the same work done again and again, split into what a whole pass shares and what is a
request's own. In logarithms, so that 0.03 is about 3 %."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectune.gating.baseline import Baseline, Cell, PassTimes, Times
from spectune.gating.selector import Place

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Noise:
    """Centred effects, to be drawn from: `repeats` [repeat, mode] of a plain and a speculative pass next to each other,
    which share much of the machine's mood, and `requests` within their pass.
    """

    repeats: Array
    requests: Array

    @property
    def pass_deviation(self) -> float:
        return _deviation(self.repeats)

    @property
    def request_deviation(self) -> float:
        return _deviation(self.requests)

    @property
    def speedup_deviation(self) -> float:
        """Of a repeat's speedup: smaller than that of its passes where they speed up and slow down together."""
        return _deviation(self.repeats[:, 0] - self.repeats[:, 1])

    def scaled(self, factor: float) -> Noise:
        return Noise(factor * self.repeats, factor * self.requests)


def measured_noise(runs: Sequence[Baseline]) -> Noise:
    """From runs with times. The same cell in two runs counts as more repeats of it, so that what differs between runs
    is in the scatter. Where no cell was repeated, plain decoding still was: of the same prompts it is the same work in
    every cell of a run. Speculative passes are then taken to scatter as much, and by themselves. Raises ValueError
    where nothing was repeated.
    """
    parts = [effects for logs in _cells(runs) if (effects := _effects(logs)) is not None]
    if parts:
        repeats, requests = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Noise(repeats, requests)
    parts = [effects for logs in _plain(runs) if (effects := _effects(logs)) is not None]
    if not parts:
        raise ValueError("nothing was done twice; sweep with --repeats 8")
    passes, requests = (np.concatenate(part) for part in zip(*parts, strict=True))
    other = np.random.default_rng(0).permutation(passes)
    return Noise(np.concatenate([passes, other], axis=1), requests)


def _effects(logs: Array) -> tuple[Array, Array] | None:
    """Of logs[repeat, mode, request]: those of each repeat and mode, and those of requests in it, flat."""
    repeats, _, size = logs.shape
    if repeats < 2 or size < 2:
        return None
    centred = logs - logs.mean(axis=0)
    effects = centred.mean(axis=2)
    # The means that were taken out made the rest smaller.
    rest = (centred - effects[:, :, None]) * math.sqrt(repeats / (repeats - 1) * size / (size - 1))
    return effects * math.sqrt(repeats / (repeats - 1)), rest.ravel()


def _cells(runs: Sequence[Baseline]) -> Iterator[Array]:
    """logs[repeat, mode, request] of each cell, plain first."""
    found: dict[Place, list[Array]] = {}
    for cell, times in _timed(runs):
        found.setdefault(cell.place, []).append(np.stack([_logs(times.plain), _logs(times.speculative)], axis=1))
    for parts in found.values():
        yield _complete(np.concatenate(parts))


def _plain(runs: Sequence[Baseline]) -> Iterator[Array]:
    """logs[pass, 1, request] of the plain passes over the same prompts."""
    found: dict[tuple[str, int], list[Array]] = {}
    for cell, times in _timed(runs):
        found.setdefault((cell.spec.suite, cell.spec.batch), []).append(_logs(times.plain)[:, None, :])
    for parts in found.values():
        yield _complete(np.concatenate(parts))


def _timed(runs: Sequence[Baseline]) -> Iterator[tuple[Cell, Times]]:
    return ((cell, cell.times) for run in runs for cell in run.cells if cell.times is not None)


def _complete(logs: Array) -> Array:
    """Without requests that decoded nothing, which have no time."""
    return logs[:, :, np.isfinite(logs).all(axis=(0, 1))]


def _logs(passes: Sequence[PassTimes]) -> Array:
    """Of seconds per token: [pass, request]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(np.array([p.seconds for p in passes]) / np.array([p.tokens for p in passes])))


def _deviation(effects: Array) -> float:
    return float(np.sqrt(np.mean(effects**2)))
