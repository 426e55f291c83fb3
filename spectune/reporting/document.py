"""What `report --json` prints: every number of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectune.reporting import sections
from spectune.reporting.row import place, readings
from spectune.reporting.summary import Summary, fit_document, recommendation_document
from spectune.speedup.profile import Profile


def report_document(summary: Summary, others: Sequence[Summary] = ()) -> dict[str, Any]:
    """The numbers of the page of a run, held against `others` where there are any."""
    return {
        **recommendation_document(summary),
        "drafts": sections.drafts(summary),
        "fit": fit_document(summary),
        "cells": summary.rows,
        "bandwidth": [bandwidth_row(p) for p in summary.profiles],
        "memory": sections.memory(summary),
        "samples": sections.samples(summary),
        "comparisons": sections.comparisons(summary, others),
        "audits": [a.model_dump(mode="json") for a in summary.audits],
        "environment": summary.run.info.environment,
    }


def bandwidth_row(p: Profile) -> dict[str, Any]:
    """The bytes of a cell by the model, and its bandwidth readings, each with its source or its reason."""
    found = {name: reading.model_dump() for name, reading in readings(p.cell.bandwidth).items()}
    bytes_read = {name: getattr(p.cell.bandwidth, name) for name in ("bytes_per_plain_step", "bytes_per_round")}
    return {"key": p.cell.key, **place(p.spec), **bytes_read, **found}
