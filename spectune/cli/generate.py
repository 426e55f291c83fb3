"""`spectune generate`: decode one prompt and show where each token came from."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.completion import drafters

if TYPE_CHECKING:
    from rich.console import Console

    from spectune.api import Generated

STYLES = {"draft": "green", "correction": "red", "bonus": "cyan", "prefill": "", "plain": ""}
LEGEND = (("draft", "accepted draft"), ("correction", "correction"), ("bonus", "bonus"))


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    target: Annotated[str, typer.Option(help="Model folder, hub id, or smollm2 (the demo model).")] = "smollm2",
    draft: Annotated[
        str,
        typer.Option(
            help="ngram, early-exit:N, layer-skip:A-B, a model folder or hub id, or none.", autocompletion=drafters
        ),
    ] = "ngram",
    k: Annotated[int, typer.Option("--k", min=0, max=4096, help="Tokens drafted per round.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest output.")] = 128,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Chat template (default: if the model has one).")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy (default: 0).")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="0 is off.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    model_sampling: Annotated[
        bool,
        typer.Option(
            "--model-sampling",
            help="Sampling settings not given here come from the model's generation config.",
        ),
    ] = False,
    rule: Annotated[
        str,
        typer.Option(help="How sampled drafts are accepted: speculative, block or match (greedy decoding needs none)."),
    ] = "speculative",
    seed: Annotated[int, typer.Option(help="Seed of the sampled tokens.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Decode on behind a stop token.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    draft_device: Annotated[str | None, typer.Option(help="Device of the draft (default: the target's).")] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision of the target.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    graphs: Annotated[
        bool | None, typer.Option("--graphs/--no-graphs", help="Run each round from a CUDA graph (default: on CUDA).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Decode one prompt; colours show accepted drafts, corrections and bonus tokens.

    Example: spectune generate "def fibonacci(n):" --no-chat --draft ngram --k 6
    """
    from typing import get_args

    from rich.console import Console

    from spectune.api import generate as run
    from spectune.engines.native import NativeEngine
    from spectune.errors import UsageError
    from spectune.sweeping.cell import Rule, Sampling

    if rule not in get_args(Rule):
        raise UsageError(f"no rule {rule!r}", f"the rules are {', '.join(get_args(Rule))}")
    text = prompt
    if prompt == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed", "give the prompt as an argument")
        text = sys.stdin.read()
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UsageError("the prompt is not valid UTF-8")
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    engine = NativeEngine(
        target,
        dtype=dtype,
        device=device,
        draft_device=draft_device,
        revision=revision,
        trust_remote_code=trust_remote_code,
        graphs=graphs,
    )
    base = engine.generation_defaults() if model_sampling else Sampling()
    sampling = _sampling(base.model_dump() | {name: value for name, value in given.items() if value is not None})
    console = Console(highlight=False)
    streams = not as_json

    def show(piece: str, origin: str) -> None:
        console.print(piece, style=STYLES[origin], end="", markup=False, soft_wrap=True)

    result: Generated = run(
        text,
        draft=None if draft == "none" else draft,
        k=k,
        max_new_tokens=max_new_tokens,
        chat=chat,
        sampling=sampling,
        rule=rule,  # type: ignore[arg-type]
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
        engine=engine,
        on_text=show if streams else None,
    )
    if as_json:
        print(json.dumps(_as_json(result), ensure_ascii=False, allow_nan=False))
        return
    console.print()
    _print_counts(console, result)


def _sampling(values: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from spectune.errors import UsageError
    from spectune.sweeping.cell import Sampling

    try:
        return Sampling(**values)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise UsageError(f"{option}: {first['msg']}, not {first['input']}") from error


def _print_counts(console: Console, result: Generated) -> None:
    from rich.text import Text

    length = result.acceptance_length
    line = (
        f"{len(result.token_ids)} tokens in {result.rounds} rounds"
        f", {result.accepted} of {result.drafted} drafted tokens accepted"
        + (f", acceptance length {length:.2f}" if length else "")
        + f", {result.seconds:.2f} s ({len(result.token_ids) / result.seconds:.1f} tokens/s, loading not counted)"
        f", finish: {result.finish_reason}"
    )
    console.print()
    console.print(line, style="dim", markup=False)
    if not console.no_color and console.is_terminal:
        console.print(Text.assemble(*((f"{name}  ", STYLES[origin]) for origin, name in LEGEND)), markup=False)


def _as_json(result: Generated) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "origins": [piece.origin for piece in result.pieces],
        "finish_reason": result.finish_reason,
        "output_tokens": len(result.token_ids),
        "rounds": result.rounds,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "acceptance_length": result.acceptance_length,
        "seconds": result.seconds,
    }
