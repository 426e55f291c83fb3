"""`spectune sweep`: measure every cell of a grid into a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.completion import drafters, suites

if TYPE_CHECKING:
    from spectune.sweeping.sweep import SweepOutcome

_MODELS = "Models"
_GRID = "Grid"
_PROMPTS = "Prompts"
_DECODING = "Decoding"
_RUN = "Run"


def _option(*names: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def sweep(
    context: typer.Context,
    target: Annotated[
        str | None,
        _option(
            "--target",
            help="Model folder or hub id (default: smollm2, the demo model); shape:NAME has random weights of a "
            "public shape, grown:DRAFT:LAYERS:EPSILON is a draft with further layers.",
            panel=_MODELS,
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        _option(
            "--draft",
            help="ngram, early-exit:LAYERS, layer-skip:FIRST-LAST, a model folder, a hub id or shape:NAME; "
            "repeat to compare (default: ngram).",
            panel=_MODELS,
            autocompletion=drafters,
        ),
    ] = None,
    grown_pair: Annotated[
        str | None,
        _option(
            "--grown-pair",
            help="LAYERS:EPSILON: the target is the first --draft with so many further layers, whose output is scaled "
            "by EPSILON (0: every draft is accepted).",
            panel=_MODELS,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        _option("--dtype", help="auto, float32, bfloat16 or float16 (default: auto).", panel=_MODELS),
    ] = None,
    device: Annotated[
        str | None, _option("--device", help="auto, cpu, cuda or cuda:N (default: auto).", panel=_MODELS)
    ] = None,
    draft_device: Annotated[
        str | None,
        _option("--draft-device", help="Device of the drafts (default: the target's).", panel=_MODELS),
    ] = None,
    revision: Annotated[
        str | None,
        _option("--revision", help="Branch, tag or commit of the target on the hub.", panel=_MODELS),
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        _option(
            "--trust-remote-code/--no-trust-remote-code",
            help="Run code that a model brings along.",
            panel=_MODELS,
        ),
    ] = None,
    graphs: Annotated[
        bool | None,
        _option(
            "--graphs/--no-graphs",
            help="Run each round from a recording, a CUDA graph (default: on CUDA).",
            panel=_MODELS,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        _option("--threads", help="CPU threads of torch (default: torch's own choice).", panel=_MODELS),
    ] = None,
    k: Annotated[
        str | None,
        _option(
            "--k",
            help="Draft lengths, as 1,2,4 or 1-8 (default: 2,4,8); 0 is the speculative loop with its drafter at rest.",
            panel=_GRID,
        ),
    ] = None,
    batch: Annotated[
        str | None, _option("--batch", help="Batch sizes, as 1,4 or 1-4 (default: 1).", panel=_GRID)
    ] = None,
    plan: Annotated[
        str | None,
        _option(
            "--plan",
            help="fast measures the cells that decide and predicts the rest, full measures all (default: fast).",
            panel=_GRID,
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        _option(
            "--suite",
            help="Name of a suite or path of a prompt file; may be repeated (default: code, math, creative).",
            panel=_GRID,
            autocompletion=suites,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        _option(
            "--repeats",
            help="Pairs of a plain and a speculative pass per cell, A B B A (default: 1).",
            panel=_GRID,
        ),
    ] = None,
    prompts: Annotated[
        int | None, _option("--prompts", help="Only the first N prompts of each suite.", panel=_PROMPTS)
    ] = None,
    sample_seed: Annotated[
        int | None,
        _option("--sample-seed", help="With --prompts: N random prompts, drawn with this seed.", panel=_PROMPTS),
    ] = None,
    precision: Annotated[
        str | None,
        _option(
            "--precision",
            help="Measure prompts, in a random order, until each acceptance length is known to this share, as 2%.",
            panel=_PROMPTS,
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        _option("--category", help="Only prompts of this category; may be repeated.", panel=_PROMPTS),
    ] = None,
    column: Annotated[
        str | None, _option("--column", help="The field of a file that holds the prompt.", panel=_PROMPTS)
    ] = None,
    chat: Annotated[
        bool | None,
        _option(
            "--chat/--no-chat",
            help="Chat template for every prompt, or for none (default: for chat messages, where the model has one).",
            panel=_PROMPTS,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        _option(
            "--max-new-tokens",
            help="Longest output; a prompt may ask for less (default: 128).",
            panel=_DECODING,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        _option("--ignore-eos/--no-ignore-eos", help="Decode on behind a stop token.", panel=_DECODING),
    ] = None,
    temperature: Annotated[
        float | None, _option("--temperature", help="0 is greedy (default: 0).", panel=_DECODING)
    ] = None,
    top_k: Annotated[int | None, _option("--top-k", help="0 is off (default: 0).", panel=_DECODING)] = None,
    top_p: Annotated[float | None, _option("--top-p", help="1 is off (default: 1).", panel=_DECODING)] = None,
    min_p: Annotated[float | None, _option("--min-p", help="0 is off (default: 0).", panel=_DECODING)] = None,
    repetition_penalty: Annotated[
        float | None, _option("--repetition-penalty", help="1 is off (default: 1).", panel=_DECODING)
    ] = None,
    model_sampling: Annotated[
        bool | None,
        _option(
            "--model-sampling/--no-model-sampling",
            help="Take the sampling settings not given here from the model's generation config.",
            panel=_DECODING,
        ),
    ] = None,
    rule: Annotated[
        str | None,
        _option(
            "--rule",
            help="greedy, speculative, block or match (default: greedy at temperature 0, else speculative).",
            panel=_DECODING,
        ),
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        _option(
            "--synthetic-acceptance",
            help="Force acceptance while all work stays real: a length at the largest K, the target's token counted "
            "(3.2), conditional rates by position (0.8,0.7), or a JSON or CSV file.",
            panel=_DECODING,
        ),
    ] = None,
    seed: Annotated[int | None, _option("--seed", help="Seed of the sampling (default: 0).", panel=_DECODING)] = None,
    peak_bandwidth: Annotated[
        float | None,
        _option("--peak-bandwidth", help="Peak memory bandwidth in GB/s (default: measured).", panel=_RUN),
    ] = None,
    memory_fraction: Annotated[
        float | None,
        _option(
            "--memory-fraction",
            help="Skip cells that are predicted to need more of the device's memory (default: 0.9).",
            panel=_RUN,
        ),
    ] = None,
    output: Annotated[
        str | None,
        _option("--output", "-o", help="Folder of the run (default: runs/TIME-TARGET).", panel=_RUN),
    ] = None,
    resume: Annotated[
        bool | None,
        _option(
            "--resume/--no-resume",
            help="Go on with the run in --output: skip finished cells, try failed ones again, add new ones.",
            panel=_RUN,
        ),
    ] = None,
    allow_env_mismatch: Annotated[
        bool | None,
        _option(
            "--allow-env-mismatch/--no-allow-env-mismatch",
            help="Resume on another machine or with other versions.",
            panel=_RUN,
        ),
    ] = None,
    dry_run: Annotated[
        bool | None,
        _option("--dry-run/--no-dry-run", help="Show the plan, its time and memory; measure nothing.", panel=_RUN),
    ] = None,
    config: Annotated[
        Path | None,
        _option("--config", help="TOML file with these options in a table \\[sweep].", panel=_RUN),
    ] = None,
    quiet: Annotated[bool | None, _option("--quiet/--no-quiet", help="No progress.", panel=_RUN)] = None,
    as_json: Annotated[
        bool | None, _option("--json/--no-json", help="Print JSON and nothing else on stdout.", panel=_RUN)
    ] = None,
) -> None:
    """Measure plain and speculative decoding over a grid of drafts, K, batch sizes and suites.

    Several processes may fill one run: start the same command with --resume.

    Example: spectune sweep --draft ngram --draft early-exit:8 --k 1-8 --batch 1,4 -o runs/first
    """
    from spectune.sweeping.config import settings
    from spectune.sweeping.progress import make_listener
    from spectune.sweeping.session import run

    given = {name: value for name, value in context.params.items() if name not in ("config", "as_json")}
    wanted = settings({**given, "json": as_json}, config)
    outcome = run(
        wanted.options,
        output=wanted.output,
        resume=wanted.resume,
        dry_run=wanted.dry_run,
        allow_env_mismatch=wanted.allow_env_mismatch,
        listener=make_listener(quiet=wanted.quiet),
    )
    _print(outcome, as_json=wanted.json)
    raise typer.Exit(outcome.exit_code)


def _print(outcome: SweepOutcome, *, as_json: bool) -> None:
    from spectune.sweeping.summary import as_json as summary
    from spectune.sweeping.summary import as_table, as_text, closing

    if as_json:
        print(json.dumps(summary(outcome), ensure_ascii=False, indent=2, allow_nan=False))
    elif outcome.estimate is not None:
        print(as_text(outcome))
    else:
        from rich.console import Console

        Console().print(as_table(outcome))
        print(closing(outcome))
