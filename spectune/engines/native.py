"""The native engine: cells run in spectune's own decoder."""

from __future__ import annotations

import gc
import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.decoder import Decoder, DecodeSettings, Run
from spectune.decoding.drafter import Drafter, Recordable
from spectune.decoding.drafters import BuiltDrafter, build_drafter
from spectune.decoding.generation import Generation, RoundTrace
from spectune.decoding.graphs import Graphs
from spectune.decoding.loading import load, pick_device, pick_dtype
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.difference import find_difference
from spectune.engines.engine import Mode, Request, Requests, RoundTiming
from spectune.engines.excerpt import to_excerpt
from spectune.engines.overlap import OverlapCounter
from spectune.engines.round_times import FullWidth, Turns, timings
from spectune.engines.turns import take_turns
from spectune.errors import UsageError
from spectune.suites.prompt import Suite
from spectune.suites.render import render
from spectune.sweeping.cell import (
    CellSpec,
    Difference,
    Excerpt,
    ModelInfo,
    OverlapCount,
    PassResult,
    RequestResult,
    RoundCount,
    RoundTimes,
    Sampling,
)
from spectune.sweeping.drafter_names import drafts_trees
from spectune.sweeping.recording import interleaved, recorded

_OVERLAP_REQUESTS, _OVERLAP_TOKENS = 8, 64  # the sample on which 1 − TV is compared with the counts

# What warms up on a CPU does not depend on how long the prompts are; on a GPU their prefill loads kernels of its own.
_CPU_WARM_PROMPT = 16

_MOST_TRIES = 3  # passes begun anew since something was recorded in them


class NativeEngine:
    """Loads the target once and each drafter on first use.

    Args:
        target: folder, hub id, or `smollm2`.
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N; `draft_device` likewise, the target's if None.
        graphs: record rounds and run them from there (see `decoding.graphs`); None: where the device gains by it.

    Raises:
        UsageError: the model, device or dtype cannot be had.
    """

    def __init__(
        self,
        target: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        draft_device: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        graphs: bool | None = None,
    ) -> None:
        self.device = pick_device(device)
        self.draft_device = pick_device(draft_device) if draft_device else self.device
        self.dtype = pick_dtype(dtype, self.device)
        self.trust_remote_code = trust_remote_code
        self.loaded = load(
            target,
            device=self.device,
            dtype=self.dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        self._drafters: dict[str, BuiltDrafter] = {}
        self.records = recorded(str(self.device), graphs)
        self._recordings: tuple[CellSpec, Graphs] | None = None  # of the current cell
        self._warm: set[tuple[str, int, int]] = set()
        self._outputs: dict[str, list[int]] = {}  # of the current cell, by digest
        self._first: Generation | None = None  # of the current cell's first speculative pass

    @property
    def target(self) -> ModelInfo:
        return self.loaded.info

    def generation_defaults(self) -> Sampling:
        """Sampling of the model's own generation config."""
        return self.loaded.defaults

    def drafter(self, name: str) -> ModelInfo | None:
        return self.built(name).info

    def drafter_notes(self, name: str) -> tuple[str, ...]:
        """What a reader of the results should know about the drafter."""
        return self.built(name).notes

    def built(self, name: str) -> BuiltDrafter:
        if name not in self._drafters:
            dtype = self.dtype if self.draft_device == self.device else pick_dtype("auto", self.draft_device)
            self._drafters[name] = build_drafter(
                name,
                self.loaded,
                device=self.draft_device,
                dtype=dtype,
                trust_remote_code=self.trust_remote_code,
            )
        return self._drafters[name]

    def render(self, spec: CellSpec, suite: Suite) -> Requests:
        if self.loaded.tokenizer is None:
            raise UsageError(f"{self.target.name!r} has no tokenizer", "put its tokenizer files beside the model")
        requests: list[Request] = []
        notes: list[str] = []
        for prompt in suite.prompts:
            ids = render(prompt, self.loaded.tokenizer, chat_template=spec.chat_template)
            limit = min(prompt.max_new_tokens or spec.max_new_tokens, spec.max_new_tokens)
            if len(ids) >= self.target.max_context:
                notes.append(
                    f"{prompt.id}: left out, {len(ids)} prompt tokens fill the context of {self.target.max_context}"
                )
                continue
            if len(ids) + limit > self.target.max_context:
                notes.append(f"{prompt.id}: output cut to {self.target.max_context - len(ids)} tokens by the context")
            requests.append(Request(prompt.id, tuple(ids), limit, request_seed(spec.seed, prompt.id)))
        if not requests:
            raise UsageError(f"suite {suite.name!r} has no prompt that fits the context of {self.target.max_context}")
        return Requests(tuple(_fill(requests, spec.batch)), tuple(notes))

    def warm_up(self, spec: CellSpec, requests: Sequence[Request]) -> None:
        self._outputs.clear()
        self._first = None
        with torch.inference_mode():
            store = KVStore(spec.batch, spec.k + 1)
            for width in range(1, spec.k + 2):
                shape = ("target", spec.batch, width)
                if shape not in self._warm:
                    ids = torch.zeros(spec.batch, width, dtype=torch.long, device=self.device)
                    self.loaded.model.forward(ids, Step(0, (0,) * spec.batch, width, self.device), store)
                    self._warm.add(shape)
        begin = -_CPU_WARM_PROMPT if self.device.type == "cpu" and not spec.graphs else 0
        short = [
            Request(r.id, r.token_ids[begin:], min(r.max_new_tokens, 2 * spec.k + 3), r.seed)
            for r in requests[: spec.batch]
        ]
        # Recordings are a cell's own, so with them both modes warm up every time.
        shapes = {False: ("plain", spec.batch, 0), True: (f"draft {spec.drafter}", spec.batch, spec.k)}
        for speculative, shape in shapes.items():
            if shape not in self._warm or spec.graphs:
                decoder = self._decoder(spec, speculative=speculative)
                decoder.stop = StopRule(frozenset())  # a row that ends at once would leave the drafter cold
                decoder.decode(short, spec.batch, room=_room(requests))
                self._warm.add(shape)

    def run_pass(
        self,
        spec: CellSpec,
        requests: Sequence[Request],
        *,
        mode: Mode,
        repeat: int,
        order: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> PassResult:
        decoder = self._decoder(spec, speculative=mode == "speculative")
        # A pass in which something had to be recorded is no measurement.
        for _ in range(_MOST_TRIES):
            before = decoder.captures
            [run] = take_turns([decoder], requests, spec.batch, room=_room(requests), on_tokens=on_tokens)
            if decoder.captures == before:
                break
        return self._passed(run, requests, mode=mode, repeat=repeat, order=order)

    def interleaves(self, spec: CellSpec) -> bool:
        return interleaved(spec)

    def run_pair(
        self,
        spec: CellSpec,
        requests: Sequence[Request],
        *,
        modes: tuple[Mode, Mode],
        repeat: int,
        order: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> tuple[PassResult, PassResult]:
        first, second = take_turns(
            [self._decoder(spec, speculative=mode == "speculative") for mode in modes],
            requests,
            spec.batch,
            room=_room(requests),
            on_tokens=on_tokens,
        )
        return (
            self._passed(first, requests, mode=modes[0], repeat=repeat, order=order),
            self._passed(second, requests, mode=modes[1], repeat=repeat, order=order + 1),
        )

    def _passed(self, run: Run, requests: Sequence[Request], *, mode: Mode, repeat: int, order: int) -> PassResult:
        self._outputs |= {g.digest: g.tokens for g in run.generations}
        if mode == "speculative" and self._first is None:
            self._first = run.generations[0]
        return to_pass(run, requests, mode=mode, repeat=repeat, order=order)

    def time_rounds(
        self, spec: CellSpec, requests: Sequence[Request], ks: Sequence[int], *, drafting: bool
    ) -> tuple[RoundTiming, ...]:
        turns = Turns(ks)
        most = (turns.largest + 1) * len(turns.order) + 1
        endless = [replace(r, max_new_tokens=most) for r in requests[: spec.batch]]
        settings = DecodeSettings(turns, spec.rule, spec.sampling, graphs=spec.graphs)
        drafter = self.built(spec.drafter).drafter if drafting else FullWidth()
        decoder = Decoder(self.loaded.model, drafter, settings, StopRule(frozenset()))
        return timings(ks, turns.order, decoder.decode(endless, spec.batch, rounds=len(turns.order)).trace)

    def excerpt(self, requests: Sequence[Request]) -> Excerpt | None:
        if self._first is None or self.loaded.tokenizer is None:
            return None
        return to_excerpt(requests[0], self._first, self.loaded.tokenizer)

    def difference(self, spec: CellSpec, request: Request, outputs: tuple[str, str]) -> Difference:
        first, second = (self._outputs[digest] for digest in outputs)
        return find_difference(
            self.loaded.model, request, first, second, width=spec.k + 1, batch=spec.batch, sampling=spec.sampling
        )

    def overlap(self, spec: CellSpec, requests: Sequence[Request]) -> tuple[OverlapCount, ...]:
        if spec.rule != "speculative" or spec.sampling.greedy or drafts_trees(spec.drafter):
            return ()
        counter = OverlapCounter(spec.k)
        decoder = self._decoder(spec, speculative=True)
        decoder.on_verdict = counter.add
        decoder.records = False  # recordings call nobody
        few = requests[: max(spec.batch, _OVERLAP_REQUESTS)]
        decoder.decode([replace(r, max_new_tokens=min(r.max_new_tokens, _OVERLAP_TOKENS)) for r in few], spec.batch)
        return counter.counts()

    def _decoder(self, spec: CellSpec, *, speculative: bool) -> Decoder:
        drafter: Drafter | None = self.built(spec.drafter).drafter if speculative else None
        settings = DecodeSettings(
            KSchedule.constant(spec.k), spec.rule, spec.sampling, graphs=spec.graphs, synthetic=spec.synthetic
        )
        stop = StopRule(frozenset() if spec.ignore_eos else self.loaded.stop_ids)
        return Decoder(self.loaded.model, drafter, settings, stop, self._graphs(spec))

    def _graphs(self, spec: CellSpec) -> Graphs | None:
        """The recordings of a cell, which both of its modes use; those of the cell before are dropped."""
        if not spec.graphs:
            return None
        if self._recordings is None or self._recordings[0] != spec:
            self._recordings = spec, Graphs(self.device, spec.batch)
        return self._recordings[1]

    def recorded_bytes(self) -> int:
        return self._recordings[1].bytes if self._recordings else 0

    def unrecorded(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._recordings[1].unrecorded.values())) if self._recordings else ()

    def release(self) -> None:
        self._recordings = None
        for built in self._drafters.values():
            # A pass that failed has left its recordings with the drafter, and their buffers with them.
            if isinstance(built.drafter, Recordable):
                built.drafter.record_with(None)
            built.drafter.start(0, 0)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def request_seed(seed: int, prompt_id: str) -> int:
    """A request's own seed: the same prompt draws the same coins in every cell of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:7], "big")


def _room(requests: Sequence[Request]) -> int:
    """Tokens of the longest request, prompt and output."""
    return max(len(r.token_ids) + r.max_new_tokens for r in requests)


def _fill(requests: list[Request], batch: int) -> list[Request]:
    """Repeat the requests until every slot has one."""
    filled = list(requests)
    turn = 2
    while len(filled) < batch:
        for r in requests:
            name, seed = _unused(f"{r.id}#{turn}", filled), request_seed(r.seed, f"#{turn}")
            filled.append(Request(name, r.token_ids, r.max_new_tokens, seed, repeats=r.id))
        turn += 1
    return filled


def _unused(name: str, requests: Sequence[Request]) -> str:
    taken = {r.id for r in requests}
    while name in taken:
        name += "#"
    return name


def to_pass(
    run: Run, requests: Sequence[Request], *, mode: Literal["plain", "speculative"], repeat: int, order: int
) -> PassResult:
    """The decoder's run as a cell file keeps it."""
    return PassResult(
        mode=mode,
        repeat=repeat,
        order=order,
        wall_seconds=run.wall_seconds,
        target_forwards=run.target_forwards,
        requests=tuple(_to_request(g, r.repeats) for g, r in zip(run.generations, requests, strict=True)),
        times=round_times([t for t in run.trace if t.full]),
    )


def _to_request(generation: Generation, repeats: str | None) -> RequestResult:
    counts = Counter((r.drafted, r.accepted) for r in generation.rounds)
    return RequestResult(
        id=generation.id,
        repeats=repeats,
        prompt_tokens=generation.prompt_tokens,
        output_tokens=len(generation.tokens),
        finish_reason=generation.finish_reason,
        output_digest=generation.digest,
        ttft_seconds=generation.ttft_seconds,
        decode_seconds=generation.decode_seconds,
        full_tokens=generation.full_tokens,
        full_seconds=generation.full_seconds,
        full_rounds=generation.full_rounds,
        rounds=tuple(RoundCount(drafted=d, accepted=a, count=n) for (d, a), n in sorted(counts.items())),
    )


def round_times(trace: Sequence[RoundTrace]) -> RoundTimes:
    """Means and medians of the rounds' three times; null where there was no round."""
    if not trace:
        return RoundTimes(rounds=0, **dict.fromkeys(set(RoundTimes.model_fields) - {"rounds"}))
    draft = [t.draft_seconds for t in trace]
    verify = [t.verify_seconds for t in trace]
    overhead = [t.overhead_seconds for t in trace]
    return RoundTimes(
        rounds=len(trace),
        draft_mean=statistics.fmean(draft),
        verify_mean=statistics.fmean(verify),
        overhead_mean=statistics.fmean(overhead),
        draft_median=statistics.median(draft),
        verify_median=statistics.median(verify),
        overhead_median=statistics.median(overhead),
        mean_context=statistics.fmean(t.context for t in trace),
        draft_steps_mean=statistics.fmean(t.draft_steps for t in trace),
        verified_nodes_mean=statistics.fmean(t.nodes / t.rows for t in trace),
    )
