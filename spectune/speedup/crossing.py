"""Where a speedup falls below 1: between measured sizes, on a straight line of log speedup over log size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectune.speedup.curve import Array
from spectune.speedup.uncertainty import LEVEL, USABLE


@dataclass(frozen=True, slots=True)
class Crossing:
    """The size at which speculation stops paying, with its 95 % interval.

    `value` None: it pays at every size (`pays` True) or at none (False) of those looked at. An end of the interval is
    None where it lies outside `smallest` … `largest`, or where there are no resamples (`known` False).
    """

    value: float | None
    low: float | None
    high: float | None
    pays: bool | None
    known: bool
    smallest: float
    largest: float

    def text(self, what: str) -> str:
        """In words; `what` is the size's name."""
        if self.value is None:
            end, which = (self.largest, "largest") if self.pays else (self.smallest, "smallest")
            where = f"at {what} {_size(end)}, the {which} looked at"
            beyond = self.low if self.pays else self.high
            if beyond is None:
                return f"{'still pays' if self.pays else 'does not pay'} {where}"
            return f"{'seems to pay' if self.pays else 'seems not to pay'} {where}, but may stop at {_size(beyond)}"
        if not self.known:
            return f"stops paying at {what} {_size(self.value)}"
        low = f"below {_size(self.smallest)}" if self.low is None else _size(self.low)
        high = f"above {_size(self.largest)}" if self.high is None else _size(self.high)
        return f"stops paying at {what} {_size(self.value)} ({low} to {high})"


def _size(value: float) -> str:
    """Three digits, and all in front of the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def crossing(sizes: Sequence[float], speedups: Sequence[float], draws: Array | None) -> Crossing:
    """The first size, rising, where the speedup falls to 1 or below.

    Args:
        sizes: rising, above 0.
        speedups: at each size.
        draws: resamples of them, [resamples, sizes].
    """
    x = np.log(np.asarray(sizes, dtype=float))
    found = float(_first(x, np.log(np.asarray(speedups, dtype=float))[None])[0])
    low = high = None
    usable = None if draws is None else draws[(np.isfinite(draws) & (draws > 0)).all(axis=1)]
    known = draws is not None and usable is not None and len(usable) >= USABLE * len(draws)
    if usable is not None and known:
        drawn = np.sort(_first(x, np.log(usable)))
        tail = (1 - LEVEL) / 2
        # Ends are order statistics: a mean with a crossing that lies nowhere has no meaning.
        low, high = (_inside(float(drawn[round(q * (len(drawn) - 1))])) for q in (tail, 1 - tail))
    value = _inside(found)
    return Crossing(value, low, high, None if value is not None else found > 0, known, sizes[0], sizes[-1])


def _first(x: Array, logs: Array) -> Array:
    """Sizes [draws] where logs [draws, sizes] first fall to 0; -inf where they begin there, inf where they never do."""
    below = logs <= 0
    at = below.argmax(axis=1)
    rows = np.arange(len(logs))
    before = np.maximum(at - 1, 0)
    above, under = logs[rows, before], logs[rows, at]
    with np.errstate(divide="ignore", invalid="ignore"):
        place = x[before] + (x[at] - x[before]) * above / (above - under)
    found = np.where(at == 0, -np.inf, np.exp(place))
    return np.where(below.any(axis=1), found, np.inf)


def _inside(size: float) -> float | None:
    return size if np.isfinite(size) else None
