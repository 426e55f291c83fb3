"""`spectune predict` as JSON and on a terminal. Everything in it is an estimate, and says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spectune.reporting import format as form
from spectune.reporting.grid import cell, grid
from spectune.speedup.what_if import Prediction, Row, WhatIf

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SHOWN = 10  # batches on the terminal


def prediction_document(run: str, found: WhatIf) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "run": run,
        "estimate": True,
        "latency_from": found.source,
        "device": found.device,
        "efficiency": asdict(found.efficiency) if found.efficiency else None,
        "predictions": [_prediction(p) for p in found.predictions],
    }


def head_lines(found: WhatIf) -> Iterator[str]:
    """What the figures rest on."""
    yield f"ESTIMATE, not measured: acceptance from the run, latency from the {found.source}"
    e = found.efficiency
    if e is not None:
        known = ", ".join(e.measured) or "none of it"
        low, high = (f"{1e6 * s:.0f}" for s in e.layer_seconds)
        yield (
            f"{found.device} in bfloat16: {e.memory[0]:.0%} to {e.memory[1]:.0%} of peak bandwidth, "
            f"{e.compute[0]:.0%} to {e.compute[1]:.0%} of peak FLOP/s, {low} to {high} µs a layer; "
            f"measured: {known}, the rest assumed"
        )


def print_prediction(found: WhatIf, console: Console, *, everything: bool = False) -> None:
    """The best drafter by batch of each suite; a drafter's own table where it is the only one, or with `everything`."""
    from rich.text import Text

    for line in head_lines(found):
        console.print(Text(form.visible(line), style="bold yellow"), soft_wrap=True)
    suites: dict[str, list[Prediction]] = {}
    for p in found.predictions:
        suites.setdefault(p.suite, []).append(p)
    for suite, own in suites.items():
        known = [p for p in own if p.reason is None]
        if everything or len(known) == 1:
            for p in known:
                console.print(_table(f"{suite}: {p.drafter}, context {p.context:.0f}", p))
                if p.crossover is not None:
                    console.print(Text(f"  speculation {p.crossover.text('batch')} (estimate)"), soft_wrap=True)
        elif known:
            console.print(_best_table(suite, known))
        unknown: dict[str, list[str]] = {}
        for p in own:
            if p.reason is not None:
                unknown.setdefault(p.reason, []).append(p.drafter)
        for reason, names in unknown.items():
            console.print(Text(form.visible(f"{suite}: {', '.join(names)}: {reason}")), soft_wrap=True)
    if not everything and any(len(own) > 1 for own in suites.values()):
        console.print(Text("--all: a table per drafter; --draft NAME: that drafter alone"))


def _best_table(suite: str, known: Sequence[Prediction]) -> Table:
    """At each batch the drafter whose best K is the fastest. Where none is FASTER, the numbers of the closest."""
    columns = ("batch", "use", "speedup (95 %)", "tokens/s in all (95 %)", "note")
    table = grid(f"estimate: {suite}, context {known[0].context:.0f}", columns, left=("use", "note"))
    for batch in _some(list(known[0].best)):
        p = max(known, key=lambda p, b=batch: (p.best[b] > 0, _shown(b, p).speedup.value))  # type: ignore[misc]
        row = _shown(batch, p)
        use = f"{p.drafter}, K {row.k}" if p.best[batch] else f"OFF ({row.verdict})"
        table.add_row(*map(cell, (str(batch), use, *_numbers(row))))
    return table


def _numbers(row: Row) -> tuple[str, str, str]:
    """Speedup, rate of the whole batch, and what limits both."""
    s, all_ = row.speedup, row.in_all
    notes = [*(["does not fit"] if row.fits is False else []), *(["extrapolated"] if row.extrapolated else [])]
    rate = f"{all_.value:.0f}" if all_.low is None else f"{all_.value:.0f} ({all_.low:.0f} to {all_.high:.0f})"
    return form.speedup(s.value, s.low, s.high), rate, ", ".join(notes)


def _table(title: str, p: Prediction) -> Table:
    columns = ("batch", "K", "best K", "within 1 %", "speedup (95 %)", "tokens/s in all (95 %)", "note")
    table = grid(f"estimate: {title}", columns, left=("within 1 %", "note"))
    for batch in _some(list(p.best)):
        row = _shown(batch, p)
        flat = p.flat[batch]
        within = "OFF" if not flat else str(flat[0]) if len(flat) == 1 else f"{flat[0]} … {flat[-1]}"
        table.add_row(*map(cell, (str(batch), str(p.best[batch]), str(row.k), within, *_numbers(row))))
    return table


def _shown(batch: int, p: Prediction) -> Row:
    """The row of the K to use, or of the best K where that is 0."""
    own = [r for r in p.rows if r.batch == batch]
    return next((r for r in own if r.k == p.best[batch]), max(own, key=lambda r: r.speedup.value))


def _some(batches: Sequence[int]) -> list[int]:
    """All, or of many the powers of two and both ends."""
    if len(batches) <= _SHOWN:
        return list(batches)
    kept = [b for b in batches if b & (b - 1) == 0 or b in (batches[0], batches[-1])]
    return kept if kept else list(batches[:_SHOWN])


def _prediction(p: Prediction) -> dict[str, Any]:
    crossover = None if p.crossover is None else {**asdict(p.crossover), "text": p.crossover.text("batch")}
    return {
        **asdict(p),
        "best": {str(b): k for b, k in p.best.items()},
        "flat": {str(b): list(ks) for b, ks in p.flat.items()},
        "crossover": crossover,
    }
