"""The HTML page: one file with its style, script and figures inside, and nothing to load."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spectune.errors import SpectuneError
from spectune.reporting import drawing, tables
from spectune.reporting import format as form
from spectune.reporting.chart import Figure
from spectune.reporting.document import report_document
from spectune.reporting.figures import figures
from spectune.reporting.store import write
from spectune.reporting.summary import FORMULAS, Summary, cell_counts, quality_line, verdict_line
from spectune.reporting.tuning import advice_lines, crossover_lines

if TYPE_CHECKING:
    from jinja2 import Environment

# The markers of `drawing.MARKERS` in a box of 12 by 12, for legends.
_SHAPES = (
    "M10 6a4 4 0 1 1-8 0a4 4 0 1 1 8 0z",
    "M2.5 2.5h7v7h-7z",
    "M6 1l5 5-5 5-5-5z",
    "M6 2l4.5 8h-9z",
    "M6 10l4.5-8h-9z",
    "M4.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "M6 1l1.3 3.4 3.7.2-2.9 2.3 1 3.6L6 8.5l-3.1 2 1-3.6L1 4.6l3.7-.2z",
    "M3 1l3 3 3-3 2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3-3-3z",
)
TOKENS = {
    "draft": "accepted draft",
    "correction": "correction",
    "bonus": "bonus",
    "prefill": "first token, from the prefill",
    "plain": "round without a draft",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure with its panels as SVG."""

    figure: Figure
    panels: tuple[Any, ...]  # Markup


def render(summary: Summary, document: dict[str, Any] | None = None) -> str:
    """The page of a run and its `report_document`. Every text from a run is escaped; a run without a finished cell has
    a page too."""
    document = report_document(summary) if document is None else document
    drawn, note = _drawn(summary, document["drafts"])
    return _page(summary, document, drawn, note)


def write_figures(
    summary: Summary, document: dict[str, Any], folder: Path, kind: Literal["svg", "png"]
) -> tuple[Path, ...]:
    """Each figure as a file named after it. Raises SpectuneError where they cannot be drawn or written."""
    if (why := drawing.unavailable()) is not None:
        raise SpectuneError(why, "install matplotlib, or leave --figures out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpectuneError(f"cannot make the folder {folder}: {error.strerror}", "name another one") from error
    found = figures(summary, document["drafts"])
    paths = tuple(folder / f"{f.name}.{kind}" for f in found)
    for figure, path in zip(found, paths, strict=True):
        write(path, drawing.export(figure, kind))
    return paths


def _drawn(summary: Summary, drafts: Sequence[dict[str, Any]]) -> tuple[dict[str, Drawn], str | None]:
    from markupsafe import Markup

    note = drawing.unavailable()
    if note:
        return {}, note
    found = figures(summary, drafts)
    # matplotlib has escaped the names inside its SVG, and drawing.inline those of the titles
    return {
        f.name: Drawn(f, tuple(Markup(drawing.inline(p, f"f{n}{i}")) for i, p in enumerate(f.panels)))
        for n, f in enumerate(found)
    }, None


def _page(summary: Summary, document: dict[str, Any], drawn: dict[str, Drawn], figures_note: str | None) -> str:
    from markupsafe import Markup

    script, style = _file("report.js"), _file("report.css")
    environment = _environment()
    rows = [*document["cells"], *document["failed"]]
    names = {name: list(dict.fromkeys(row[name] for row in rows)) for name in ("suite", "batch", "drafter")}

    def at(row: tables.Row) -> str:
        """Where a row belongs, for the filter: the places of its suite, batch and draft in their lists."""
        found = [str(names[n].index(row[n])) if row.get(n) in names[n] else "" for n in names]
        return ".".join(found) if any(found) else ""

    return environment.get_template("report.html").render(
        info=summary.run.info,
        summary=summary,
        recommendation=summary.recommendation,
        document=document,
        tables=defaultdict(lambda: None, tables.tables(document)),
        missing_readings=tables.missing_readings(document),
        counts=cell_counts(summary),
        warnings=_grouped(document["warnings"]),
        figures=defaultdict(lambda: None, drawn),
        figures_note=figures_note,
        fit=summary.fit if document["cells"] else None,
        crossovers=_crossovers(summary),
        names=names,
        at=at,
        command=shlex.join(summary.run.info.command),
        again=_again(summary),
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _grouped(warnings: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Warnings by the name that each begins with."""
    found: dict[str, list[dict[str, Any]]] = {}
    for w in warnings:
        found.setdefault(w["warning"].partition(":")[0], []).append(w)
    return found


def _crossovers(summary: Summary) -> list[str]:
    best = summary.tuning.best_schedule
    return [] if best is None else [f"{best.drafter}: {line}" for line in crossover_lines(summary.tuning, best)]


def _again(summary: Summary) -> str | None:
    """The sweep of a run that cannot tell, with twice the repeats and the prompts, into a folder of its own."""
    command = [word for word in summary.run.info.command if word != "--resume"]
    if summary.recommendation.overall.verdict != "CAN'T TELL" or command[1:2] != ["sweep"]:
        return None
    for name in {"-o", "--output"}.intersection(command):
        at = command.index(name)
        del command[at : at + 2]
    if "--repeats" not in command:
        command += ["--repeats", "1"]
    for n, name in enumerate(command[:-1]):
        if name in ("--prompts", "--repeats") and command[n + 1].isdecimal():
            command[n + 1] = str(2 * int(command[n + 1]))
    return shlex.join(command)


def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_file),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        fmt=form,
        verdict_line=verdict_line,
        advice_lines=advice_lines,
        quality_line=quality_line,
        cell_text=tables.text,
        left=tables.LEFT,
        formulas=FORMULAS,
        shapes=_SHAPES,
        token_kinds=TOKENS,
    )
    return environment


def _file(name: str) -> str:
    return (files("spectune") / "reports" / name).read_text(encoding="utf-8")
