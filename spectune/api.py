"""The Python API: `spectune.generate(...)` and `spectune.sweep(...)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.drafter import Drafter
from spectune.decoding.generation import FinishReason, Generation, Origin
from spectune.decoding.sampling import is_greedy
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.decoding.text import split_text
from spectune.engines.engine import Request
from spectune.engines.native import NativeEngine, request_seed
from spectune.errors import UsageError
from spectune.suites.prompt import Message, Prompt
from spectune.suites.render import render
from spectune.sweeping.cell import Rule, Sampling
from spectune.sweeping.counts import parse_counts
from spectune.sweeping.options import SweepOptions
from spectune.sweeping.session import run
from spectune.sweeping.sweep import SweepOutcome


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of the output, as text, and where it came from."""

    text: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Generated:
    """One prompt's output.

    `rounds` counts target forwards after the prefill; `text` leaves out a stop string or stop token that ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason
    rounds: int
    drafted: int
    accepted: int
    seconds: float

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round, the bonus or correction included; null without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else None


def generate(
    prompt: str | Sequence[str],
    *,
    target: str = "smollm2",
    draft: str | None = "ngram",
    k: int = 4,
    max_new_tokens: int = 128,
    batch: int | None = None,
    chat: bool | None = True,
    sampling: Sampling | None = None,
    rule: Rule = "speculative",
    seed: int = 0,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    draft_device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    graphs: bool | None = None,
    engine: NativeEngine | None = None,
    on_text: Callable[[str, Origin], None] | None = None,
) -> Any:
    """Decode one prompt or several; returns a `Generated`, or a list of them for a list of prompts.

    Args:
        draft: `ngram`, `early-exit:N`, `layer-skip:A-B`, a model folder or hub id; None decodes plainly.
        k: tokens drafted per round.
        batch: rows decoded at once, all prompts if None.
        chat: wrap the prompt in the model's chat template; None does so where the model has one.
        sampling: None takes the model's own generation config.
        graphs: run each round from a recording; None does so on CUDA.
        engine: reuse loaded models; the options that load them are then ignored.
        on_text: called for each new piece of text of the first prompt as it is decoded.

    Raises:
        UsageError: a model, drafter or prompt that cannot be used.
    """
    if isinstance(stop, str):
        stop = (stop,)
    if not all(stop):
        raise UsageError("a stop string must not be empty")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts:
        raise UsageError("there is no prompt to decode")
    if k < 0:
        raise UsageError(f"k must be 0 or more, not {k}")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens must be 1 or more, not {max_new_tokens}")
    engine = engine or NativeEngine(
        target,
        dtype=dtype,
        device=device,
        draft_device=draft_device,
        revision=revision,
        trust_remote_code=trust_remote_code,
        graphs=graphs,
    )
    tokenizer = engine.loaded.tokenizer
    if tokenizer is None:
        raise UsageError(f"{engine.target.name!r} has no tokenizer", "put its tokenizer files beside the model")
    if chat is None:
        chat = bool(getattr(tokenizer, "chat_template", None))
    requests = [
        Request(
            str(i),
            tuple(render(_as_prompt(str(i), text, chat), tokenizer, chat_template=chat)),
            max_new_tokens,
            request_seed(seed, str(i)),
        )
        for i, text in enumerate(prompts)
    ]
    drafter: Drafter | None = engine.built(draft).drafter if draft and k else None
    sampling = engine.generation_defaults() if sampling is None else sampling
    stop_rule = StopRule(
        frozenset() if ignore_eos else engine.loaded.stop_ids,
        tuple(stop),
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
    )
    effective: Rule = "greedy" if is_greedy(sampling) else rule
    settings = DecodeSettings(KSchedule.constant(k), effective, sampling, graphs=engine.records)
    decoder = Decoder(engine.loaded.model, drafter, settings, stop_rule)
    run_ = decoder.decode(requests, batch or len(requests), _streamer(tokenizer, on_text) if on_text else None)
    results = [_generated(g, tokenizer, run_.wall_seconds) for g in run_.generations]
    return results[0] if isinstance(prompt, str) else results


def _as_prompt(name: str, text: str, chat: bool) -> Prompt:
    if chat:
        return Prompt(name, "prompt", messages=(Message("user", text),))
    return Prompt(name, "prompt", text=text)


def _generated(generation: Generation, tokenizer: Any, seconds: float) -> Generated:
    pieces = tuple(
        Piece(text, origin)
        for text, origin in zip(split_text(tokenizer, generation.tokens), generation.origins, strict=True)
    )
    text = tokenizer.decode(generation.tokens, skip_special_tokens=True)
    if generation.stop_string:
        text = text[: text.index(generation.stop_string)]
    return Generated(
        text=text,
        token_ids=tuple(generation.tokens),
        pieces=pieces,
        finish_reason=generation.finish_reason,
        rounds=len(generation.rounds),
        drafted=sum(r.drafted for r in generation.rounds),
        accepted=sum(r.accepted for r in generation.rounds),
        seconds=seconds,
    )


def _streamer(
    tokenizer: Any, on_text: Callable[[str, Origin], None]
) -> Callable[[Request, list[int], list[Origin]], None]:
    """Feeds the first request's text to `on_text` as it grows."""
    seen: list[int] = []

    def stream(request: Request, tokens: list[int], origins: list[Origin]) -> None:
        if request.id != "0":
            return
        before = len(seen)
        seen.extend(tokens)
        for text, origin in zip(split_text(tokenizer, seen)[before:], origins, strict=True):
            if text:
                on_text(text, origin)

    return stream


def sweep(
    *,
    drafts: Sequence[str] = ("ngram",),
    k: str | Sequence[int] = "2,4,8",
    batch: str | Sequence[int] = "1",
    suites: Sequence[str | Path] = ("code", "math", "creative"),
    output: str | Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
    engine: NativeEngine | None = None,
    **options: Any,
) -> SweepOutcome:
    """Measure a grid of cells into a run directory, as `spectune sweep` does.

    Args:
        k, batch: counts, or a list like "1-8" or "2,4,8".
        options: the other fields of `SweepOptions` (target, dtype, prompts, repeats, max_new_tokens, …).

    Raises:
        UsageError: options, models or suites that do not fit, before anything is measured.
    """
    return run(
        SweepOptions(
            drafts=(drafts,) if isinstance(drafts, str) else tuple(drafts),
            ks=parse_counts(k, "k", least=0),
            batches=parse_counts(batch, "batch"),
            suites=(suites,) if isinstance(suites, str) else tuple(str(s) for s in suites),
            **options,
        ),
        engine=engine,
        output=output,
        resume=resume,
        dry_run=dry_run,
    )
