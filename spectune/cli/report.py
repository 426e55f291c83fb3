"""`spectune report`: the HTML page of a run, or of several against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from spectune.cli import completion


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run directory; the newest below ./runs if left out. Others are compared with the first.",
            autocompletion=completion.runs,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; report.html in the first run if left out.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Also write each figure of the first run there.")
    ] = None,
    file_format: Annotated[
        Literal["svg", "png"], typer.Option("--format", help="Of the files that --figures writes.")
    ] = "svg",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers of the page as JSON and nothing else.")
    ] = False,
) -> None:
    """Write one HTML file that needs nothing else: the answer, figures, every cell and the environment.

    Example: spectune report runs/demo -o demo.html
    """
    from spectune.reporting.document import report_document
    from spectune.reporting.page import render, write_figures
    from spectune.reporting.store import write
    from spectune.reporting.summary import as_json as to_json
    from spectune.reporting.summary import summarise
    from spectune.speedup.run import find_run

    paths = runs or [find_run(None)]
    summary, *others = (summarise(path, allow_empty=True) for path in paths)
    document = report_document(summary, others)
    page = output or paths[0] / "report.html"
    write(page, render(summary, document))
    written = write_figures(summary, document, figures, file_format) if figures else []
    if as_json:
        print(to_json(document))
        return
    for path in (page, *written):
        print(path)
