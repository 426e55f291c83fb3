"""`spectune baseline`: a run as a small file to commit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from spectune.errors import CannotJudge, SpectuneError


def baseline(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to commit.")],
    exact_only: Annotated[
        bool, typer.Option("--exact-only", help="Leave the times out: counts and outputs alone, a smaller file.")
    ] = False,
) -> None:
    """Write what `spectune gate` compares with: outputs and counts of every cell, its times, settings and machine.

    A run with failed or missing cells is refused, since a gate would then miss them.

    Example: spectune baseline runs/main -o baseline.json
    """
    from spectune.gating.baseline import baseline_text
    from spectune.gating.snapshot import read_snapshot
    from spectune.reporting.store import write

    found = read_snapshot(run, exact_only=exact_only)
    if failed := [f for f in found.failures if f.reason != "infeasible"]:
        raise SpectuneError(f"{len(failed)} cells of {run} failed", "sweep again with --resume")
    if not found.cells or found.unfinished:
        raise CannotJudge(
            f"{len(found.cells)} cells of {run} are finished, {len(found.unfinished)} are not",
            "sweep to the end with --resume",
        )
    write(output, baseline_text(found))
    repeats = min(len(c.times.plain) if c.times else 0 for c in found.cells)
    print(f"{output}: {len(found.cells)} cells" + ("" if exact_only else f", {repeats} repeats"))
    if not exact_only and repeats < 2:
        print(
            "spectune: warning: one repeat has no scatter, so times cannot be gated; sweep with --repeats 8, "
            "or use --exact-only",
            file=sys.stderr,
        )
