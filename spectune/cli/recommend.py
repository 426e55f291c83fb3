"""`spectune recommend`: the configuration to use, or that none pays."""

from __future__ import annotations

from typing import Annotated

import typer

from spectune.cli.arguments import RunArgument
from spectune.cli.completion import engines
from spectune.errors import UsageError


def recommend(
    run: RunArgument = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Settings for one engine: vllm, sglang, tensorrt-llm, llama.cpp, transformers.",
            autocompletion=engines,
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(help="Choose batch and configuration by latency (tokens/s of one user), throughput or goodput."),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="For goodput: the most a request may take, as ttft=200ms,tpot=20ms.")
    ] = None,
    mix: Annotated[
        str | None, typer.Option(help="Each suite's share of your tokens, as code=0.5,chat=0.5; all alike if left out.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Also regret, the Pareto set, all advice and warnings, and the settings of all engines."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say which drafter, rule and K to use at each batch, or that speculation does not pay, and why.

    Measured speeds decide, with a 95 % interval. K by batch, where speculation stops paying, advice and the next
    commands follow. With --for only the choice and its settings are printed.
    The answer is also written to recommendation.json in the run. The exit code is 0 for every
    answer, OFF included, and 3 where no cell has finished.

    Example: spectune recommend runs/demo --for vllm
    """
    from spectune.importing.record import is_imported
    from spectune.importing.show import show
    from spectune.recommending.exports.export import ENGINES
    from spectune.recommending.objective import parse_objective
    from spectune.reporting.store import write_beside_run
    from spectune.reporting.summary import as_json as to_json
    from spectune.reporting.summary import recommendation_document, summarise
    from spectune.speedup.run import find_run

    wanted = next((name for name in ENGINES if name == engine), None)
    if engine is not None and wanted is None:
        raise UsageError(f"--for does not know {engine!r}", f"choose from {', '.join(ENGINES)}")
    goal = parse_objective(objective, slo)
    path = find_run(run)
    if is_imported(path):
        asked = {"--for": wanted, "--objective": objective, "--mix": mix}
        show(path, "recommend", as_json=as_json, unserved=next((name for name, value in asked.items() if value), None))
        return
    summary = summarise(path, engine=wanted, mix=mix, goal=goal)
    document = to_json(recommendation_document(summary))
    if wanted is None:  # what one engine was asked for is not the run's whole answer
        write_beside_run(path / "recommendation.json", document + "\n")
    if as_json:
        print(document)
        return
    from spectune.reporting.terminal import print_recommendation, print_settings

    if wanted is None:
        print_recommendation(summary, everything=everything)
    else:
        print_settings(summary)
