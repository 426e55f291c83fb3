"""llama-server's `timings`: saved responses, one per JSON object or line, pooled into one point.

Format: ggml-org/llama.cpp tools/server/README.md. `predicted_n` counts the prefill's token, which is no round here;
each round delivers its accepted tokens and one more, so rounds = predicted_n - 1 - draft_n_accepted, those without a
draft included. `draft_n` is left out of a response in which nothing was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

from spectune.errors import UsageError
from spectune.importing.definitions import Answers, Given, acceptance_fields
from spectune.importing.record import Point
from spectune.importing.source import Table

_KEYS = {"drafted": "timings.draft_n", "accepted": "timings.draft_n_accepted", "rounds": "timings.predicted_n"}


def is_format(tables: Sequence[Table]) -> bool:
    return all(isinstance(t.values.get("timings"), dict) for t in tables)


def points(tables: Sequence[Table], answers: Answers) -> list[Point]:
    """One point. Raises UsageError for a response without its counts, or with impossible ones."""
    place = tables[0].file
    timings = [_timings(t) for t in tables]
    speculated = any("draft_n" in t.values for t in timings)
    predicted = [_needed(t, "predicted_n") for t in timings]
    drafted = sum(t.count("draft_n") or 0 for t in timings)
    accepted = sum(t.count("draft_n_accepted") or 0 for t in timings)
    later = sum(max(n - 1, 0) for n in predicted)
    if accepted > later:
        raise UsageError(f"{place}: draft_n_accepted: {accepted} accepted of {later} tokens behind the first")
    given = Given(
        rounds=later - accepted if speculated else None,
        drafted=drafted if speculated else None,
        accepted=accepted if speculated else None,
        keys=_KEYS,
    )
    found = acceptance_fields(given, place, answers.k, answers)
    missing = found.pop("missing")
    missing["tokens_per_second"] = "timings are per request, not of the whole server"
    if not speculated:
        missing["k"] = "no draft_n: nothing was drafted, or this build does not report it: --k"
    elif answers.k is None:
        missing["k"] = "responses do not say K: --k"
    if answers.batch is None:
        missing["batch"] = "responses do not say how many ran at once: --batch"
    seconds = sum(t.number("predicted_ms", scale=1e-3) or 0.0 for t in timings)
    return [
        Point(
            file=place,
            format="llama.cpp",
            suite=answers.suite,
            drafter=answers.drafter,
            k=answers.k,
            batch=answers.batch,
            output_tokens=sum(predicted),
            tpot_seconds=seconds / later if later and seconds else None,
            missing=missing,
            **found,
        )
    ]


def _timings(table: Table) -> Table:
    timings = table.table("timings")
    assert timings is not None
    return timings


def _needed(table: Table, key: str) -> int:
    value = table.count(key)
    if value is None:
        raise UsageError(f"{table.place}: {key} is missing")
    return value
