"""One command for a machine with a GPU: its tests, the figures the decoder shall reach, transformers, a short sweep.

    python -m spectune.engines.gpu_bench --output out

In under 9 minutes (`--seconds`) it writes into the folder

    gpu_bench.json   every figure with its repeats and its aim; written after each section, so a kill loses one at most
    gpu_bench.txt    the table that is also printed
    gpu_tests.txt    what pytest said
    run/             a run directory of a short sweep with synthetic acceptance, and its report.html

It needs this tree on PYTHONPATH, torch, triton and transformers, and no network. What else start-up imports comes
with these: typer (with rich and pydantic), numpy, safetensors and filelock with transformers, jinja2 with torch. What
does not: psutil (environment, sweep), pytest (tests), scipy and matplotlib (the report's models and figures),
nvidia-ml-py (the GPU's readings in the sweep). A section whose module is missing is skipped and says so.

Intervals are min–max over the repeats. An aim is held against the median. On a CPU everything but the tests marked gpu
runs too, on shapes small enough (`--target shape:FILE.json`); its figures then say nothing about a GPU.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console

from spectune.engines.gpu_figures import Outcome, run_section, table
from spectune.engines.gpu_sections import Bench, Settings
from spectune.engines.peers import exit_on_error
from spectune.errors import SpectuneError, UsageError
from spectune.sweeping.atomic import cannot_write, write_atomically
from spectune.sweeping.counts import parse_counts

_FILES = ("gpu_bench.json", "run")


def document(bench: Bench, outcomes: Sequence[Outcome], *, complete: bool) -> dict[str, Any]:
    """Everything measured so far. `complete`: every section has had its turn."""
    settings = asdict(bench.settings)
    del settings["output"]  # where on whose disk is nobody's business
    return {
        "complete": complete,
        "settings": settings,
        "device": str(bench.device),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "environment": bench.environment or None,
        "interval": "min and max over the repeats",
        "sections": [outcome.document() for outcome in outcomes],
    }


def run_all(bench: Bench, seconds: float, console: Console) -> list[Outcome]:
    """Run every section, none beyond the end of `seconds`, and keep what they found on disk."""
    end = time.perf_counter() + seconds
    outcomes: list[Outcome] = []
    sections = bench.sections()
    for section in sections:
        left = end - time.perf_counter()
        console.print(f"{section.name} …", style="dim")
        outcomes.append(run_section(section, min(section.seconds, left)))
        complete = len(outcomes) == len(sections)
        text = json.dumps(document(bench, outcomes, complete=complete), allow_nan=False, indent=1)
        write_atomically(bench.settings.output / "gpu_bench.json", text + "\n")
    return outcomes


def show(outcomes: Sequence[Outcome], facts: str, console: Console) -> None:
    console.print(facts)
    console.print(table(outcomes))
    for outcome in outcomes:
        for note in outcome.notes:
            console.print(f"{outcome.name}: {note}", style="dim")


def main(
    output: Annotated[Path, typer.Option(help="Folder to write into; it must not hold an earlier benchmark.")],
    target: Annotated[str, typer.Option(help="Target: a shape, or a model.")] = "shape:llama-3.1-8b",
    draft: Annotated[str, typer.Option(help="Draft model of the same vocabulary.")] = "shape:llama-3.2-1b",
    grown: Annotated[str, typer.Option(help="LAYERS:EPSILON put on the draft, for assisted generation.")] = "96:0",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    context: Annotated[int, typer.Option(min=2, help="Prompt tokens.")] = 1024,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens per prompt.")] = 64,
    k: Annotated[int, typer.Option(min=1, help="Drafted tokens per round.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each figure.")] = 5,
    batches: Annotated[str, typer.Option(help="Batch sizes; the largest is also that of the accept step.")] = (
        "1,2,4,8,16,32,64"
    ),
    seconds: Annotated[float, typer.Option(min=1, help="End after so long, whatever is left to do.")] = 520,
) -> None:
    """Measure what a GPU is for, and write it down."""
    if tokens < 2 * k + 2:
        raise UsageError(f"{tokens} tokens are too few rounds of K {k}", f"use at least 2 K + 2 = {2 * k + 2}")
    settings = Settings(
        target, draft, grown, device, dtype, context, tokens, k, repeats, parse_counts(batches, "--batches"), output
    )
    bench = Bench(settings)
    if there := [name for name in _FILES if (output / name).exists()]:
        raise UsageError(f"{output} already holds {there[0]}", "choose another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(output, error) from error
    console = Console(highlight=False)
    outcomes = run_all(bench, seconds, console)
    facts = (
        f"{bench.device}, {str(bench.dtype).removeprefix('torch.')}, target {target}, draft {draft}, "
        f"context {context}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    show(outcomes, facts, console)
    kept = Console(file=io.StringIO(), width=160, highlight=False, record=True)
    show(outcomes, facts, kept)
    (output / "gpu_bench.txt").write_text(kept.export_text(), encoding="utf-8")
    if bad := [o.name for o in outcomes if o.status in ("failed", "out of time")]:
        raise SpectuneError(f"{len(bad)} of {len(outcomes)} sections did not finish: {', '.join(bad)}")


if __name__ == "__main__":
    exit_on_error(lambda: typer.run(main))
