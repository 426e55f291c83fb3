"""The page's tables: which numbers of `report --json` stand in which column, and how they are printed.

A table holds no number of its own. Its `path` says where its rows stand in the document, a column's `fields` which of
their values it shows and `kind` with which formatter, so that page and JSON cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectune.reporting import format as form
from spectune.speedup.profile import Config
from spectune.speedup.waterfall import STEPS

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    fields: str  # of the row, apart by spaces; dots go into what they hold
    kind: str = "number"


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    caption: str
    path: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[int, Row], ...]  # with the place of each in the document's list


KINDS: dict[str, Callable[..., str]] = {
    "text": lambda v: "" if v is None else str(v),
    "texts": lambda v: " ".join(map(str, v)),
    "choice": lambda v: "OFF" if v is None else str(Config(v["drafter"], v["rule"], v["k"], v["synthetic"])),
    "verdict": lambda v: "" if v is None else str(v),
    "whole": lambda v: form.MISSING if v is None else str(v),
    "number": form.number,
    "rate": form.rate,
    "percent": form.percent,
    "milliseconds": form.milliseconds,
    "size": form.size,
    "millions": form.millions,
    "speedup": form.speedup,
    "positions": form.positions,
    "flow": lambda v, source: form.MISSING if v is None else f"{form.size(v)}/s ({source})",
    "reading": lambda v, source: form.percent(v) if v is None or not source else f"{form.percent(v)} ({source})",
}
LEFT = frozenset({"text", "texts", "choice", "verdict", "positions"})  # kinds that are no number


def value(row: Any, field: str) -> Any:
    """What stands at a dotted field; None where something on the way is None."""
    for name in field.split("."):
        if row is None:
            return None
        row = row[int(name)] if isinstance(row, Sequence) else row[name]
    return row


def text(column: Column, row: Row) -> str:
    """A cell as it is printed."""
    return KINDS[column.kind](*(value(row, field) for field in column.fields.split()))


def table(
    name: str, caption: str, document: Row, path: str, columns: Iterable[Column], wanted: Callable[[Row], bool] = bool
) -> Table:
    """The rows of the document's list at `path` that are `wanted`; columns of notes only where there is one."""
    rows = tuple((n, row) for n, row in enumerate(value(document, path)) if wanted(row))
    kept = tuple(c for c in columns if c.title != "note" or any(value(row, c.fields) for _, row in rows))
    return Table(name, caption, path, kept, rows)


def place(document: Row) -> tuple[Column, ...]:
    """Where a cell stands; the rule only where the run has several."""
    cells = [*document["cells"], *document["failed"]]
    rules = {row["rule"] for row in cells}
    rule = (Column("rule", "rule", "text"),) if len(rules) > 1 else ()
    return (*_at("suite", "batch", "drafter"), *rule, Column("K", "k", "whole"))


def _at(*names: str) -> tuple[Column, ...]:
    kinds = {"suite": "text", "batch": "whole", "drafter": "text"}
    return tuple(Column("draft" if n == "drafter" else n, n, kinds[n]) for n in names)


_SPEEDUP = Column("speedup (95 %)", "speedup speedup_low speedup_high", "speedup")
_VERDICT = Column("verdict", "verdict", "verdict")
_ADVICE = (
    Column("use", "choice", "choice"),
    Column("speedup (95 %)", "speedup.value speedup.low speedup.high", "speedup"),
    _VERDICT,
)
_GAINED = Column("speedup (95 %)", "speedup.value speedup.low speedup.high", "speedup")
_READINGS = (
    ("mbu_plain", "MBU, plain"),
    ("mbu_speculative", "MBU, speculative"),
    ("mbu_draft", "MBU, drafting"),
    ("mbu_verify", "MBU, verifying"),
    ("dram_utilization", "DRAM utilisation"),
    ("memory_busy", "memory busy, share of time"),
)


def tables(document: Row) -> dict[str, Table]:
    """All tables of the page by name; one without rows is left out."""
    at = place(document)
    found = [
        table("by_batch", "The answer at each batch, over all suites", document, "by_batch", (*_at("batch"), *_ADVICE)),
        table(
            "by_suite", "The answer for each suite, over all batches", document, "by_suite", (*_at("suite"), *_ADVICE)
        ),
        table(
            "by_place",
            "The answer for each suite at each batch",
            document,
            "by_suite_and_batch",
            (*_at("suite", "batch"), *_ADVICE, Column("why", "why", "texts")),
        ),
        table("drafts", "Each draft's best K at each batch, over all suites", document, "drafts", _DRAFTS),
        *_model_tables(document, at),
        table(
            "bandwidth",
            "Bytes by the model, and the device's readings",
            document,
            "bandwidth",
            _bandwidth(document, at),
        ),
        table(
            "bandwidth_best",
            "Bytes and readings of the fastest cell of each suite and batch",
            document,
            "bandwidth",
            _bandwidth(document, at),
            _fastest(document),
        ),
        table(
            "memory", "The cell of each draft and batch that needs the most memory", document, "memory", (*at, *_MEMORY)
        ),
        table(
            "memory_best",
            "Memory of the fastest draft at each batch",
            document,
            "memory",
            (*at, *_MEMORY),
            _fastest_draft(document),
        ),
        table(
            "regret",
            "Speed of each policy, and the oracle's speed over it",
            document,
            "regret",
            (
                Column("policy", "policy", "text"),
                Column("what", "what", "text"),
                _GAINED,
                Column("regret (95 %)", "loss.value loss.low loss.high", "speedup"),
            ),
        ),
        table("cells", "Every finished cell", document, "cells", (*at, *_CELLS)),
        table("latency", "Latency and acceptance by position of every cell", document, "cells", (*at, *_LATENCY)),
        table("failed", "Cells without a result", document, "failed", (*at, Column("why", "failure", "text"))),
        *_schedule_tables(document),
        *_comparison_tables(document, at),
    ]
    return {t.name: t for t in found if t.rows}


_DRAFTS = (
    *_at("batch", "drafter"),
    Column("K", "k", "whole"),
    Column("parameters", "parameters", "millions"),
    Column("read per step", "bytes_per_step", "size"),
    Column("of the target's", "bytes_of_target", "percent"),
    Column("AL", "acceptance_length"),
    Column("T_d/T_t", "cost_ratio"),
    _SPEEDUP,
    _VERDICT,
)
_MEMORY = (
    Column("weights", "weight_bytes", "size"),
    Column("key-value caches", "kv_bytes", "size"),
    Column("logits", "logits_bytes", "size"),
    Column("widest layer", "layer_bytes", "size"),
    Column("graphs", "graph_bytes", "size"),
    Column("predicted", "predicted_bytes", "size"),
    Column("measured", "measured_bytes", "size"),
)
_CELLS = (
    Column("AL", "acceptance_length"),
    Column("β at K", "acceptance_rate", "percent"),
    Column("drafted / round", "drafted_per_round"),
    Column("T_d/T_t", "cost_ratio"),
    Column("verify / T_t", "verify_inflation"),
    Column("overhead", "overhead_share", "percent"),
    Column("plain tok/s", "plain_tokens_per_second", "rate"),
    Column("spec. tok/s", "speculative_tokens_per_second", "rate"),
    _SPEEDUP,
    _VERDICT,
)
_LATENCY = (
    Column("plain TTFT ms", "plain_ttft_seconds", "milliseconds"),
    Column("spec. TTFT ms", "speculative_ttft_seconds", "milliseconds"),
    Column("plain TPOT ms", "plain_tpot_seconds", "milliseconds"),
    Column("spec. TPOT ms", "speculative_tpot_seconds", "milliseconds"),
    Column("plain end-to-end tok/s", "plain_end_to_end_tokens_per_second", "rate"),
    Column("spec. end-to-end tok/s", "speculative_end_to_end_tokens_per_second", "rate"),
    Column("tokens / target forward", "tokens_per_target_forward"),
    Column("joint acceptance", "joint_acceptance", "positions"),
    Column("conditional acceptance", "conditional_acceptance", "positions"),
)


def _model_tables(document: Row, at: tuple[Column, ...]) -> list[Table]:
    steps = tuple(Column(name, f"waterfall.steps.{n}.speedup") for n, name in enumerate(STEPS))
    curve = (
        Column("a", "curve.a"),
        Column("g", "curve.g"),
        Column("RMSE, tokens", "curve.rmse"),
        Column("note", "reason", "text"),
    )
    predictions = (
        Column("measured", "measured"),
        Column("card", "card"),
        Column("i.i.d.", "iid"),
        Column("full", "full"),
        Column("held out", "held_out"),
        Column("overhead / T_t", "overhead_steps"),
        Column("cost beyond card, steps", "extra_steps"),
    )
    return [
        table(
            "waterfall",
            "The speedup left after each loss",
            document,
            "fit.predictions",
            (*at, *steps),
            lambda row: bool(row["waterfall"]["steps"]),
        ),
        table("curves", "Acceptance curves", document, "fit.curves", (*_at("suite", "batch", "drafter"), *curve)),
        table("predictions", "Speedup, measured and by each model", document, "fit.predictions", (*at, *predictions)),
    ]


def _fastest(document: Row) -> Callable[[Row], bool]:
    """Whether a row is of the configuration that was fastest at its suite and batch, the answer or not."""
    best = {(a["suite"], a["batch"], *_config(a["best"])) for a in document["by_suite_and_batch"] if a["best"]}
    return lambda row: (row["suite"], row["batch"], *_config(row)) in best


def _fastest_draft(document: Row) -> Callable[[Row], bool]:
    best = {(a["batch"], a["best"]["drafter"]) for a in document["by_batch"] if a["best"]}
    return lambda row: (row["batch"], row["drafter"]) in best


def _config(row: Row) -> tuple[Any, ...]:
    return row["drafter"], row["rule"], row["k"]


def _bandwidth(document: Row, at: tuple[Column, ...]) -> tuple[Column, ...]:
    """Readings that some cell has; the page tells the reasons of the others once."""
    rows = document["bandwidth"]
    shown = [
        Column(title, f"{name}.value {name}.source", "reading")
        for name, title in _READINGS
        if any(row[name]["value"] is not None for row in rows)
    ]
    others = (
        (
            "peak_bytes_per_second",
            Column("peak bandwidth", "peak_bytes_per_second.value peak_bytes_per_second.source", "flow"),
        ),
        ("power_watts", Column("power, W", "power_watts.value", "rate")),
        ("sm_clock_mhz", Column("SM clock, MHz", "sm_clock_mhz.value", "rate")),
    )
    shown += [column for name, column in others if any(row[name]["value"] is not None for row in rows)]
    sizes = (
        Column("bytes / plain step", "bytes_per_plain_step", "size"),
        Column("bytes / round", "bytes_per_round", "size"),
    )
    return (*at, *sizes, *shown)


def missing_readings(document: Row) -> list[tuple[str, str]]:
    """(what, why) of readings that cells lack, each once."""
    names = dict(_READINGS) | {
        "peak_bytes_per_second": "peak bandwidth",
        "power_watts": "power",
        "sm_clock_mhz": "SM clock",
    }
    found = [
        (title, row[name]["reason"])
        for name, title in names.items()
        for row in document["bandwidth"]
        if row[name]["value"] is None
    ]
    return list(dict.fromkeys(found))


def _schedule_tables(document: Row) -> list[Table]:
    columns = (*_at("batch"), Column("K", "k", "whole"), Column("best K", "best_k", "whole"), _GAINED)
    best = document["best_schedule"]
    if best is None:
        return []
    return [table("schedule", f"K by batch with {best['drafter']}", document, "best_schedule.rows", columns)]


def _comparison_tables(document: Row, at: tuple[Column, ...]) -> list[Table]:
    columns = (
        *at,
        Column("speedup A", "speedup_a"),
        Column("speedup B", "speedup_b"),
        Column("speedup B / A (95 %)", "speedup_ratio speedup_ratio_low speedup_ratio_high", "speedup"),
        Column("tokens/s B / A (95 %)", "rate_ratio rate_ratio_low rate_ratio_high", "speedup"),
        Column("AL A", "acceptance_length_a"),
        Column("AL B", "acceptance_length_b"),
        Column(
            "AL B − A (95 %)",
            "acceptance_length_value acceptance_length_low acceptance_length_high",
            "speedup",
        ),
        _VERDICT,
        Column("note", "reason", "text"),
    )
    return [
        table(f"pairs{n}", f"A: {c['a']}; B: {c['b']}", document, f"comparisons.{n}.pairs", columns)
        for n, c in enumerate(document["comparisons"])
    ]
