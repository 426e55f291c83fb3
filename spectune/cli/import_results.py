"""`spectune import`: results of other tools, in spectune's words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spectune.errors import UsageError


def import_results(
    files: Annotated[list[Path], typer.Argument(help="Result files, or the folder of a vLLM sweep.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder, for `recommend` and `fit`.")],
    format: Annotated[
        str | None,
        typer.Option("--format", help="vllm-bench, aiperf, specdec-bench, llama.cpp or csv; else by its keys."),
    ] = None,
    bonus: Annotated[
        str | None,
        typer.Option(help="Whether acceptance lengths count the target's own token: included or excluded."),
    ] = None,
    rates: Annotated[str | None, typer.Option(help="What rates by position are: joint or conditional.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=0, help="K of files that do not say it; 0: plain.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Requests at once, in files that do not say it.")] = None,
    draft: Annotated[str | None, typer.Option(help="The drafter, in files that do not say it.")] = None,
    suite: Annotated[str | None, typer.Option(help="The workload, in files that do not say it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Convert results of vLLM's bench and sweeps, AIPerf, specdec_bench, llama-server or a CSV table.

    Definitions are converted and checked against the counts in the file; one that a file leaves open is asked
    for. What a file does not say stays n/a.

    Example: spectune import results/summary.csv plain.json --k 0 -o runs/server
    """
    from spectune.importing.definitions import Answers
    from spectune.importing.record import IMPORT_FILE
    from spectune.importing.registry import FORMATS, import_points
    from spectune.importing.store import choose, imported
    from spectune.reporting.store import write

    answers = Answers(
        bonus=choose("--bonus", bonus, ("included", "excluded")),
        rates=choose("--rates", rates, ("joint", "conditional")),
        k=k,
        batch=batch,
        drafter=draft,
        suite=suite,
    )
    points = import_points(files, answers, format=choose("--format", format, FORMATS))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists", "name a new folder with -o")
    output.mkdir(parents=True, exist_ok=True)
    document = imported(points).model_dump_json(indent=2)
    write(output / IMPORT_FILE, document + "\n")
    if as_json:
        print(document)
        return
    from spectune.importing.terminal import print_points

    print_points(points)
