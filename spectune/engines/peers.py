"""spectune's decoder against transformers' `generate`, in one process, on the same prompts.

    python -m spectune.engines.peers --tokens 48 --repeats 3 --k 5

Three comparisons with transformers at batch 1 (plain decoding, a draft model, prompt lookup) and one of the
decoder with itself (batch 8 over batch 1). Both sides are greedy, ignore the end-of-sequence token and so
emit equally many tokens. A repeat runs A B B A and gives one ratio, so that drift favours neither side.

`decode` leaves the prefill out: tokens after the first ones that a request delivers, over the time after
them; a draft model's own prefill is left out too. `with prefill` is all tokens over all time.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.drafter import Drafter
from spectune.decoding.drafters import build_drafter
from spectune.decoding.loading import Loaded, load, pick_device, pick_dtype
from spectune.decoding.ngram import MAX_NGRAM
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.engine import Request
from spectune.engines.spread import Spread
from spectune.errors import SpectuneError, UsageError
from spectune.suites import Prompt, load_suite, render
from spectune.suites.bundled import bundled_names

Progress = Callable[[str], None]

WIDE_BATCH = 8
NOTES = (
    "figures are medians over the repeats; theirs is transformers, in the last line spectune at batch 1",
    "decode: without prefill (tokens after a request's first ones / time after them); all: with prefill",
    "tok/fwd: tokens per target forward of a sequence, the prefill's forward included; transformers verifies "
    "its first draft inside the prefill, which saves it one forward per prompt",
    "same: prompts with equal output on both sides; in bfloat16 rounding may part them",
    "prompt lookup: transformers continues the first match of the longest n-gram, spectune the latest one",
)


@dataclass(frozen=True, slots=True)
class Pass:
    """One walk over the prompts."""

    outputs: tuple[tuple[int, ...], ...]
    seconds: float  # prefill included
    decode_tokens: int
    decode_seconds: float
    forwards: int  # of the target, counted per sequence, prefill included

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison."""

    label: str
    run: Callable[[], Pass]


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of both sides, and their ratio repeat by repeat."""

    ours: Spread
    theirs: Spread
    ratio: Spread

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Rates:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        return cls(Spread.of(ours), Spread.of(theirs), Spread.of(ratios))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two sides did with the same prompts. Token counts are those of one pass."""

    what: str
    ours: str
    theirs: str
    decode: Rates
    with_prefill: Rates
    our_tokens: int
    their_tokens: int
    our_tokens_per_forward: float
    their_tokens_per_forward: float
    prompts: int
    same_outputs: int  # prompts on which both sides emit the same tokens; rounding may part them in bfloat16


class Stopwatch:
    """A streamer that notes when the first tokens of a request arrive, and how many they are."""

    def __init__(self) -> None:
        self.puts = 0
        self.first_at = 0.0
        self.first_tokens = 0

    def put(self, value: Tensor) -> None:
        # The first call hands over the prompt.
        self.puts += 1
        if self.puts == 2:
            self.first_at = time.perf_counter()
            self.first_tokens = value.numel()

    def end(self) -> None:
        pass


class Peer:
    """A model as transformers runs it: its own attention, cache and `generate`, greedy.

    Args:
        model: its folder, or the model itself, which then stays where and as it is.
        ignore_eos: run to the token limit. The model then has no end-of-sequence token at all: forbidding it
            with `min_new_tokens` would change the output, and cost transformers time for every token.
        counts: count the model's forwards. What counts them would keep a model from being compiled as a whole.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ignore_eos: bool = False,
        counts: bool = True,
    ) -> None:
        self.model: Any = model
        if isinstance(model, str):
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(device)
        self.device = device
        eos = None if ignore_eos else self.model.generation_config.eos_token_id
        # Nothing of the model's own sampling: some configurations ask for a repetition penalty.
        self.model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=0)
        self.counts = counts
        self.forwards = 0
        if counts:
            self.model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.forwards += 1

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], tokens: int, *, streamer: Stopwatch | None = None, **settings: object
    ) -> tuple[int, ...]:
        """The tokens behind the prompt."""
        ids = torch.tensor([list(prompt)], device=self.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            streamer=streamer,
            **settings,
        )
        return tuple(output[0, len(prompt) :].tolist())

    def run(self, prompts: Sequence[Sequence[int]], tokens: int, **settings: object) -> Pass:
        """All prompts, one after the other; `settings` choose the kind of assisted generation."""
        outputs: list[tuple[int, ...]] = []
        seconds = decode_seconds = 0.0
        decode_tokens = 0
        before = self.forwards
        for prompt in prompts:
            watch = Stopwatch()
            began = time.perf_counter()
            outputs.append(self.generate(prompt, tokens, streamer=watch, **settings))
            ended = time.perf_counter()
            seconds += ended - began
            decode_seconds += ended - watch.first_at
            decode_tokens += len(outputs[-1]) - watch.first_tokens
        # Plain decoding takes one forward per token.
        forwards = self.forwards - before if self.counts else sum(map(len, outputs))
        return Pass(tuple(outputs), seconds, decode_tokens, decode_seconds, forwards)

    @torch.inference_mode()
    def top_margin(self, tokens: Sequence[int]) -> float:
        """How far the best next token's logit is above the second best."""
        logits = self.model(torch.tensor([list(tokens)], device=self.device)).logits[0, -1].float()
        first, second = logits.topk(2).values.tolist()
        return float(first - second)


def assistant(folder: str, k: int, *, device: torch.device, dtype: torch.dtype) -> Any:
    """A draft model that transformers lets draft exactly K tokens a round."""
    return drafting(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device), k)


def drafting(model: Any, k: int) -> Any:
    """The model, told to draft exactly K tokens a round where it assists."""
    # Read from the draft's own configuration; by default drafts end early where the draft is unsure.
    model.generation_config = GenerationConfig(
        pad_token_id=0,
        num_assistant_tokens=k,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return model


def save_draft(target_folder: str, folder: Path) -> str:
    """Save the target without some middle layers (26 of 30 stay) as a draft model; returns its label."""
    model: Any = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    base, layers = model.base_model, len(model.base_model.layers)
    left_out = range(2 * layers // 5, 2 * layers // 5 + max(1, 2 * layers // 15))
    kept = [i for i in range(layers) if i not in left_out]
    base.layers = nn.ModuleList(base.layers[i] for i in kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in kept]
    model.save_pretrained(folder)
    return f"draft model ({len(kept)} of {layers} layers)"


def folder_of(target: Loaded) -> str:
    """Where transformers finds the target's weights."""
    return str(target.model.model.name_or_path)


def decoder_of(target: Loaded, drafter: Drafter | None, k: int) -> Decoder:
    """A greedy decoder that runs to each request's limit; it keeps what it recorded from one pass to the next."""
    return Decoder(target.model, drafter, DecodeSettings(KSchedule.constant(k), rule="greedy"), StopRule())


def run_ours(decoder: Decoder, prompts: Sequence[Sequence[int]], tokens: int, *, batch: int = 1) -> Pass:
    """Decode all prompts with spectune; the decode figures cover rounds with all slots busy."""
    requests = [Request(str(i), tuple(p), tokens, i) for i, p in enumerate(prompts)]
    began = time.perf_counter()
    run = decoder.decode(requests, batch)
    seconds = time.perf_counter() - began
    return Pass(
        outputs=tuple(tuple(g.tokens) for g in run.generations),
        seconds=seconds,
        decode_tokens=sum(g.full_tokens for g in run.generations),
        # A round's time is booked to each of its rows.
        decode_seconds=sum(g.full_seconds for g in run.generations) / batch,
        forwards=sum(1 + len(g.rounds) for g in run.generations),
    )


def compare(what: str, ours: Side, theirs: Side, repeats: int, progress: Progress) -> Comparison:
    """Warm both sides up with a whole pass, then run A B B A per repeat.

    Raises:
        SpectuneError: the sides emitted different numbers of tokens per prompt.
    """
    progress(f"{what}: warm-up")
    warm = ours.run(), theirs.run()
    runs: tuple[list[list[Pass]], list[list[Pass]]] = ([], [])
    for repeat in range(repeats):
        progress(f"{what}: repeat {repeat + 1} of {repeats}")
        first = ours.run()
        between = [theirs.run(), theirs.run()]
        runs[0].append([first, ours.run()])
        runs[1].append(between)
    decode = [
        [_rate(sum(p.decode_tokens for p in pair), sum(p.decode_seconds for p in pair)) for pair in side]
        for side in runs
    ]
    whole = [[_rate(sum(p.tokens for p in pair), sum(p.seconds for p in pair)) for pair in side] for side in runs]
    # A larger batch repeats the prompts, so the shorter list is compared.
    pairs = list(zip(warm[0].outputs, warm[1].outputs, strict=False))
    if any(len(a) != len(b) for a, b in pairs):
        raise SpectuneError(f"{what}: the sides emitted different numbers of tokens")
    return Comparison(
        what=what,
        ours=ours.label,
        theirs=theirs.label,
        decode=Rates.of(*decode),
        with_prefill=Rates.of(*whole),
        our_tokens=warm[0].tokens,
        their_tokens=warm[1].tokens,
        our_tokens_per_forward=warm[0].tokens / warm[0].forwards,
        their_tokens_per_forward=warm[1].tokens / warm[1].forwards,
        prompts=len(pairs),
        same_outputs=sum(a == b for a, b in pairs),
    )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds


def measure(
    target: Loaded,
    draft_folder: str,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    repeats: int,
    k: int,
    draft_label: str = "draft model",
    progress: Progress = lambda _: None,
) -> list[Comparison]:
    """All comparisons on prompts of token ids.

    Raises:
        UsageError: too few tokens to tell decoding from prefill, or prompts that leave no room for them.
    """
    if tokens < k + 2:
        raise UsageError(f"{tokens} tokens may all come with the first round", f"use at least K + 2 = {k + 2}")
    if max(map(len, prompts)) + tokens > target.model.max_context:
        raise UsageError("a prompt and its output do not fit the context", "use fewer tokens")
    device, dtype = target.model.device, target.model.model.dtype
    peer = Peer(folder_of(target), device=device, dtype=dtype, ignore_eos=True)
    helper = assistant(draft_folder, k, device=device, dtype=dtype)
    wide = [prompts[i % len(prompts)] for i in range(-(-max(len(prompts), WIDE_BATCH) // WIDE_BATCH) * WIDE_BATCH)]

    def ours(drafter_name: str | None) -> Side:
        drafter = None
        if drafter_name:
            drafter = build_drafter(drafter_name, target, device=device, dtype=dtype).drafter
        decoder = decoder_of(target, drafter, k)
        return Side("spectune", lambda: run_ours(decoder, prompts, tokens))

    def theirs(**settings: object) -> Side:
        return Side("transformers", lambda: peer.run(prompts, tokens, **settings))

    lookup = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": MAX_NGRAM}
    plain = decoder_of(target, None, k)
    eight = Side(f"spectune, batch {WIDE_BATCH}", lambda: run_ours(plain, wide, tokens, batch=WIDE_BATCH))
    one = Side("spectune, batch 1", ours(None).run)
    duels = (
        ("plain", ours(None), theirs()),
        (f"{draft_label}, K {k}", ours(draft_folder), theirs(assistant_model=helper)),
        (f"prompt lookup, K {k}", ours("ngram"), theirs(**lookup)),
        (f"plain, batch {WIDE_BATCH} over 1", eight, one),
    )
    return [compare(what, a, b, repeats, progress) for what, a, b in duels]


def environment(target: Loaded) -> dict[str, str | int]:
    """What the figures depend on."""
    return {
        "target": target.info.name,
        "device": target.info.device,
        "dtype": target.info.dtype,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }


def spread_prompts(count: int) -> list[Prompt]:
    """The first prompts of our own suites, taken in turn."""
    suites = [load_suite(name).prompts for name in bundled_names()]
    return [p for p in chain.from_iterable(zip_longest(*suites)) if p is not None][:count]


def tokenizer_of(target: Loaded) -> Any:
    if target.tokenizer is None:
        raise UsageError(f"{target.info.name!r} has no tokenizer", "put its tokenizer files beside the model")
    return target.tokenizer


def table(comparisons: Sequence[Comparison]) -> Table:
    """Two lines per comparison: without and with the prefill."""
    grid = Table(box=None, pad_edge=False)
    grid.add_column("what")
    grid.add_column("tok/s", no_wrap=True)
    for name in ("ours", "theirs", "ratio (min–max)", "tok/fwd", "same"):
        grid.add_column(name, justify="right", no_wrap=True)
    for c in comparisons:
        per_forward = f"{c.our_tokens_per_forward:.2f} / {c.their_tokens_per_forward:.2f}"
        for name, rates, *rest in (
            ("decode", c.decode, per_forward, f"{c.same_outputs} of {c.prompts}"),
            ("all", c.with_prefill, "", ""),
        ):
            ratio = f"{rates.ratio.median:.2f} ({rates.ratio.low:.2f}–{rates.ratio.high:.2f})"
            speeds = (f"{rates.ours.median:.1f}", f"{rates.theirs.median:.1f}")
            grid.add_row(c.what if name == "decode" else "", name, *speeds, ratio, *rest)
    return grid


def to_json(comparisons: Sequence[Comparison], facts: dict[str, Any]) -> str:
    """Strict JSON: no NaN, no infinity."""
    report = {"environment": facts, "notes": NOTES, "comparisons": [asdict(c) for c in comparisons]}
    return json.dumps(report, allow_nan=False, indent=2)


def exit_on_error(command: Callable[[], None]) -> None:
    """Run a command line; a known error becomes one line and its exit code."""
    try:
        command()
    except SpectuneError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from None


def main(
    target: Annotated[str, typer.Option(help="Model folder, hub id or smollm2.")] = "smollm2",
    draft: Annotated[str | None, typer.Option(help="Draft model; by default the target without some layers.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tokens: Annotated[int, typer.Option(min=3, help="Tokens per prompt.")] = 48,
    repeats: Annotated[int, typer.Option(min=1, help="A B B A rounds per comparison.")] = 3,
    k: Annotated[int, typer.Option(min=1, help="Drafted tokens per round.")] = 5,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, taken in turn from our suites.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Measure spectune's decoding against transformers' on this machine."""
    where = pick_device(device)
    loaded = load(target, device=where, dtype=pick_dtype(dtype, where))
    chosen = spread_prompts(prompts)
    ids = [render(p, tokenizer_of(loaded)) for p in chosen]
    with tempfile.TemporaryDirectory() as scratch:
        label = "draft model" if draft else save_draft(folder_of(loaded), Path(scratch))
        comparisons = measure(
            loaded,
            draft or scratch,
            ids,
            tokens=tokens,
            repeats=repeats,
            k=k,
            draft_label=label,
            progress=lambda line: typer.echo(line, err=True),
        )
    facts = environment(loaded)
    if as_json:
        settings = {"tokens": tokens, "repeats": repeats, "k": k, "prompts": [p.id for p in chosen]}
        typer.echo(to_json(comparisons, facts | {"settings": settings}))
        return
    console = Console(highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    console.print(table(comparisons))
    for note in NOTES:
        console.print(note, style="dim")


if __name__ == "__main__":
    exit_on_error(lambda: typer.run(main))
