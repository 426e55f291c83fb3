"""The latency surface: the time of one forward over B rows with q new tokens each behind a context of ctx.

    linear     t = fixed + kv·B·ctx + token·B·q
    roofline   t = fixed + ((weights + kv·B·ctx)^s + (token·B·q)^s)^(1/s)          s = 4, a rounded corner

Reading weights and keys takes the memory's time, multiplying takes the processor's, and whichever is longer hides
the other (Williams et al. 2009, the roofline); `fixed` is what no size changes. In a mixture of experts more tokens
touch more experts: with a share ρ of the experts active per token both forms gain `experts·(1 − (1 − ρ)^(B·q))`
beside the weights. The form with the smaller held-out error is used and named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spectune.errors import UsageError

REACH = 2.0  # how far beyond the measured range a prediction is given unasked
_SHARPNESS = 4
_FOLDS = 5
_SAME = 1.05  # sizes nearer than this count as one
_SPARE = 2  # places beyond the number of coefficients that a fit needs
_TAIL = 0.975  # of the 95 % intervals
_START_SCALE, _LEAST_SCALE = 0.1, 1e-4  # relative residuals at which the loss turns from square to linear

Array = NDArray[np.float64]
Form = Literal["linear", "roofline"]
_Model = Callable[[Array, Array], tuple[Array, Array]]  # parameters, places -> times, slopes
_NAMES: dict[Form, tuple[str, ...]] = {
    "linear": ("fixed", "kv", "token"),
    "roofline": ("fixed", "kv", "token", "weights"),
}
_WIDTHS: dict[Form, int] = {"linear": 2, "roofline": 4}  # different B·q, so that the form can be wrong
_UNITS = {"fixed": "s", "weights": "s", "kv": "s/cached token", "token": "s/batched token", "experts": "s"}
# Where the descent begins: shares of the typical time, in the order of the names, experts last.
_STARTS = ((0.5, 0.1, 0.2, 0.3, 0.3), (0.1, 0.3, 0.5, 0.8, 0.3), (0.05, 0.1, 1.0, 0.3, 0.6))


@dataclass(frozen=True, slots=True)
class Point:
    """A measured forward: `rows` B, `query` q new tokens and `context` cached ones per row. Means may be broken."""

    rows: float
    query: float
    context: float
    seconds: float

    @property
    def place(self) -> tuple[float, float, float]:
        return self.rows, self.query, self.context


@dataclass(frozen=True, slots=True)
class Coefficient:
    """`value` with its 95 % interval; None with a `reason` where the points do not determine it."""

    name: str
    unit: str
    value: float | None
    low: float | None
    high: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Seconds:
    """A predicted time; 95 % of single measurements there lie between `low` and `high`."""

    value: float
    low: float
    high: float
    extrapolated: bool


@dataclass(frozen=True, slots=True)
class Surface:
    """A fitted form. `residuals[i]` is predicted / measured − 1 of point i; the errors are over held-out places."""

    form: Form
    expert_share: float | None  # ρ
    parameters: tuple[float, ...]  # seconds, in the order of `coefficients`
    coefficients: tuple[Coefficient, ...]
    residuals: tuple[float, ...]
    scatter: float  # standard deviation of the relative residuals
    held_out_median: float | None  # |predicted / measured − 1|; None where nothing was held out
    held_out_p90: float | None
    ranges: tuple[tuple[float, float], ...]  # least and largest B, q, ctx
    covariance: tuple[tuple[float, ...], ...]  # of the parameters

    def seconds(self, rows: float, query: float, context: float, *, extrapolate: bool = False) -> float:
        """The predicted time. Raises UsageError beyond twice the measured range, unless `extrapolate`."""
        self._within(rows, query, context, extrapolate)
        return float(self._at(rows, query, context)[0][0])

    def predict(self, rows: float, query: float, context: float, *, extrapolate: bool = False) -> Seconds:
        """As `seconds`, with the interval: the coefficients' uncertainty and the scatter of a single measurement."""
        outside = self._within(rows, query, context, extrapolate)
        times, slopes = self._at(rows, query, context)
        value, slope = float(times[0]), slopes[0] / times[0]
        spread = math.sqrt(float(slope @ np.array(self.covariance) @ slope) + self.scatter**2)
        reach = _student(len(self.residuals) - len(self.parameters)) * spread
        return Seconds(value, value * math.exp(-reach), value * math.exp(reach), outside)

    def _at(self, rows: float, query: float, context: float) -> tuple[Array, Array]:
        return _times(
            self.form, self.expert_share, np.array(self.parameters), np.array([[rows, query, context]], float)
        )

    def _within(self, rows: float, query: float, context: float, extrapolate: bool) -> bool:
        outside = False
        for name, value, (low, high) in zip(("B", "q", "ctx"), (rows, query, context), self.ranges, strict=True):
            if (value > REACH * high or value < low / REACH) and not extrapolate:
                raise UsageError(
                    f"{name} = {value:g} lies beyond twice the measured range, {low:g} to {high:g}",
                    "measure nearer to it, or ask for an extrapolation",
                )
            outside |= not low <= value <= high
        return outside


@dataclass(frozen=True, slots=True)
class SurfaceFit:
    """`best` has the smallest held-out error of `tried`; None with a reason where the points carry no form."""

    best: Surface | None
    tried: tuple[Surface, ...]
    points: int
    reason: str | None


def fit_surface(points: Sequence[Point], *, expert_share: float | None = None) -> SurfaceFit:
    """Fit both forms by robust least squares of log times (soft L1), and keep the one that predicts better.

    Held out are whole places (B, q, ctx), a fifth at a time, so repeats of a place never predict each other.

    Args:
        expert_share: active / total experts of a mixture of experts; None for a dense model.
    """
    points = [p for p in points if p.seconds > 0]
    tried = []
    reasons = []
    for form in _NAMES:
        reason = _unidentified(points, form, expert_share)
        if reason:
            reasons.append(f"{form}: {reason}")
        else:
            surface = fit_form(points, form, expert_share=expert_share)
            errors = held_out_errors(points, surface)
            median, p90 = float(np.median(errors)), float(np.percentile(errors, 90))
            tried.append(replace(surface, held_out_median=median, held_out_p90=p90))
    best = min(tried, key=lambda s: s.held_out_median or 0.0, default=None)
    return SurfaceFit(best, tuple(tried), len(points), None if best else f"not identifiable: {'; '.join(reasons)}")


def fit_form(points: Sequence[Point], form: Form, *, expert_share: float | None = None) -> Surface:
    """Fit one form to points that determine it."""
    places = np.array([p.place for p in points])
    seconds = np.array([p.seconds for p in points])
    model = partial(_times, form, expert_share)
    parameters, covariance, scatter = _fit(model, places, seconds, _names(form, expert_share))
    return Surface(
        form=form,
        expert_share=expert_share,
        parameters=tuple(parameters.tolist()),
        coefficients=_coefficients(form, expert_share, parameters, covariance, places, seconds),
        residuals=tuple((model(parameters, places)[0] / seconds - 1).tolist()),
        scatter=scatter,
        held_out_median=None,
        held_out_p90=None,
        ranges=tuple((float(low), float(high)) for low, high in zip(places.min(0), places.max(0), strict=True)),
        covariance=tuple(tuple(line) for line in covariance.tolist()),
    )


def _names(form: Form, expert_share: float | None) -> tuple[str, ...]:
    return _NAMES[form] if expert_share is None else (*_NAMES[form], "experts")


def _features(places: Array, expert_share: float | None) -> dict[str, Array]:
    """What each coefficient is multiplied with, [points] each."""
    rows, query, context = places.T
    found = {"fixed": np.ones(len(places)), "weights": np.ones(len(places))}
    found |= {"kv": rows * context, "token": rows * query}
    if expert_share is not None:
        found["experts"] = 1 - (1 - expert_share) ** (rows * query)
    return found


def _times(form: Form, expert_share: float | None, parameters: Array, places: Array) -> tuple[Array, Array]:
    """Seconds [points] at places [points, (B, q, ctx)], and their slopes by the parameters [points, n]."""
    names, feature = _names(form, expert_share), _features(places, expert_share)
    slopes = np.stack([feature[n] for n in names], axis=1)
    if form == "linear":
        return slopes @ parameters, slopes
    compute = np.array([n == "token" for n in names])
    memory = np.array([n not in ("token", "fixed") for n in names])
    parts = [slopes[:, side] @ parameters[side] for side in (memory, compute)]
    longer = np.maximum(np.maximum(*parts), 1e-300)
    corner = sum((part / longer) ** _SHARPNESS for part in parts) ** (1 / _SHARPNESS)  # 1 to 2^(1/s)
    for side, part in zip((memory, compute), parts, strict=True):
        slopes[:, side] *= ((part / longer / corner) ** (_SHARPNESS - 1))[:, None]
    return parameters[0] + longer * corner, slopes


def _unidentified(points: Sequence[Point], form: Form, expert_share: float | None) -> str | None:
    """Why the points cannot determine a form, or None."""
    names = _names(form, expert_share)
    places = {p.place for p in points}
    if len(places) < len(names) + _SPARE:
        return f"{len(places)} places (B, q, ctx) for {len(names)} coefficients"
    feature = _features(np.array(sorted(places)), expert_share)
    widths = sorted(feature["token"].tolist())
    different = 1 + sum(b > _SAME * a for a, b in pairwise(widths))
    wanted = _WIDTHS[form] + (expert_share is not None)
    if different < wanted:
        return f"{different} sizes B·q, and it needs {wanted}"
    columns = np.stack([feature[n] / feature[n].mean() for n in names if n != "weights" and feature[n].any()], axis=1)
    if np.linalg.matrix_rank(columns, tol=1e-3 * math.sqrt(len(places))) < columns.shape[1]:
        return "B·q and B·ctx do not vary independently"
    return None


def _fit(
    model: _Model, places: Array, seconds: Array, names: Sequence[str], start: Array | None = None
) -> tuple[Array, Array, float]:
    """Parameters [n], their covariance [n, n] and the scatter of the relative residuals.

    Without a `start` the descent begins at several, since the rounded corner has more than one valley.
    """
    from scipy.optimize import least_squares

    unit = _unit(places, seconds, names)
    target = np.log(seconds)

    def residuals(shares: Array) -> Array:
        return np.log(np.maximum(model(shares * unit, places)[0], 1e-300)) - target

    def jacobian(shares: Array) -> Array:
        times, slopes = model(shares * unit, places)
        return np.asarray(slopes * unit / np.maximum(times, 1e-300)[:, None])

    def solve(start: Array, scale: float) -> Array:
        found = least_squares(
            residuals,
            np.maximum(start, 1e-6),
            jacobian,
            bounds=(0, np.inf),
            loss="soft_l1",
            f_scale=scale,
            max_nfev=200,
        )
        return np.asarray(found.x)

    if start is None:
        starts = [np.array([dict(zip(_ORDER, s, strict=True))[n] for n in names]) for s in _STARTS]
        first = [solve(s, _START_SCALE) for s in starts]
        rough = min(first, key=lambda x: float(np.sum(np.abs(residuals(x)))))
    else:
        rough = start / unit
    scale = max(_LEAST_SCALE, 2 * 1.4826 * float(np.median(np.abs(residuals(rough)))))
    shares = solve(rough, scale)
    # Huber (1981), section 7.6: the covariance of an M-estimate, with ψ of the soft L1 loss.
    left = residuals(shares)
    z = (left / scale) ** 2
    psi, flat = left / np.sqrt(1 + z), float(np.mean((1 + z) ** -1.5))
    free = max(1, len(left) - len(names))
    scatter = math.sqrt(float(psi @ psi) / free) / flat
    slopes = jacobian(shares)
    covariance = np.linalg.pinv(slopes.T @ slopes, hermitian=True) * scatter**2
    return shares * unit, covariance * np.outer(unit, unit), scatter


_ORDER = ("fixed", "kv", "token", "weights", "experts")


def _unit(places: Array, seconds: Array, names: Sequence[str]) -> Array:
    """For each coefficient the value that alone would make the typical time, so that shares of it are of order 1."""
    feature = _features(places, 0.5)
    return np.array([np.median(seconds) / max(float(np.median(feature[n])), 1e-9) for n in names])


def held_out_errors(points: Sequence[Point], surface: Surface) -> Array:
    """|predicted / measured − 1| of every point, predicted from the places outside its fold."""
    places, seconds = np.array([p.place for p in points]), np.array([p.seconds for p in points])
    model = partial(_times, surface.form, surface.expert_share)
    fold = {place: i % _FOLDS for i, place in enumerate(sorted({p.place for p in points}))}
    folds = np.array([fold[p.place] for p in points])
    errors = np.empty(len(points))
    for i in range(_FOLDS):
        inside = folds == i
        names = _names(surface.form, surface.expert_share)
        found = _fit(model, places[~inside], seconds[~inside], names, np.array(surface.parameters))[0]
        errors[inside] = np.abs(model(found, places[inside])[0] / seconds[inside] - 1)
    return errors


def _coefficients(
    form: Form, expert_share: float | None, parameters: Array, covariance: Array, places: Array, seconds: Array
) -> tuple[Coefficient, ...]:
    """Values with intervals. One that trades against others over more than half of a typical time is not determined."""
    names = _names(form, expert_share)
    reach = _student(len(seconds) - len(names)) * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    loose = reach > 0.5 * _unit(places, seconds, names)
    return tuple(
        Coefficient(n, _UNITS[n], None, None, None, "not identifiable: other coefficients can take its place")
        if vague
        else Coefficient(n, _UNITS[n], float(x), max(0.0, float(x - r)), float(x + r))
        for n, x, r, vague in zip(names, parameters, reach, loose, strict=True)
    )


def _student(free: int) -> float:
    """The quantile of Student's t for a two-sided 95 % interval."""
    from scipy.special import stdtrit

    return float(stdtrit(max(1, free), _TAIL))
