"""How much times scatter: the same work done again and again, split into what a whole pass shares and what is a
request's own. In logarithms, so that 0.03 is about 3 %."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectune.gating.baseline import Baseline, PassTimes

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Noise:
    """Centred effects, to be drawn from: of `passes` as a whole, and of `requests` within their pass."""

    passes: Array
    requests: Array

    @property
    def pass_deviation(self) -> float:
        return float(np.sqrt(np.mean(self.passes**2)))

    @property
    def request_deviation(self) -> float:
        return float(np.sqrt(np.mean(self.requests**2)))


def measured_noise(runs: Sequence[Baseline]) -> Noise:
    """From runs with times. Raises ValueError where nothing was done twice.

    Plain decoding of the same prompts at the same batch is the same work in every cell of a run, so all its passes
    count as repeats; speculative passes are repeats within their cell.
    """
    passes, requests = [], []
    for logs in (group for run in runs for group in _groups(run)):
        repeats, size = logs.shape
        if repeats < 2 or size < 2:
            continue
        centred = logs - logs.mean(axis=0)
        effects = centred.mean(axis=1)
        # The means that were taken out made the rest smaller.
        passes.append(effects * math.sqrt(repeats / (repeats - 1)))
        rest = (centred - effects[:, None]) * math.sqrt(repeats / (repeats - 1) * size / (size - 1))
        requests.append(rest.ravel())
    if not passes:
        raise ValueError("no pass was repeated")
    return Noise(np.concatenate(passes), np.concatenate(requests))


def _groups(run: Baseline) -> Iterator[Array]:
    """Logarithms of seconds per token, [repeat, request], of each kind of work."""
    plain: dict[tuple[str, int], list[PassTimes]] = {}
    for cell in run.cells:
        if cell.times is None:
            continue
        plain.setdefault((cell.spec.suite, cell.spec.batch), []).extend(cell.times.plain)
        yield _logs(cell.times.speculative)
    for passes in plain.values():
        yield _logs(passes)


def _logs(passes: Sequence[PassTimes]) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.array([p.seconds for p in passes]) / np.array([p.tokens for p in passes]))
    # A request that never ran at full occupancy has no time.
    return np.asarray(logs[:, np.isfinite(logs).all(axis=0)])
