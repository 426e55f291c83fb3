"""The outcome as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from spectune.gating.check import Check, Outcome


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """What `gate --json` prints. No NaN and no infinity is in it."""
    return {
        "schema_version": 1,
        "run": outcome.run,
        "baseline": outcome.baseline,
        "verdict": outcome.verdict,
        "exit_code": outcome.exit_code,
        "checks": [_check(c) for c in outcome.checks],
        "notes": list(outcome.notes),
    }


def _check(check: Check) -> dict[str, Any]:
    fields = asdict(check)
    fields["place"] = None
    if check.place is not None:
        fields["place"] = dict(zip(("suite", "drafter", "rule", "k", "batch"), check.place, strict=True))
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
