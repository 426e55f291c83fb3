"""The answers on a terminal: text and tables of at most 80 columns, plain where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectune.reporting import format as form
from spectune.reporting.answer import COLOURS, next_commands, place_table, warning_line, warnings_by_name
from spectune.reporting.fit_tables import (
    constant_line,
    curve_table,
    latency_lines,
    overlap_table,
    planned_table,
    position_table,
    prediction_table,
    sample_table,
    waterfall_table,
)
from spectune.reporting.grid import cell, grid
from spectune.reporting.summary import Summary, quality_line, verdict_line
from spectune.reporting.tuning import (
    advice_lines,
    crossover_lines,
    objective_lines,
    pareto_table,
    ranking_table,
    regret_table,
    schedule_table,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from spectune.recommending.choice import Advice
    from spectune.recommending.exports.export import Export, Variant

_ADVICE = 3  # pieces of advice of the short answer


def print_recommendation(summary: Summary, console: Console | None = None, *, everything: bool = False) -> None:
    """The overall answer with its reasons, the answers of every suite and batch, K by batch, and what to run next.

    With `everything` also the answers by batch and by suite, regret, Pareto set, all advice, warnings and settings.
    """
    console = console or _console()
    found = summary.recommendation
    _print_head(summary, console)
    if summary.goal is not None:
        _print_objective(summary, console)
    _line(console, f"{verdict_line(found.overall)}  [{found.overall.verdict}]", "bold")
    for reason in found.overall.why:
        _line(console, f"  {reason}")
    stamp = summary.choice_stamp
    if stamp is not None:
        _line(console, f"  Losslessness: {stamp.line}", "bold red" if stamp.verdict == "FAIL" else "")
    if len(found.by_place) > 1:
        console.print(place_table(summary, ascii_only=console.options.ascii_only))
    if everything and len(found.by_batch) > 1:
        console.print(_advice_table("by batch", found.by_batch, ("batch",)))
    if everything and len(found.by_suite) > 1 and len(found.by_place) > len(found.by_suite):
        console.print(_advice_table("by suite", found.by_suite, ("suite",)))
    _print_tuning(summary, console, everything=everything)
    _print_wrong(summary, console)
    _print_failed(summary, console)
    if everything:
        _print_warnings(summary, console)
        _print_settings(summary, console)
    else:
        if (warnings := warning_line(summary)) is not None:
            _line(console, warnings, "yellow")
        _print_next(summary, console)


def print_settings(summary: Summary, console: Console | None = None) -> None:
    """The choice in one line and its settings: the answer to `--for`. What would make it wrong is said here too."""
    console = console or _console()
    _print_head(summary, console)
    if summary.goal is not None:
        for line in objective_lines(summary.tuning):
            _line(console, line)
    else:
        overall = summary.recommendation.overall
        _line(console, f"{verdict_line(overall)}  [{overall.verdict}]", "bold")
    if (beyond := summary.beyond) is not None and beyond.speedup is not None:
        faster = form.speedup(beyond.speedup.value, beyond.speedup.low, beyond.speedup.high)
        lacking = f"{beyond.choice}, {faster}, which {summary.exports[0].version} lacks"
        _line(console, f"  The best of what it has. Over all it would be {lacking}.", "yellow")
    _print_wrong(summary, console)
    _print_settings(summary, console)


def _print_settings(summary: Summary, console: Console) -> None:
    if summary.exports:
        _line(console, "settings", "bold")
    for export in summary.exports:
        _print_export(export, console, whole=len(summary.exports) == 1)
    for batch, own in summary.batch_exports.items():
        # One engine was asked for; for all of them this would be pages.
        if len(own) == 1:
            _line(console, f"settings for batch {batch}", "bold")
            _print_export(own[0], console, whole=summary.recommendation.overall.choice is None)


def print_fit(
    summary: Summary, console: Console | None = None, *, precision: float | None = None, everything: bool = False
) -> None:
    """Acceptance and latency, the K that they predict, and how near the models are to the measurement.

    With `precision` also the prompts that it takes; with `everything` each position and each cell.
    """
    console = console or _console()
    _print_head(summary, console)
    console.print(curve_table(summary))
    if (constant := constant_line(summary)) is not None:
        _line(console, constant)
    if everything and summary.positions:
        console.print(position_table(summary))
    if precision is not None:
        console.print(sample_table(summary, precision))
    if everything and (overlaps := overlap_table(summary)) is not None:
        console.print(overlaps)
    _line(console, "latency of one forward")
    for line in latency_lines(summary):
        _line(console, f"  {line}")
    if everything:
        console.print(prediction_table(summary))
        if any(q.waterfall.steps for q in summary.fit.predictions):
            console.print(waterfall_table(summary))
    if any(p.optimum for p in summary.planned):
        console.print(planned_table(summary))
    for name in ("card", "iid", "full"):
        _line(console, quality_line(name, getattr(summary.fit, name)))
    _line(console, quality_line("full, cell held out", summary.fit.held_out))
    better = summary.fit.better
    _line(
        console,
        f"nearer to the measurement: {better or form.MISSING}; recommendations follow the measurement",
    )
    if not everything:
        _line(console, "--all: acceptance by position, and each cell against the models and its losses")
    _print_failed(summary, console)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def _print_head(summary: Summary, console: Console) -> None:
    run = summary.run
    failed = f", {len(run.failed)} failed" if run.failed else ""
    cells = f"{len(run.cells)} of {len(run.info.plan)} cells finished{failed}"
    of = f" (fast plan of {run.fast.grid_cells})" if run.fast else ""
    _line(console, f"{run.info.name}: {run.info.target.name}, {cells}{of}", "dim")
    for caveat in summary.caveats:
        _line(console, caveat, "bold yellow")


def _advice_table(title: str, advices: Sequence[Advice], scope: Sequence[str]) -> Table:
    from rich.text import Text

    table = grid(title, (*scope, "use", "speedup (95 %)", "verdict"), left=("suite", "use", "verdict"))
    for a in advices:
        use = "OFF" if a.choice is None else str(a.choice)
        sped = a.speedup
        table.add_row(
            *(cell(str(getattr(a, name))) for name in scope),
            cell(use),
            cell(form.speedup(sped.value, sped.low, sped.high) if sped else form.MISSING),
            Text(a.verdict, style=COLOURS[a.verdict]),
        )
    return table


def _line(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(form.visible(text), style=style), soft_wrap=True)


def _paragraph(console: Console, text: str) -> None:
    """Prose, indented and wrapped at words. Commands stay on one line (`_line`), to be copied."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(form.visible(text)), (0, 0, 0, 2), expand=False))


def _print_objective(summary: Summary, console: Console) -> None:
    title, *lines = objective_lines(summary.tuning)
    _line(console, title, "bold")
    for line in lines:
        _line(console, line)
    if summary.tuning.answers[0].ranking:
        console.print(ranking_table(summary.tuning.answers[0]))


def _print_tuning(summary: Summary, console: Console, *, everything: bool) -> None:
    """The schedule where several batches were measured, with `everything` regret and Pareto set too; advice."""
    tuning, best = summary.tuning, summary.tuning.best_schedule
    if best is not None and len(best.rows) > 1:
        console.print(schedule_table(best))
        for line in crossover_lines(tuning, best):
            _line(console, f"  {line}")
        if everything:
            console.print(regret_table(tuning))
            console.print(pareto_table(tuning.answers[0]))
    lines = list(advice_lines(tuning))
    shown = lines if everything else lines[:_ADVICE]
    if shown:
        _line(console, "advice" + (f", {len(shown)} of {len(lines)}" if len(shown) < len(lines) else ""), "bold")
    for line in shown:
        _paragraph(console, line)


def _print_next(summary: Summary, console: Console) -> None:
    _line(console, "next", "bold")
    for command, purpose in next_commands(summary):
        _line(console, f"  {command}    # {purpose}")


def _print_wrong(summary: Summary, console: Console) -> None:
    for e in summary.recommendation.excluded:
        place = f"{e.spec.suite}, batch {e.spec.batch}, {e.spec.drafter}, K {e.spec.k}"
        _line(console, f"WRONG RESULT: {place} is left out: {e.reason}", "bold red")


def _print_warnings(summary: Summary, console: Console) -> None:
    """The same warning with other numbers is shown once; the page and `--json` have them all."""
    for notes in warnings_by_name(summary).values():
        cells = f"{len(notes)} of {len(summary.profiles)} cells"
        name, _, text = notes[0].partition(": ")
        example = text if len(set(notes)) == 1 else f"for instance, {text}"
        _line(console, f"warning in {cells}: {name}: {example}", "yellow")


def _print_failed(summary: Summary, console: Console) -> None:
    for f in summary.run.failed:
        spec = f.spec
        place = f"{spec.suite}, batch {spec.batch}, {spec.drafter}, K {spec.k}"
        _line(console, f"failed: {place}: {f.reason}: {f.message}", "red")


def _print_export(export: Export, console: Console, *, whole: bool) -> None:
    """`whole`: with the other forms of the settings, which for every engine would be pages."""
    _line(console, f"  {export.version}", "cyan")
    _print_text(export.text, export.notes, console)
    for warning in export.warnings if whole and export.text else ():
        _line(console, f"    # known fault: {warning}", "yellow")
    if whole:
        _print_variant("K by batch, to try second", export.schedule, console)
        _print_variant(
            "forced acceptance, as measured in the rounds that had a draft, to time the server",
            export.synthetic,
            console,
        )


def _print_variant(title: str, variant: Variant | None, console: Console) -> None:
    if variant is not None:
        _line(console, f"  {title}", "cyan")
        _print_text(variant.text, variant.notes, console)


def _print_text(text: str | None, notes: Sequence[str], console: Console) -> None:
    for line in (text or "").splitlines():
        _line(console, f"    {line}")
    for note in notes:
        _line(console, f"    # {note}", "dim")
