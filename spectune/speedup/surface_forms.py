"""The two forms of the latency surface as functions of their coefficients, with slopes. See `surface`."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

_SHARPNESS = 4  # s of the rounded corner

Array = NDArray[np.float64]
Form = Literal["linear", "roofline"]
NAMES: dict[Form, tuple[str, ...]] = {
    "linear": ("fixed", "kv", "token"),
    "roofline": ("fixed", "kv", "token", "weights"),
}
UNITS = {"fixed": "s", "weights": "s", "kv": "s/cached token", "token": "s/batched token", "experts": "s"}


def names_of(form: Form, expert_share: float | None) -> tuple[str, ...]:
    """The coefficients of a form, in the order of its parameters."""
    return NAMES[form] if expert_share is None else (*NAMES[form], "experts")


def features(places: Array, expert_share: float | None) -> dict[str, Array]:
    """What each coefficient is multiplied with, [points] each, at places [points, (B, q, ctx)]."""
    rows, query, context = places.T
    found = {"fixed": np.ones(len(places)), "weights": np.ones(len(places))}
    found |= {"kv": rows * context, "token": rows * query}
    if expert_share is not None:
        found["experts"] = 1 - (1 - expert_share) ** (rows * query)
    return found


def times(form: Form, expert_share: float | None, parameters: Array, places: Array) -> tuple[Array, Array]:
    """Seconds [points] at places [points, (B, q, ctx)], and their slopes by the parameters [points, n]."""
    names, feature = names_of(form, expert_share), features(places, expert_share)
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


def typical(places: Array, seconds: Array, names: tuple[str, ...]) -> Array:
    """For each coefficient the value that alone would make the median time."""
    feature = features(places, 0.5)
    return np.array([np.median(seconds) / max(float(np.median(feature[n])), 1e-9) for n in names])
