"""specdec_bench of NVIDIA's Model Optimizer: `acceptance_rate.json` and `speculation_profile.json`.

Format: examples/specdec_bench/specdec_bench/metrics/acceptance_rate.py and speculation_profile.py. Its maps are keyed
by tokens per step with the bonus token: key 1 means that no drafted token was accepted, so key n is about position
n - 1. Average_AL is the mean over requests; the pooled length comes from the histogram.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectune.errors import UsageError
from spectune.importing.definitions import Answers, Given, acceptance_fields, with_bonus
from spectune.importing.record import Point
from spectune.importing.source import Table

_HISTOGRAM = "Acceptance_Length_Histogram"
_PROFILE_KEYS = {
    "length": "mean_accept_length",
    "joint": "marginal_accept_rates",
    "conditional": "conditional_accept_rates",
    "kept": "acceptance_length_histogram",
}
_FIRST_TOKEN = "steps are as specdec_bench counts them; some of its versions count the prefill's token as one"


def is_format(tables: Sequence[Table]) -> bool:
    return all(_HISTOGRAM in t.values or _PROFILE_KEYS["joint"] in t.values for t in tables)


def points(tables: Sequence[Table], answers: Answers) -> list[Point]:
    """One point per run in the file. Raises UsageError where a histogram fits neither definition."""
    return [
        _from_profile(t, answers) if _PROFILE_KEYS["joint"] in t.values else _from_histogram(t, n, answers)
        for n, t in enumerate(tables)
    ]


def _from_histogram(table: Table, repeat: int, answers: Answers) -> Point:
    kept = _kept(table, _HISTOGRAM, answers)
    given = Given(kept=kept, keys={"kept": _HISTOGRAM})
    found = acceptance_fields(given, table.place, answers.k, answers)
    average = table.number("Average_AL")
    bonus = answers.bonus or "included"
    return _finish(
        table,
        answers,
        found,
        k=answers.k,
        drafter=answers.drafter,
        repeat=repeat,
        mean_request_acceptance_length=None if average is None else with_bonus(average, bonus),
    )


def _from_profile(table: Table, answers: Answers) -> Point:
    if table.values.get("measured") is not True:
        raise UsageError(f"{table.place}: measured is not true: the profile is a placeholder")
    k = table.count("num_speculative_tokens")
    kept = _kept(table, _PROFILE_KEYS["kept"], answers)
    given = Given(
        kept=kept,
        length=table.number(_PROFILE_KEYS["length"]),
        bonus="included",
        joint=table.rates(_PROFILE_KEYS["joint"]),
        keys=_PROFILE_KEYS,
    )
    found = acceptance_fields(given, table.place, k, answers)
    per_request = table.number("mean_accept_length_per_request")
    return _finish(
        table,
        answers,
        found,
        k=k,
        drafter=table.text("method") or answers.drafter,
        mean_request_acceptance_length=per_request or None,
    )


def _kept(table: Table, key: str, answers: Answers) -> dict[int, int] | None:
    histogram = table.histogram(key)
    if histogram is None:
        return None
    if 0 in histogram and answers.bonus != "excluded":
        raise UsageError(
            f"{table.place}: {key} has steps of 0 tokens, so it does not count the bonus token as documented",
            "if so, add --bonus excluded",
        )
    return {n if answers.bonus == "excluded" else n - 1: count for n, count in histogram.items()}


def _finish(table: Table, answers: Answers, found: dict[str, Any], **values: Any) -> Point:
    missing = found.pop("missing")
    missing["tokens_per_second"] = "the file has no times"
    if values["k"] is None:
        missing["k"] = "the file does not say K: --k"
    if answers.batch is None:
        missing["batch"] = "the file does not say it: --batch"
    return Point(
        file=table.place,
        format="specdec-bench",
        suite=answers.suite,
        batch=answers.batch,
        missing=missing,
        notes=(_FIRST_TOKEN,),
        **values,
        **found,
    )
