"""`spectune export`: every cell as a row of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spectune.cli.arguments import RunArgument


def export(
    run: RunArgument = None,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The table: NAME.csv, NAME.parquet or NAME.json.")],
) -> None:
    """Write one row per cell with all its metrics. A metric without a value is empty, or null.

    The columns are explained in reports/README.md.

    Example: spectune export runs/demo -o demo.parquet
    """
    from spectune.reporting.store import write
    from spectune.reporting.summary import summarise
    from spectune.reporting.table import export as to_table
    from spectune.speedup.run import find_run

    summary = summarise(find_run(run))
    write(output, to_table(summary, output))
    print(output)
