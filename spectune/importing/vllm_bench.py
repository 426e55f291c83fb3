"""`vllm bench serve --save-result` and the sweeps made of it: `summary.json`, `run=N.json`, `summary.csv`.

Format: vllm/benchmarks/serve.py and vllm/benchmarks/sweep/serve.py of vLLM 0.32. The acceptance rate is in percent,
the length counts the bonus token, rates by position are joint. A sweep adds the server's settings to each row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from spectune.errors import UsageError
from spectune.importing.definitions import Answers, Given, acceptance_fields
from spectune.importing.record import Point
from spectune.importing.source import Table

_PREFIX = "spec_decode_"
_KEYS = {
    "rounds": _PREFIX + "num_drafts",
    "drafted": _PREFIX + "draft_tokens",
    "accepted": _PREFIX + "accepted_tokens",
    "length": _PREFIX + "acceptance_length",
    "rate": _PREFIX + "acceptance_rate",
    "joint": _PREFIX + "per_position_acceptance_rates",
}
_K_KEYS = ("num_speculative_tokens", "spec_tokens", "speculative_config.num_speculative_tokens")
_CONFIG_KEYS = ("speculative_config", "speculative-config")


def is_format(tables: Sequence[Table]) -> bool:
    return all({"output_throughput", "total_output_tokens"} <= set(t.values) for t in tables)


def points(tables: Sequence[Table], answers: Answers) -> list[Point]:
    """One point per run. Raises UsageError for figures that contradict each other."""
    return [_point(table, answers) for table in tables]


def _point(table: Table, answers: Answers) -> Point:
    if table.count("completed") == 0:
        raise UsageError(f"{table.place}: completed: no request was completed")
    config = _config(table)
    joint = table.rates(_KEYS["joint"])
    k = _k(table, config, len(joint) if joint else None, answers)
    given = Given(
        rounds=table.count(_KEYS["rounds"]),
        drafted=table.count(_KEYS["drafted"]),
        accepted=table.count(_KEYS["accepted"]),
        length=table.number(_KEYS["length"]),
        rate=table.number(_KEYS["rate"], scale=0.01),
        joint=joint,
        keys=_KEYS,
    )
    found = acceptance_fields(given, table.place, k, answers)
    missing = found.pop("missing")
    batch = table.count("max_concurrency") or answers.batch
    if k is None:
        missing["k"] = "the file does not say whether the server speculated: --k"
    if batch is None:
        missing["batch"] = "no max_concurrency: requests came at a rate, or all at once"
    failed = table.count("failed")
    return Point(
        file=table.place,
        format="vllm-bench",
        suite=table.text("dataset_name") or answers.suite,
        drafter=_drafter(config) or answers.drafter,
        k=k,
        batch=batch,
        repeat=table.count("run_number") or 0,
        output_tokens=table.count("total_output_tokens"),
        tokens_per_second=table.positive("output_throughput"),
        ttft_seconds=table.number("mean_ttft_ms", scale=1e-3),
        tpot_seconds=table.positive("mean_tpot_ms", scale=1e-3),
        missing=missing,
        notes=(f"{failed} requests failed",) if failed else (),
        **found,
    )


def _config(table: Table) -> dict[str, Any] | None:
    """The server's speculative settings. A sweep's null may leave what the server's command says: nothing is said."""
    key = next((key for key in _CONFIG_KEYS if table.values.get(key) is not None), None)
    if key is None:
        return None
    value = table.values[key]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise UsageError(f"{table.place}: {key} is no JSON: {value!r}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{table.place}: {key} is not a mapping: {value!r}")
    return value


def _k(table: Table, config: dict[str, Any] | None, positions: int | None, answers: Answers) -> int | None:
    for key in _K_KEYS:
        if (k := table.count(key)) is not None:
            return k
    if config is not None:
        stated = Table(f"{table.place}: speculative_config", config).count("num_speculative_tokens")
        if stated is not None:
            return stated
    return answers.k if positions is None else positions


def _drafter(config: dict[str, Any] | None) -> str | None:
    if not config:
        return None
    parts = [str(config[key]) for key in ("method", "model") if config.get(key)]
    return ":".join(parts) or None
