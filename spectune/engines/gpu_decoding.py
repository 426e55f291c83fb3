"""What a GPU benchmark times of spectune's own decoder: steps, rounds, and the parts of a round alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.decoder import Decoder, DecodeSettings, Run
from spectune.decoding.drafter import Draft, Drafter, Round, Row
from spectune.decoding.generation import RoundTrace
from spectune.decoding.graphs import Graphs
from spectune.decoding.sampling import History
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.decoding.verification import accept
from spectune.engines.engine import Request
from spectune.errors import SpectuneError
from spectune.measuring.clock import make_clock
from spectune.sweeping.cell import Sampling
from spectune.sweeping.recording import recorded

_CALLS = 16  # of a part, back to back: one wait for the device among so many
_SAMPLED = Sampling(temperature=1.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """Decodings of the same requests after a warm-up that recorded everything they need."""

    runs: tuple[Run, ...]
    captures: int  # computations that were recorded in the measured runs: 0, or they measure something else

    @property
    def round_seconds(self) -> list[float]:
        """Each run's median round, over the rounds with all slots busy."""
        return [statistics.median(_seconds(t) for t in run.trace if t.full) for run in self.runs]

    @property
    def tokens_per_second(self) -> list[float]:
        """Each run's decode rate over the rounds with all slots busy."""
        return [
            sum(t.emitted for t in run.trace if t.full) / sum(_seconds(t) for t in run.trace if t.full)
            for run in self.runs
        ]

    @property
    def context(self) -> float:
        """Mean cached tokens of a row."""
        return statistics.fmean(t.context for run in self.runs for t in run.trace if t.full)

    def refuse_captures(self) -> Measured:
        """Raises SpectuneError where something was recorded while it was measured."""
        if self.captures:
            raise SpectuneError(f"{self.captures} computations were recorded while they were measured")
        return self


def _seconds(trace: RoundTrace) -> float:
    return trace.draft_seconds + trace.verify_seconds + trace.overhead_seconds


def random_requests(count: int, context: int, tokens: int, vocab_size: int) -> list[Request]:
    """Requests with prompts of arbitrary ids, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocab_size, (count, context), generator=generator).tolist()
    return [Request(str(i), tuple(prompt), tokens, i) for i, prompt in enumerate(prompts)]


def round_decoder(
    target: CausalModel,
    drafter: Drafter | None,
    k: int,
    *,
    sampled: bool = False,
    synthetic: tuple[float, ...] | None = None,
) -> Decoder:
    """A decoder that runs to each request's limit; it keeps its recordings from one run to the next."""
    settings = DecodeSettings(
        KSchedule.constant(k),
        "speculative" if sampled else "greedy",
        _SAMPLED if sampled else Sampling(),
        synthetic=synthetic,
    )
    return Decoder(target, drafter, settings, StopRule())


def measure(decoder: Decoder, requests: Sequence[Request], batch: int, repeats: int) -> Measured:
    """Decode everything once to warm up and record, then `repeats` times: each time the rounds are the same ones."""
    decoder.decode(requests, batch)
    before = decoder.captures
    runs = tuple(decoder.decode(requests, batch) for _ in range(repeats))
    return Measured(runs, decoder.captures - before)


@torch.inference_mode()
def forward_alone(model: CausalModel, width: int, context: int, capacity: int, repeats: int) -> list[float]:
    """Seconds of one greedy forward of [1, width] tokens behind `context` cached ones, by the decoder's own path.

    Args:
        capacity: slots of the cache, which the recorded attention looks at.
    """
    device = model.device
    store = KVStore(1, capacity)
    prompt = torch.arange(context, device=device)[None] % model.vocab_size
    model.forward(prompt, Step(0, (0,), context, device), store, last_only=True)
    inputs = {
        "ids": torch.zeros(1, width, dtype=torch.long, device=device),
        "starts": torch.tensor([context], device=device),
    }

    known = None if recorded(str(device)) else (context,)  # what is not recorded knows on the host where it stands

    def forward(given: dict[str, Any]) -> dict[str, Any]:
        step = Step(0, known or given["starts"], width, device, reach=capacity)
        return {"tokens": model.forward(given["ids"], step, store).argmax(-1)}

    return _time(lambda graphs: graphs.run("forward", forward, inputs), lambda: forward(inputs), device, 1, repeats)


@torch.inference_mode()
def accept_alone(
    rows: int, k: int, vocab_size: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> list[float]:
    """Seconds of the acceptance step of speculative sampling at temperature 1, from logits that stay where they are.

    Logits are [rows, k + 1, V] in the target's dtype, q is [rows, k, V].
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, k + 1, vocab_size, dtype=dtype, device=device, generator=generator)
    q = torch.randn(rows, k, vocab_size, device=device, generator=generator).softmax(-1)
    tokens = q.flatten(0, 1).multinomial(1, generator=generator).view(rows, k)
    draft = Draft(tokens, torch.full((rows,), k, device=device), q, k)
    round_ = Round(
        rows=[Row([0, 0], seed) for seed in range(rows)],
        limits=[k] * rows,
        width=k,
        nodes=k,
        rule="speculative",
        sampling=_SAMPLED,
        history=History(rows, vocab_size, 1.0, device),
        stop_ids=torch.zeros(0, dtype=torch.long, device=device),
        device=device,
        fixed=True,
    )

    def judge(given: dict[str, Any]) -> dict[str, Any]:
        return accept(logits, draft, round_.on(given))._asdict()

    inputs = round_.inputs(device)
    return _time(lambda graphs: graphs.run("accept", judge, inputs), lambda: judge(dict(inputs)), device, rows, repeats)


def _time(
    record: Callable[[Graphs], object], call: Callable[[], object], device: torch.device, rows: int, repeats: int
) -> list[float]:
    """Seconds of one call, from `_CALLS` back to back, `repeats` times: recorded where the decoder would be."""
    graphs = Graphs(device, rows)
    run = (lambda: record(graphs)) if recorded(str(device)) else call
    clock = make_clock(device)
    run()
    clock.sync()
    seconds = []
    for _ in range(repeats):
        start = clock.mark()
        for _ in range(_CALLS):
            run()
        end = clock.mark()
        clock.sync()
        seconds.append(clock.seconds(start, end) / _CALLS)
    if graphs.unrecorded:
        raise SpectuneError(f"could not be recorded: {next(iter(graphs.unrecorded.values()))}")
    return seconds
