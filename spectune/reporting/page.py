"""The HTML page: one file with its style and figures inside, no script and nothing to load."""

from __future__ import annotations

from importlib.resources import files

from spectune.reporting import format as form
from spectune.reporting.figures import draw
from spectune.reporting.row import READINGS
from spectune.reporting.summary import (
    FORMULAS,
    Summary,
    bandwidth_row,
    quality_line,
    recommendation_document,
    verdict_line,
)


def render(summary: Summary) -> str:
    """The page of a run. Every text from the run is escaped; a run without a finished cell has a page too."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files("spectune") / "reports"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(fmt=form, verdict_line=verdict_line, quality_line=quality_line)
    template = environment.from_string((folder / "report.html").read_text(encoding="utf-8"))
    figures, figures_note = draw(summary.profiles)
    return template.render(
        info=summary.run.info,
        summary=summary,
        recommendation=summary.recommendation,
        document=recommendation_document(summary),
        rows=summary.rows,
        failed=summary.failed_rows,
        bandwidth=[bandwidth_row(p) for p in summary.profiles],
        readings=READINGS,
        fit=summary.fit,
        formulas=FORMULAS,
        # matplotlib has escaped the names inside its SVG
        figures=[(f.caption, Markup(f.svg)) for f in figures],
        figures_note=figures_note,
        style=Markup((folder / "report.css").read_text(encoding="utf-8")),
    )
