"""The tables of `spectune fit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spectune.reporting import format as form
from spectune.reporting.grid import cell, grid
from spectune.speedup.overlap import overlap_check
from spectune.speedup.positions import Measured
from spectune.speedup.precision import sample_plans
from spectune.speedup.surface import Surface, SurfaceFit
from spectune.speedup.waterfall import STEPS

if TYPE_CHECKING:
    from rich.table import Table

    from spectune.reporting.summary import Summary


def curve_table(summary: Summary) -> Table:
    columns = ("suite", "batch", "draft", "a", "g", "p", "RMSE", "AL at K")
    table = grid("acceptance curves: a_j = a·g^((j-1)^p)", columns, left=("suite", "draft", "AL at K"))
    for c in summary.fit.curves:
        place = (c.suite, str(c.batch), c.drafter)
        if c.curve is None:
            table.add_row(*map(cell, (*place, *[form.MISSING] * 4, c.reason or "")))
            continue
        lengths = "  ".join(f"{k}: {form.number(c.curve.length_at(k))}" for k in c.ks)
        values = (form.number(c.curve.a), form.number(c.curve.g), str(c.curve.p), form.number(c.curve.rmse))
        table.add_row(*map(cell, (*place, *values, lengths)))
    return table


def position_table(summary: Summary) -> Table:
    columns = ("suite", "draft", "prompts", "a", "g", "kept at position 1, 2, …")
    title = "acceptance by position, given that all before it were kept (95 % over prompts)"
    table = grid(title, columns, left=("suite", "draft", "kept at position 1, 2, …"))
    for group in summary.positions:
        found = group.found
        kept = "  ".join(_interval(p.conditional) for p in found.positions if p.conditional is not None)
        names = (group.suite, group.drafter, str(found.prompts))
        table.add_row(*map(cell, (*names, _interval(found.a), _interval(found.g), kept or found.reason or "")))
    return table


def prediction_table(summary: Summary) -> Table:
    columns = ("suite", "batch", "draft", "K", "AL", "β@K", "fit β", "speed", "card", "iid", "full", "ovh")
    title = "speedup, measured and predicted; ovh: overhead in plain steps"
    table = grid(title, columns, left=("suite", "draft"))
    for p, q in zip(summary.profiles, summary.fit.predictions, strict=True):
        numbers = (
            form.number(p.acceptance.acceptance_length),
            form.percent(q.counted_rate),
            form.percent(q.fitted_rate),
            *(form.number(v) for v in (q.measured, q.card, q.iid, q.full, q.overhead_steps)),
        )
        spec = p.spec
        table.add_row(*map(cell, (spec.suite, str(spec.batch), spec.drafter, str(spec.k), *numbers)))
    return table


def waterfall_table(summary: Summary) -> Table:
    """One row per cell whose losses are known; each column is the speedup left after that loss."""
    table = grid(
        "from K + 1 to the measured speedup", ("suite", "batch", "draft", "K", *STEPS), left=("suite", "draft")
    )
    for p, q in zip(summary.profiles, summary.fit.predictions, strict=True):
        if q.waterfall.steps:
            names = (p.spec.suite, str(p.spec.batch), p.spec.drafter, str(p.spec.k))
            table.add_row(*map(cell, (*names, *(form.number(s.speedup) for s in q.waterfall.steps))))
    return table


def planned_table(summary: Summary) -> Table:
    columns = ("suite", "batch", "draft", "K", "speedup", "within 1 %")
    table = grid("K that the curves and the latency predict", columns, left=("suite", "draft", "within 1 %"))
    for p in summary.planned:
        names = (p.suite, str(p.batch), p.drafter)
        if p.optimum is not None:
            flat = " ".join(map(str, p.optimum.flat))
            table.add_row(*map(cell, (*names, str(p.optimum.k), form.number(p.optimum.speedup), flat)))
    return table


def latency_lines(summary: Summary) -> Iterator[str]:
    """One forward's time, for the target and each draft that runs forwards."""
    yield from _surface_lines("target", summary.surfaces.target)
    for name, found in summary.surfaces.drafts.items():
        yield from _surface_lines(name, found)


def sample_table(summary: Summary, precision: float) -> Table:
    columns = ("suite", "batch", "draft", "K", "AL ±", "prompts", "next")
    table = grid(f"prompts for an acceptance length within {precision:.1%}", columns, left=("suite", "draft"))
    for s in sample_plans([p.cell for p in summary.profiles if p.excluded is None], precision):
        width = form.MISSING if s.plan.half_width is None else f"{s.plan.half_width:.1%}"
        names = (s.spec.suite, str(s.spec.batch), s.spec.drafter, str(s.spec.k))
        table.add_row(*map(cell, (*names, width, str(s.prompts), "enough" if s.plan.enough else str(s.plan.prompts))))
    return table


def overlap_table(summary: Summary) -> Table | None:
    """Counted acceptance beside 1 − TV; None where no cell was sampled in a way that allows it."""
    columns = ("suite", "batch", "draft", "K", "tokens", "counted", "1 − TV", "deviations")
    table = grid("drafted tokens kept, and the overlap of the distributions", columns, left=("suite", "draft"))
    for p in summary.profiles:
        found = overlap_check(p.cell)
        if found is not None:
            names = (p.spec.suite, str(p.spec.batch), p.spec.drafter, str(p.spec.k), str(found.tokens))
            rates = (f"{found.counted:.1%}", f"{found.overlap:.1%}", form.number(found.deviations, 1))
            table.add_row(*map(cell, (*names, *rates)))
    return table if table.row_count else None


def constant_line(summary: Summary) -> str | None:
    """What became of a constant β; None where no curve could judge it."""
    judged = [c.constant for c in summary.fit.curves if c.constant is not None and c.constant.rejected is not None]
    if not judged:
        return None
    errors = [c.rmse for c in judged]
    rejected = sum(bool(c.rejected) for c in judged)
    span = form.span(min(errors), max(errors))
    return f"constant β: rejected for {rejected} of {len(judged)} curves (RMSE {span} tokens)"


def _surface_lines(name: str, found: SurfaceFit) -> Iterator[str]:
    if found.best is None:
        yield f"{name}: {found.reason}"
        return
    errors = ", ".join(f"{s.form} {form.percent(s.held_out_median)}" for s in found.tried)
    yield f"{name}: {found.best.form}, {found.points} passes; median held-out error: {errors}"
    yield "  " + "; ".join(_coefficients(found.best))


def _coefficients(surface: Surface) -> Iterator[str]:
    for c in surface.coefficients:
        if c.value is None or c.low is None or c.high is None:
            yield f"{c.name} {form.MISSING}"
        else:
            per = c.unit.removeprefix("s")
            yield f"{c.name} {c.value * 1e3:.3g} ({c.low * 1e3:.3g} to {c.high * 1e3:.3g}) ms{per}"


def _interval(found: Measured | None) -> str:
    if found is None:
        return form.MISSING
    if found.low is None or found.high is None:
        return form.number(found.value)
    return f"{found.value:.2f} ({found.low:.2f}–{found.high:.2f})"
