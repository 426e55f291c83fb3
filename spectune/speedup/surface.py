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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from spectune.errors import UsageError
from spectune.speedup.surface_descent import Descent, Solution
from spectune.speedup.surface_forms import NAMES, UNITS, Array, Form, features, names_of, times, typical

REACH = 2.0  # how far beyond the measured range a prediction is given unasked
_FOLDS = 5
_WIDTHS: dict[Form, int] = {"linear": 2, "roofline": 4}  # different B·q, so that the form can be wrong
_SAME = 1.05  # sizes nearer than this count as one
_SPARE = 2  # places beyond the number of coefficients that a fit needs
_TAIL = 0.975  # of the 95 % intervals
# Where the descent begins: shares of the typical time.
_STARTS: tuple[dict[str, float], ...] = (
    {"fixed": 0.5, "kv": 0.1, "token": 0.2, "weights": 0.3, "experts": 0.3},
    {"fixed": 0.1, "kv": 0.3, "token": 0.5, "weights": 0.8, "experts": 0.3},
    {"fixed": 0.05, "kv": 0.1, "token": 1.0, "weights": 0.3, "experts": 0.6},
)


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

    def seconds(self, rows: float, query: float, context: float) -> float:
        """The predicted time. Raises UsageError beyond twice the measured range."""
        self._within(rows, query, context, extrapolate=False)
        return float(self._at(rows, query, context)[0][0])

    def predict(self, rows: float, query: float, context: float, *, extrapolate: bool = False) -> Seconds:
        """As `seconds`, with the interval: the coefficients' uncertainty and the scatter of a single measurement."""
        outside = self._within(rows, query, context, extrapolate)
        seconds, slopes = self._at(rows, query, context)
        value, slope = float(seconds[0]), slopes[0] / seconds[0]
        spread = math.sqrt(float(slope @ np.array(self.covariance) @ slope) + self.scatter**2)
        reach = _student(len(self.residuals) - len(self.parameters)) * spread
        return Seconds(value, value * math.exp(-reach), value * math.exp(reach), outside)

    def draws(self, random: np.random.Generator, count: int, places: Array) -> Array:
        """Times [count, points] at places [points, (B, q, ctx)], drawn from the coefficients' uncertainty.

        Drawn are the logarithms, as in `predict`. Coefficients that can take each other's place are uncertain many
        times over while their sum is not; drawing them and cutting them at 0 would move every time.
        """
        value, slopes = times(self.form, self.expert_share, np.array(self.parameters), places)
        value = np.maximum(value, 1e-9)
        zero = np.zeros(len(self.parameters))
        drawn = random.multivariate_normal(zero, np.array(self.covariance), count, method="eigh")
        return np.asarray(value * np.exp(drawn @ (slopes / value[:, None]).T))

    def _at(self, rows: float, query: float, context: float) -> tuple[Array, Array]:
        return times(self.form, self.expert_share, np.array(self.parameters), np.array([[rows, query, context]], float))

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
    for form in NAMES:
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
    names = names_of(form, expert_share)
    places, seconds = _arrays(points)
    descent = _descent(places, seconds, form, expert_share)
    found = descent.best_of([np.array([start[n] for n in names]) for start in _STARTS])
    return Surface(
        form=form,
        expert_share=expert_share,
        parameters=tuple(found.parameters.tolist()),
        coefficients=_coefficients(names, descent, found, len(points)),
        residuals=tuple((times(form, expert_share, found.parameters, places)[0] / seconds - 1).tolist()),
        scatter=found.scatter,
        held_out_median=None,
        held_out_p90=None,
        ranges=tuple((float(low), float(high)) for low, high in zip(places.min(0), places.max(0), strict=True)),
        covariance=tuple(tuple(line) for line in found.covariance.tolist()),
    )


def held_out_errors(points: Sequence[Point], surface: Surface) -> Array:
    """|predicted / measured − 1| of every point, predicted from the places outside its fold."""
    places, seconds = _arrays(points)
    fold = {place: i % _FOLDS for i, place in enumerate(sorted({p.place for p in points}))}
    folds = np.array([fold[p.place] for p in points])
    errors = np.empty(len(points))
    for i in range(_FOLDS):
        inside = folds == i
        descent = _descent(places[~inside], seconds[~inside], surface.form, surface.expert_share)
        found = descent.from_(np.array(surface.parameters) / descent.unit).parameters
        predicted = times(surface.form, surface.expert_share, found, places[inside])[0]
        errors[inside] = np.abs(predicted / seconds[inside] - 1)
    return errors


def _arrays(points: Sequence[Point]) -> tuple[Array, Array]:
    """Places [points, (B, q, ctx)] and seconds [points]."""
    return np.array([p.place for p in points]), np.array([p.seconds for p in points])


def _descent(places: Array, seconds: Array, form: Form, expert_share: float | None) -> Descent:
    unit = typical(places, seconds, names_of(form, expert_share))
    return Descent(lambda parameters: times(form, expert_share, parameters, places), seconds, unit)


def _unidentified(points: Sequence[Point], form: Form, expert_share: float | None) -> str | None:
    """Why the points cannot determine a form, or None."""
    names = names_of(form, expert_share)
    places = {p.place for p in points}
    if len(places) < len(names) + _SPARE:
        return f"{len(places)} places (B, q, ctx) for {len(names)} coefficients"
    feature = features(np.array(sorted(places)), expert_share)
    widths = sorted(feature["token"].tolist())
    different = 1 + sum(b > _SAME * a for a, b in pairwise(widths))
    wanted = _WIDTHS[form] + (expert_share is not None)
    if different < wanted:
        return f"{different} sizes B·q, and it needs {wanted}"
    columns = np.stack([feature[n] / feature[n].mean() for n in names if n != "weights" and feature[n].any()], axis=1)
    if np.linalg.matrix_rank(columns, tol=1e-3 * math.sqrt(len(places))) < columns.shape[1]:
        return "B·q and B·ctx do not vary independently"
    return None


def _coefficients(names: Sequence[str], descent: Descent, found: Solution, points: int) -> tuple[Coefficient, ...]:
    """Values with intervals; None for those that others can stand for.

    That is so where a coefficient trades against others over more than half of a typical time, and for `fixed` and
    `weights` where the points are described as well without the one as without the other.
    """
    student = _student(points - len(names))
    reach = student * np.sqrt(np.diag(found.covariance))
    vague = set(np.flatnonzero(reach > 0.5 * descent.unit).tolist())
    if "weights" in names:
        pair = (names.index("fixed"), names.index("weights"))
        if all(descent.can_drop(found, i, student) for i in pair):
            vague |= set(pair)
    return tuple(
        Coefficient(n, UNITS[n], None, None, None, "not identifiable: other coefficients can take its place")
        if i in vague
        else Coefficient(n, UNITS[n], float(x), max(0.0, float(x - r)), float(x + r))
        for i, (n, x, r) in enumerate(zip(names, found.parameters, reach, strict=True))
    )


def _student(free: int) -> float:
    """The quantile of Student's t for a two-sided 95 % interval."""
    from scipy.special import stdtrit

    return float(stdtrit(max(1, free), _TAIL))
