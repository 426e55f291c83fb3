"""`spectune verify`: a losslessness audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spectune.cli.completion import drafters, suites

if TYPE_CHECKING:
    from spectune.verifying.audit import Outcome


def verify(
    target: Annotated[str, typer.Option(help="Model folder, hub id, or smollm2 (the demo model).")] = "smollm2",
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter, as `sweep --draft` takes it; may be repeated (default: ngram).", autocompletion=drafters
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a suite or path of a prompt file; may be repeated (default: code).", autocompletion=suites
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "--prompts", help="Only the first N prompts of each suite.")] = 10,
    k: Annotated[str, typer.Option("--k", help="Draft lengths, as 1,2,4 or 1-8.")] = "4",
    batch: Annotated[str, typer.Option(help="Batch sizes, as 1,4 or 1-4.")] = "1,4",
    rule: Annotated[
        str | None,
        typer.Option(
            help="How sampled drafts are accepted, as in `sweep` (default: greedy at temperature 0, else speculative)."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (default: 0).")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="0 is off.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    model_sampling: Annotated[
        bool,
        typer.Option(
            "--model-sampling", help="Sampling settings not given here come from the model's generation config."
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest output.")] = 32,
    samples: Annotated[
        int | None, typer.Option(help="Tokens of each distribution test, at temperatures above 0 (default: 3000).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampled tokens.")] = 0,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Chat template for every prompt, or for none.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Decode on behind a stop token.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    draft_device: Annotated[str | None, typer.Option(help="Device of the drafts (default: the target's).")] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision of the target.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    graphs: Annotated[
        bool | None, typer.Option("--graphs/--no-graphs", help="Run each round from a CUDA graph (default: on CUDA).")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch (default: torch's own choice).")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Keep the results in this run, for `report` and `recommend`."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what this version has already audited in that run.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")] = False,
) -> None:
    """Check that speculative decoding gives what plain decoding gives.

    Greedy: the same tokens, but for near-ties that rounding decides. Sampled: the same tokens with rule match and
    the same seeds, and for the rule in question a test of all emitted tokens against the target's exact
    probabilities, with the bias that it would have found. Exit codes: 0 lossless, 1 not (or lossy by design),
    2 wrong use, 3 cannot judge, 4 failed.

    Example: spectune verify --draft ngram --draft early-exit:20 --temperature 0.8 -o runs/demo
    """
    from spectune.sweeping.counts import parse_counts
    from spectune.sweeping.options import SweepOptions
    from spectune.verifying.audit import SAMPLES, audit
    from spectune.verifying.progress import make_progress

    options = SweepOptions(
        target=target,
        drafts=tuple(draft or ("ngram",)),
        suites=tuple(suite or ("code",)),
        ks=parse_counts(k, "--k"),
        batches=parse_counts(batch, "--batch"),
        prompts=limit,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        model_sampling=model_sampling,
        rule=rule,
        seed=seed,
        ignore_eos=ignore_eos,
        chat=chat,
        dtype=dtype,
        device=device,
        draft_device=draft_device,
        revision=revision,
        trust_remote_code=trust_remote_code,
        graphs=graphs,
        threads=threads,
    )
    outcome = audit(
        options,
        samples=SAMPLES if samples is None else samples,
        output=output,
        resume=resume,
        progress=make_progress(quiet=quiet),
    )
    _print(outcome, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


def _print(outcome: Outcome, *, as_json: bool) -> None:
    from spectune.verifying.table import as_json as document
    from spectune.verifying.table import as_table, closing

    if as_json:
        print(json.dumps(document(outcome), ensure_ascii=False, indent=2, allow_nan=False))
        return
    from rich.console import Console

    Console(highlight=False).print(as_table(outcome))
    for line in closing(outcome):
        print(line)
