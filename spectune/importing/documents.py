"""What `recommend --json` and `fit --json` print for imported results."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spectune.importing.analysis import UNPAIRED, Compared, compare, fitted, left_out
from spectune.importing.record import Imported

NOT_IN_TOTALS = "needs the times of drafts and target forwards, which these files do not have"


def recommendation_document(imported: Imported) -> dict[str, Any]:
    """The fastest configuration at each place, its verdict open."""
    found = compare(imported.points)
    return {
        "schema_version": 1,
        "imported": True,
        "verdict": "CAN'T TELL",
        "why": UNPAIRED,
        "best": [asdict(c) for c in best(found)],
        "compared": [asdict(c) for c in found],
        "left_out": list(left_out(imported.points)),
        "flags": None,
    }


def fit_document(imported: Imported) -> dict[str, Any]:
    """Acceptance of every point; models of time are null."""
    return {
        "schema_version": 1,
        "imported": True,
        "points": [
            {**f.point.model_dump(mode="json"), "iid_rate": f.iid_rate, "iid_rate_reason": f.reason}
            for f in fitted(imported.points)
        ],
        "compared": [asdict(c) for c in compare(imported.points)],
        "models": None,
        "models_reason": NOT_IN_TOTALS,
        "left_out": list(left_out(imported.points)),
    }


def best(found: tuple[Compared, ...]) -> list[Compared]:
    """The fastest at each place, where any was compared; `found` is sorted so."""
    places: dict[tuple[str | None, int], Compared] = {}
    for c in found:
        if c.speedup is not None:
            places.setdefault((c.suite, c.batch), c)
    return list(places.values())
