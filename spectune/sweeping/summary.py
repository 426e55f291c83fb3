"""The outcome of a sweep as a table and as JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spectune.measuring.bytes_model import TheoryCard
from spectune.sweeping.card import card_text
from spectune.sweeping.cell import CellResult, CellSpec
from spectune.sweeping.figures import figures
from spectune.sweeping.progress import describe, duration
from spectune.sweeping.sweep import SweepOutcome

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("suite", "batch", "draft", "K", "speedup", "tokens/s", "plain", "AL")


def as_json(outcome: SweepOutcome) -> dict[str, Any]:
    """Everything a script needs: where the run is, how it went, and the headline figures of each cell."""
    if outcome.estimate is not None:
        plan = [{"key": spec.key, **spec.model_dump(mode="json")} for spec in outcome.plan]
        return {
            "dry_run": True,
            **asdict(outcome.estimate),
            "fast": outcome.fast,
            "memory": list(outcome.memory),
            "card": _card(outcome.card),
            "plan": plan,
        }
    return {
        "run": str(outcome.directory),
        "cells": len(outcome.plan),
        "finished": len(outcome.results),
        "failed": [
            {**_place(f.spec), "key": f.key, "reason": f.reason, "message": f.message} for f in outcome.failures
        ],
        "elsewhere": list(outcome.elsewhere),
        "fast": outcome.fast,
        "results": [
            {
                **_place(r.spec),
                "key": r.key,
                **_synthetic(r.spec),
                **asdict(figures(r)),
                "output_check": r.output_check.verdict if r.output_check else None,
                "warnings": list(r.warnings),
            }
            for r in outcome.results
        ],
        "card": _card(outcome.card),
        "next": list(next_command(outcome)) if outcome.results else None,
    }


def as_table(outcome: SweepOutcome) -> Table:
    """One row per cell of the plan that is done; a failed cell shows why."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    forced = any(spec.synthetic is not None for spec in outcome.plan)
    for column in (*_COLUMNS[:-1], "synthetic AL" if forced else "AL"):
        is_name = column in ("suite", "draft")
        # Names may take what 80 columns leave; a longer path folds.
        table.add_column(
            column,
            justify="left" if is_name else "right",
            overflow="fold",
            min_width=16 if column == "draft" else None,
        )
    rows = {r.key: _result_row(r) for r in outcome.results}
    rows |= {f.key: [*map(str, _place(f.spec).values()), f"failed: {f.reason}"] for f in outcome.failures}
    for spec in outcome.plan:
        if spec.key in rows:
            # Text, not str: a drafter's name may hold [brackets], which are not ours to interpret.
            table.add_row(*(Text(value) for value in rows[spec.key]))
    return table


def as_text(outcome: SweepOutcome) -> str:
    """What a dry run says: the cells, what they need at the least, and what theory expects."""
    needs = outcome.estimate
    assert needs is not None
    time = "unknown" if needs.seconds is None else f"at least {duration(needs.seconds)}"
    return "\n".join(
        (
            *(f"{spec.key}  {describe(spec)}" for spec in outcome.plan),
            "",
            f"cells   {needs.cells}",
            f"tokens  at most {needs.tokens}",
            f"time    {time}: {needs.assumption}",
            *([outcome.fast] if outcome.fast else []),
            *outcome.memory,
            card_text(outcome.card),
        )
    )


def closing(outcome: SweepOutcome) -> str:
    """What stands below the table: failures with their reasons, warnings, and the next command."""
    lines = [f"failed ({f.reason}): {describe(f.spec)}: {f.message}" for f in outcome.failures]
    warnings = Counter(name for r in outcome.results for name in dict.fromkeys(w.split(": ")[0] for w in r.warnings))
    lines += [f"warning {name} in {n} of {len(outcome.results)} cells" for name, n in warnings.items()]
    if outcome.fast:
        lines.append(outcome.fast)
    if outcome.elsewhere:
        lines.append(f"{len(outcome.elsewhere)} cells are still being measured by another process")
    if outcome.results:
        lines.append(f"next: {shlex.join(next_command(outcome))}")
    elif outcome.failures:
        lines.append(f"every cell failed; the reasons are in {outcome.directory}")
    return "\n".join(lines)


def next_command(outcome: SweepOutcome) -> tuple[str, ...]:
    return ("spectune", "recommend", str(outcome.directory))


def _place(spec: CellSpec) -> dict[str, Any]:
    return {"suite": spec.suite, "batch": spec.batch, "drafter": spec.drafter, "k": spec.k}


def _synthetic(spec: CellSpec) -> dict[str, Any]:
    return {"synthetic": None if spec.synthetic is None else list(spec.synthetic)}


def _result_row(result: CellResult) -> list[str]:
    found = figures(result)
    values = (
        (found.speedup, "{:.2f}x"),
        (found.speculative_tokens_per_second, "{:.1f}"),
        (found.plain_tokens_per_second, "{:.1f}"),
        (found.acceptance_length, "{:.2f}"),
    )
    return [
        *map(str, _place(result.spec).values()),
        *("n/a" if value is None else form.format(value) for value, form in values),
    ]


def _card(card: TheoryCard) -> dict[str, Any]:
    plain = [
        {
            "batch": theory.batch,
            "weight_bytes": theory.weight_bytes,
            "kv_bytes": theory.kv_bytes,
            "ceiling_tokens_per_second": theory.ceiling_tokens_per_second.value,
        }
        for theory in card.batches
    ]
    return {
        "mean_context": card.mean_context,
        "peak_bytes_per_second": card.peak_bytes_per_second.model_dump(),
        "batches": plain,
        "drafts": [asdict(draft) for draft in card.drafts],
    }
