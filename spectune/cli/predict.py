"""`spectune predict`: what another K, batch or GPU would give, as an estimate."""

from __future__ import annotations

from typing import Annotated

import typer

from spectune.cli.arguments import RunArgument
from spectune.cli.completion import drafters
from spectune.errors import UsageError


def predict(
    run: RunArgument = None,
    k: Annotated[str, typer.Option("--k", help="Numbers of drafted tokens, as 1-12 or 2,4,8.")] = "1-12",
    batch: Annotated[str, typer.Option(help="Batch sizes, as 1-256 or 1,8,64.")] = "1,2,4,8,16,32,64,128,256",
    gpu: Annotated[
        str | None,
        typer.Option(help="A GPU of the device table, as h100, a100-80gb, l4; where the run was measured if left out."),
    ] = None,
    draft: Annotated[
        list[str] | None, typer.Option("--draft", help="Only this drafter; repeatable.", autocompletion=drafters)
    ] = None,
    context: Annotated[
        float | None, typer.Option(min=1, help="Cached tokens per row; each suite's own mean if left out.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="A table for every drafter, not only the best one at each batch.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Estimate the speedup at other K and batch sizes, here or on another GPU, from a finished run.

    Acceptance travels with the models and the text. Latency is taken from the run's own fitted
    surfaces, or with --gpu from published peaks and ranges of efficiency. All of it is labelled as an
    estimate, with a 95 % interval; `spectune sweep` there measures it.

    Example: spectune predict runs/demo --k 1-12 --batch 1-256 --gpu h100
    """
    from spectune.reporting.prediction import prediction_document, print_prediction
    from spectune.reporting.summary import as_json as to_json
    from spectune.speedup.devices import device
    from spectune.speedup.profile import profiles
    from spectune.speedup.run import find_run, load_run
    from spectune.speedup.what_if import what_if
    from spectune.sweeping.counts import parse_counts

    ks, batches = parse_counts(k, "--k"), parse_counts(batch, "--batch")
    there = None if gpu is None else device(gpu)
    loaded = load_run(find_run(run))
    measured = profiles(loaded)
    names = dict.fromkeys(p.spec.drafter for p in measured)
    if unknown := [name for name in draft or () if name not in names]:
        raise UsageError(f"--draft: no drafter {unknown[0]!r} in this run", f"it has {', '.join(names)}")
    found = what_if(loaded, measured, ks, batches, gpu=there, context=context, drafters=draft or None)
    if as_json:
        print(to_json(prediction_document(loaded.info.name, found)))
        return
    from rich.console import Console

    print_prediction(found, Console(highlight=False, markup=False, emoji=False), everything=everything)
