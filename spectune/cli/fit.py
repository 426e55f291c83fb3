"""`spectune fit`: acceptance curves and speedup models, each against the measurement."""

from __future__ import annotations

from typing import Annotated

import typer

from spectune.cli.arguments import RunArgument


def fit(
    run: RunArgument = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Say how many prompts make each acceptance length this precise, for instance 2%."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also acceptance by position, and each cell against the models.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Fit acceptance curves, predict every cell with three speedup models, and say how wrong they are.

    Printed are the curves, the latency, the K that both predict, and each model's error; with --all every cell.
    The fit is also written to fit.json in the run.

    Example: spectune fit runs/demo
    """
    from spectune.importing.record import is_imported
    from spectune.importing.show import show
    from spectune.reporting.store import write_beside_run
    from spectune.reporting.summary import as_json as to_json
    from spectune.reporting.summary import fit_document, summarise
    from spectune.speedup.precision import parse_precision
    from spectune.speedup.run import find_run

    wanted = None if precision is None else parse_precision(precision)
    path = find_run(run)
    if is_imported(path):
        show(path, "fit", as_json=as_json, unserved="--precision" if wanted else None)
        return
    summary = summarise(path)
    document = to_json(fit_document(summary, precision=wanted))
    write_beside_run(path / "fit.json", document + "\n")
    if as_json:
        print(document)
        return
    from spectune.reporting.terminal import print_fit

    print_fit(summary, precision=wanted, everything=everything)
