"""The `spectune` application: registers the commands and turns known errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from spectune import __version__
from spectune.cli import (
    baseline,
    doctor,
    export,
    fit,
    gate,
    generate,
    import_results,
    predict,
    probe,
    recommend,
    report,
    suites,
    sweep,
    train,
    verify,
)
from spectune.cli.output import safe_stdout
from spectune.errors import SpectuneError
from spectune.reporting.format import one_line

app = typer.Typer(
    name="spectune",
    help="Benchmark and tune speculative decoding of large language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"spectune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("sweep")(sweep.sweep)
app.command("recommend")(recommend.recommend)
app.command("report")(report.report)
app.command("fit")(fit.fit)
app.command("predict")(predict.predict)
app.command("baseline")(baseline.baseline)
app.command("gate")(gate.gate)
app.command("verify")(verify.verify)
app.command("export")(export.export)
app.command("import")(import_results.import_results)
app.command("train")(train.train)
app.command("generate")(generate.generate)
app.add_typer(suites.app, name="suites")
app.command("probe")(probe.probe)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command line.

    Exit codes: 0 success, 1 `verify` found a difference or `gate` a regression, 2 wrong use, 3 cannot judge,
    4 failed, 130 interrupted.
    `SPECTUNE_DEBUG=1` shows the traceback of a known error too.
    """
    try:
        with safe_stdout():
            app()
    except SpectuneError as error:
        if os.environ.get("SPECTUNE_DEBUG"):
            raise
        print(f"spectune: error: {one_line(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"  try: {one_line(error.hint)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if os.environ.get("SPECTUNE_DEBUG"):
            raise
        print(f"spectune: error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(4)
