"""AIPerf: `profile_export_aiperf.json` (totals) and `profile_export.jsonl` (one line per request).

Format: `common/models/export_models.py`, `common/models/spec_decode_models.py`, `common/models/record_models.py` and
`metrics/types/spec_decode_metrics.py` of aiperf 0.13.0. Lengths count the bonus token, histograms do not; the metric
`spec_decode_acceptance_length` is a mean over requests, the token-weighted one is pooled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from spectune.errors import UsageError
from spectune.importing.definitions import Answers, Given, acceptance_fields
from spectune.importing.record import Point
from spectune.importing.source import Table

_HISTOGRAM = "pooled_spec_decode_acceptance_histogram"
_RECORD = "spec_decode_acceptance"
_KEYS = {
    "kept": _HISTOGRAM,
    "rounds": "total_spec_decode_steps",
    "drafted": "total_draft_tokens",
    "accepted": "total_accepted_draft_tokens",
    "length": "spec_decode_token_weighted_acceptance_length",
    "rate": "spec_decode_overall_draft_acceptance_rate",
}
_SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def is_format(tables: Sequence[Table]) -> bool:
    if all({"metadata", "metrics"} <= set(t.values) for t in tables):
        return True
    throughput = tables[0].values.get("output_token_throughput")
    return len(tables) == 1 and isinstance(throughput, dict) and "unit" in throughput


def points(tables: Sequence[Table], answers: Answers) -> list[Point]:
    """One point. Raises UsageError for unknown units and figures that contradict each other."""
    return [_from_records(tables, answers)] if "metrics" in tables[0].values else [_from_totals(tables[0], answers)]


def _from_totals(table: Table, answers: Answers) -> Point:
    given = Given(
        kept=table.histogram(_HISTOGRAM),
        rounds=_total(table, _KEYS["rounds"]),
        drafted=_total(table, _KEYS["drafted"]),
        accepted=_total(table, _KEYS["accepted"]),
        length=_metric(table, _KEYS["length"]),
        bonus="included",
        rate=_share(table, _KEYS["rate"]),
        keys=_KEYS,
    )
    found = acceptance_fields(given, table.place, answers.k, answers)
    batches = set(_concurrencies(table.values.get("input_config")))
    batch = batches.pop() if len(batches) == 1 else answers.batch
    return _finish(
        table.place,
        answers,
        found,
        batch=batch,
        k=answers.k,
        mean_request_acceptance_length=_metric(table, "spec_decode_acceptance_length"),
        output_tokens=_total(table, "total_output_tokens"),
        tokens_per_second=_metric(table, "output_token_throughput") or None,
        ttft_seconds=_seconds(table, "time_to_first_token"),
        tpot_seconds=_seconds(table, "inter_token_latency") or None,
    )


def _from_records(tables: Sequence[Table], answers: Answers) -> Point:
    place = tables[0].file
    good = [t for t in tables if not t.values.get("error")]
    records = [r for t in good if (r := t.table(_RECORD)) is not None]
    kept: Counter[int] = Counter()
    for r in records:
        own = r.histogram("acceptance_histogram") or {}
        if sum(own.values()) != r.count("num_spec_steps"):
            raise UsageError(f"{r.place}: acceptance_histogram does not add up to num_spec_steps")
        kept.update(own)
    given = Given(kept=kept or None, drafted=_sum(records, "num_draft_tokens"), keys={**_KEYS, "kept": _RECORD})
    ks = {r.count("num_spec_tokens") for r in records}
    k = ks.pop() if len(ks) == 1 else None
    k = answers.k if k is None else k
    lengths = [n for r in records if (n := r.number("mean_acceptance_length")) is not None]
    failed = len(tables) - len(good)
    return _finish(
        place,
        answers,
        acceptance_fields(given, place, k, answers),
        batch=answers.batch,
        k=k,
        mean_request_acceptance_length=fmean(lengths) if lengths else None,
        output_tokens=None,
        tokens_per_second=None,
        ttft_seconds=None,
        tpot_seconds=None,
        notes=(f"{failed} requests failed",) if failed else (),
    )


def _finish(place: str, answers: Answers, found: dict[str, Any], **values: Any) -> Point:
    missing = found.pop("missing")
    reasons = {
        "k": "the file does not say K: --k",
        "batch": "the file does not name one concurrency: --batch",
        "tokens_per_second": "no output_token_throughput; profile_export_aiperf.json has it",
    }
    missing.update({name: why for name, why in reasons.items() if values[name] is None})
    return Point(
        file=place,
        format="aiperf",
        suite=answers.suite,
        drafter=answers.drafter,
        missing=missing,
        **values,
        **found,
    )


def _metric(table: Table, tag: str, field: str = "avg") -> float | None:
    metric = table.table(tag)
    return None if metric is None else metric.number(field)


def _total(table: Table, tag: str) -> int | None:
    metric = table.table(tag)
    return None if metric is None else metric.count("avg")


def _share(table: Table, tag: str) -> float | None:
    metric = table.table(tag)
    if metric is None:
        return None
    unit = metric.text("unit")
    if unit not in ("%", "percent"):
        raise UsageError(f"{metric.place}: unit {unit!r} is not percent")
    return metric.number("avg", scale=0.01)


def _seconds(table: Table, tag: str) -> float | None:
    metric = table.table(tag)
    if metric is None:
        return None
    unit = metric.text("unit")
    if unit not in _SECONDS:
        raise UsageError(f"{metric.place}: unit {unit!r} is no unit of time that is known here")
    return metric.number("avg", scale=_SECONDS[unit])


def _sum(records: Sequence[Table], key: str) -> int | None:
    values = [r.count(key) for r in records]
    return None if not values or None in values else sum(v or 0 for v in values)


def _concurrencies(value: Any) -> Iterator[int]:
    """Every `concurrency` in the settings, however deep: the place differs between versions."""
    if isinstance(value, dict):
        own = value.get("concurrency")
        if isinstance(own, int) and not isinstance(own, bool) and own > 0:
            yield own
        for inner in value.values():
            yield from _concurrencies(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _concurrencies(inner)
