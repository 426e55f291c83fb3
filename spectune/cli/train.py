"""`spectune train`: make a drafter for a target out of text that the target writes itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from spectune.training.session import Outcome

_TEXT = "Text"
_MODEL = "Models"
_SHAPE = "Drafter"
_RUN = "Run"


def _option(*names: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def train(
    context: typer.Context,
    method: Annotated[
        str, typer.Argument(help="draft, medusa, blockwise, eagle, eagle3, exit or layer-skip.", show_default=False)
    ],
    output: Annotated[str, _option("--output", "-o", help="Folder of the result.", panel=_RUN)],
    target: Annotated[
        str, _option("--target", help="Model folder or hub id (default: smollm2, the demo model).", panel=_MODEL)
    ] = "smollm2",
    dtype: Annotated[
        str, _option("--dtype", help="Of the target: auto, float32, bfloat16 or float16.", panel=_MODEL)
    ] = "auto",
    device: Annotated[
        str, _option("--device", help="auto, cpu, cuda or cuda:N (default: auto).", panel=_MODEL)
    ] = "auto",
    threads: Annotated[
        int | None, _option("--threads", help="CPU threads of torch (default: torch's own choice).", panel=_MODEL)
    ] = None,
    revision: Annotated[
        str | None, _option("--revision", help="Branch, tag or commit of the target on the hub.", panel=_MODEL)
    ] = None,
    trust_remote_code: Annotated[
        bool, _option("--trust-remote-code", help="Run code that the target brings along.", panel=_MODEL)
    ] = False,
    text: Annotated[
        str | None,
        _option(
            "--text",
            help="File of prompts for the target to answer, or of rows with a response (default: our own prompts).",
            panel=_TEXT,
        ),
    ] = None,
    mix: Annotated[
        str | None,
        _option(
            "--mix",
            help="Shares of the suites in our own prompts, such as code=0.8,chat=0.2 (default: mostly code).",
            panel=_TEXT,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        _option(
            "--tokens", help="Tokens of text to train on (default: 60000 on a CPU, a million on a GPU).", panel=_TEXT
        ),
    ] = None,
    start: Annotated[
        str | None,
        _option(
            "--start",
            help="eagle, eagle3: a trained head to go on from, a folder, a hub id or demo (default: a new head).",
            panel=_SHAPE,
        ),
    ] = None,
    layers: Annotated[
        int | None, _option("--layers", help="draft: decoder layers of the draft (default: 4).", panel=_SHAPE)
    ] = None,
    exit_layer: Annotated[
        int | None,
        _option("--exit-layer", help="exit: layers that run before the exit (default: half).", panel=_SHAPE),
    ] = None,
    heads: Annotated[
        int | None,
        _option("--heads", help="medusa, blockwise: tokens predicted behind the next one (default: 4).", panel=_SHAPE),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        _option(
            "--draft-vocab",
            help="Ids the draft may propose, the most frequent ones; 0 for all (default: 8192 of a large vocabulary).",
            panel=_SHAPE,
        ),
    ] = None,
    compact: Annotated[
        bool,
        _option("--compact", help="Small files that only spectune reads: int8, nothing the target has.", panel=_SHAPE),
    ] = False,
    minutes: Annotated[
        float | None,
        _option(
            "--minutes", help="Most time for the training itself (default on a CPU: 30; layer-skip: 10).", panel=_RUN
        ),
    ] = None,
    epochs: Annotated[
        int | None, _option("--epochs", help="Passes over the text (default: 10, or what the time allows).", panel=_RUN)
    ] = None,
    learning_rate: Annotated[
        float | None, _option("--learning-rate", help="Highest learning rate (default: the method's).", panel=_RUN)
    ] = None,
    seed: Annotated[int, _option("--seed", help="Of prompts, sampling and order (default: 0).", panel=_RUN)] = 0,
    resume: Annotated[
        bool, _option("--resume", help="Go on with the interrupted training in --output.", panel=_RUN)
    ] = False,
    quiet: Annotated[bool, _option("--quiet", help="No progress.", panel=_RUN)] = False,
    as_json: Annotated[bool, _option("--json", help="Print JSON and nothing else on stdout.", panel=_RUN)] = False,
) -> None:
    """Train a drafter for a target on text that the target writes itself.

    The text and the target's states are cached (SPECTUNE_CACHE) and shared by all trainings of a target. An
    interrupted training goes on with --resume.

    Example: spectune train eagle3 --target smollm2 --tokens 60000 -o drafts/eagle3
    """
    from spectune.training.options import TrainOptions

    own = ("output", "resume", "quiet", "as_json")
    options = TrainOptions(**{name: value for name, value in context.params.items() if name not in own})

    from spectune.training.progress import make_listener
    from spectune.training.session import train as run

    command = ("spectune", *sys.argv[1:])
    outcome = run(options, Path(output), command=command, resume=resume, listener=make_listener(quiet=quiet))
    if as_json:
        print(json.dumps(outcome.result, ensure_ascii=False, indent=2, allow_nan=False))
    else:
        _print(outcome)


def _print(outcome: Outcome) -> None:
    result = outcome.result
    print(f"{outcome.folder}: {result['options']['method']} for {result['target']['name']}")
    if "skip" in result:
        best = result["best"]
        print(f"  skips              {','.join(result['skip'])}")
        print(f"  fastest of {result['measured']:<8}{best['speedup']:.2f}x plain decoding at K {best['k']}")
        return
    held_out = result["held_out"]
    print(f"  tokens seen        {result['tokens_seen']}")
    print(f"  held out           {_percents(held_out['acceptance'])} accepted at the 1st, 2nd, ... place")
    print(f"  overlap 1 - TV     {_percents(held_out['overlap'])}")
    print(f"  acceptance length  {held_out['acceptance_length']:.2f} (greedy, text teacher-forced)")


def _percents(values: list[float]) -> str:
    return " ".join(f"{100 * value:.1f}" for value in values) + " %"
