"""`spectune report`: the HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spectune.cli.arguments import RunArgument


def report(
    run: RunArgument = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; report.html in the run if left out.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers of the page as JSON and nothing else.")
    ] = False,
) -> None:
    """Write one HTML file that needs nothing else: the answer, every cell, figures and the environment.

    Example: spectune report runs/demo -o demo.html
    """
    from spectune.reporting.page import render
    from spectune.reporting.store import write
    from spectune.reporting.summary import as_json as to_json
    from spectune.reporting.summary import report_document, summarise
    from spectune.speedup.run import find_run

    path = find_run(run)
    summary = summarise(path, allow_empty=True)
    page = output or path / "report.html"
    write(page, render(summary))
    print(to_json(report_document(summary)) if as_json else page)
