"""The sections of the GPU benchmark, in the order in which they run.

A later section may use what an earlier one measured or loaded, and does without it where that one failed.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from spectune.decoding.drafters import build_drafter
from spectune.decoding.grown import PREFIX as GROWN
from spectune.decoding.loading import load, load_original, pick_device, pick_dtype
from spectune.engines.gpu_decoding import accept_alone, forward_alone, measure, random_requests, round_decoder
from spectune.engines.gpu_figures import Aim, Figure, Part, Section, Skipped
from spectune.engines.native import NativeEngine
from spectune.engines.peers import Comparison, Peer, Side, compare, decoder_of, drafting, run_ours
from spectune.measuring.bandwidth import CopyBandwidth, measure_copy_bandwidth
from spectune.measuring.bytes_model import bytes_per_step
from spectune.measuring.fingerprint import fingerprint

TESTS = Path(__file__).resolve().parents[2] / "tests"
RATE = 0.7  # of synthetic acceptance, at every position
SWEEP_KS, SWEEP_BATCHES, SWEEP_PROMPTS = (2, 4, 8), (1, 8), 4


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says. `grown` is LAYERS:EPSILON of the pair that really agrees."""

    target: str
    draft: str
    grown: str
    device: str
    dtype: str
    context: int
    tokens: int
    k: int
    repeats: int
    batches: tuple[int, ...]
    output: Path


class Bench:
    """All sections over one loaded pair of models."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = pick_device(settings.device)
        self.dtype = pick_dtype(settings.dtype, self.device)
        self.bandwidth: CopyBandwidth | None = None
        self.environment: dict[str, object] = {}

    @cached_property
    def engine(self) -> NativeEngine:
        """Target and draft; loaded by the first section that needs them."""
        return NativeEngine(self.settings.target, dtype=self.settings.dtype, device=str(self.device))

    @cached_property
    def draft(self) -> NativeEngine:
        """The draft as a target of its own, to time its steps alone."""
        return NativeEngine(self.settings.draft, dtype=self.settings.dtype, device=str(self.device))

    def sections(self) -> list[Section]:
        return [
            Section("environment", 15, self.describe),
            Section("bandwidth", 15, self.measure_bandwidth),
            Section("gpu tests", 95, self.run_tests),
            Section("plain decoding", 45, self.plain),
            Section("speculative round", 40, self.speculative),
            Section("acceptance step", 35, self.acceptance),
            Section("batches", 60, self.batches),
            Section("transformers, dynamic cache", 40, self.dynamic_cache),
            Section("transformers, compiled static cache", 90, self.static_cache),
            Section("sweep", 60, self.sweep),
            Section("report", 20, self.report),
            Section("transformers, assisted", 60, self.assisted),
        ]

    def describe(self) -> Iterator[Part]:
        self.environment = fingerprint(str(self.device))
        for gpu in self.environment["gpus"] if isinstance(self.environment["gpus"], list) else []:
            yield f"GPU: {gpu['name']}"

    def measure_bandwidth(self) -> Iterator[Part]:
        measured = measure_copy_bandwidth(str(self.device))
        self.bandwidth = measured
        for what, writes in (("copy (reads + writes)", True), ("read", False)):
            best = max((r for r in measured.rates if r.writes == writes), key=lambda r: r.bytes_per_second)
            values = [best.bytes_moved / seconds / 1e9 for seconds in best.seconds]
            yield Figure.of(f"{what}: {best.method}", "GB/s", values)
        yield from measured.notes

    def run_tests(self) -> Iterator[Part]:
        """`pytest -m gpu` in a process of its own."""
        import pytest  # noqa: F401  # only whether it is there

        if self.device.type != "cuda":
            raise Skipped("the tests marked gpu need a CUDA device")
        if not TESTS.is_dir():
            raise Skipped(f"no tests at {TESTS}")
        # Files that import what is not here are errors, and must not keep the others from running.
        options = ["-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors"]
        where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])}
        log = self.settings.output / "gpu_tests.txt"
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, str(TESTS)],
                cwd=TESTS.parent,
                env=where,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        counts = count_tests(log.read_text(encoding="utf-8"))
        for what in ("passed", "failed", "error", "skipped"):
            aim = Aim(0, at_least=False) if what in ("failed", "error") else None
            yield Figure.of(what, "tests", [counts.get(what, 0)], aim)
        if done.returncode not in (0, 1):  # 1: some tests failed, and the counts say so
            raise RuntimeError(f"pytest ended with {done.returncode}; see gpu_tests.txt")

    def plain(self) -> Iterator[Part]:
        """Steps of plain decoding at batch 1, and the share of the memory's speed that they use."""
        s, target = self.settings, self.engine.loaded
        requests = random_requests(1, s.context, s.tokens, target.model.vocab_size)
        measured = measure(round_decoder(target.model, None, s.k), requests, 1, s.repeats).refuse_captures()
        seconds = measured.round_seconds
        moved = bytes_per_step(target.info, 1, measured.context)
        yield Figure.of("time per step", "ms", [1e3 * t for t in seconds])
        yield Figure.of("decode", "tokens/s", measured.tokens_per_second)
        yield f"bytes per step, by the bytes model: {moved / 1e9:.4g} GB at a mean context of {measured.context:.0f}"
        if self.bandwidth is None:
            yield "no share of the bandwidth: it was not measured"
            return
        peak = self.bandwidth.copy_bytes_per_second
        shares = [moved / t / peak for t in seconds]
        yield Figure.of("share of the copy bandwidth", "", shares, Aim(0.80, at_least=True))

    def speculative(self) -> Iterator[Part]:
        """A round at batch 1 against K draft forwards and one verification, each alone by the same path."""
        s, target = self.settings, self.engine.loaded
        drafter = self.engine.built(s.draft).drafter
        requests = random_requests(1, s.context, s.tokens, target.model.vocab_size)
        decoder = round_decoder(target.model, drafter, s.k, synthetic=(RATE,) * s.k)
        measured = measure(decoder, requests, 1, s.repeats).refuse_captures()
        context, capacity = int(measured.context), s.context + s.tokens + s.k + 1
        draft = forward_alone(self.draft.loaded.model, 1, context, capacity, s.repeats)
        verify = forward_alone(target.model, s.k + 1, context, capacity, s.repeats)
        rounds = measured.round_seconds
        yield f"K {s.k}, synthetic acceptance {RATE:g} at every position"
        yield Figure.of("round", "ms", [1e3 * t for t in rounds])
        yield Figure.of("draft forward alone", "ms", [1e3 * t for t in draft])
        yield Figure.of(f"verification of {s.k + 1} tokens alone", "ms", [1e3 * t for t in verify])
        ratios = [r / (s.k * d + v) for r, d, v in zip(rounds, draft, verify, strict=True)]
        yield Figure.of("round / (K draft forwards + verification)", "", ratios, Aim(1.05, at_least=False))
        yield Figure.of("decode, synthetic acceptance", "tokens/s", measured.tokens_per_second)

    def acceptance(self) -> Iterator[Part]:
        """The accept step of speculative sampling as a share of the round, at the largest batch."""
        s, target = self.settings, self.engine.loaded
        rows, vocab_size = max(s.batches), target.model.vocab_size
        drafter = self.engine.built(s.draft).drafter
        requests = random_requests(rows, s.context, min(s.tokens, 4 * (s.k + 1)), vocab_size)
        decoder = round_decoder(target.model, drafter, s.k, sampled=True)
        rounds = measure(decoder, requests, rows, s.repeats).refuse_captures().round_seconds
        alone = accept_alone(rows, s.k, vocab_size, self.dtype, self.device, s.repeats)
        yield f"batch {rows}, K {s.k}, vocabulary {vocab_size}, temperature 1"
        yield Figure.of("round", "ms", [1e3 * t for t in rounds])
        yield Figure.of("accept step alone", "ms", [1e3 * t for t in alone])
        shares = [a / r for a, r in zip(alone, rounds, strict=True)]
        yield Figure.of("accept step / round", "", shares, Aim(0.02, at_least=False))

    def batches(self) -> Iterator[Part]:
        """Rounds at each batch; rows end one after the other, and nothing may be recorded meanwhile."""
        s, target = self.settings, self.engine.loaded
        drafter = self.engine.built(s.draft).drafter
        for rows in s.batches:
            # Rows end at different times: recordings must serve whatever number of rows is left.
            requests = [
                replace(r, max_new_tokens=max(2 * s.k, s.tokens - i % 8))
                for i, r in enumerate(random_requests(rows, s.context, s.tokens, target.model.vocab_size))
            ]
            decoder = round_decoder(target.model, drafter, s.k, synthetic=(RATE,) * s.k)
            measured = measure(decoder, requests, rows, s.repeats)
            yield Figure.of(f"batch {rows}: round", "ms", [1e3 * t for t in measured.round_seconds])
            yield Figure.of(f"batch {rows}: decode", "tokens/s", measured.tokens_per_second)
            captures = [float(measured.captures)]
            yield Figure.of(f"batch {rows}: recorded while measured", "", captures, Aim(0, at_least=False))

    def dynamic_cache(self) -> Iterator[Part]:
        yield from self._plain_against_transformers("dynamic cache", counts=True)

    def static_cache(self) -> Iterator[Part]:
        """Transformers compiles the forward by itself where the cache is static and the device a GPU."""
        if self.device.type != "cuda":
            yield f"on {self.device.type} transformers uses the static cache without compiling"
        yield from self._plain_against_transformers("static cache", counts=False, cache_implementation="static")

    def _plain_against_transformers(self, what: str, *, counts: bool, **settings: object) -> Iterator[Part]:
        s, target = self.settings, self.engine.loaded
        prompts = self._prompts(target.model.vocab_size)
        original = load_original(s.target, device=self.device, dtype=self.dtype)
        peer = Peer(original, device=self.device, dtype=self.dtype, ignore_eos=True, counts=counts)
        decoder = decoder_of(target, None, s.k)
        ours = Side("spectune", lambda: run_ours(decoder, prompts, s.tokens))
        theirs = Side("transformers", lambda: peer.run(prompts, s.tokens, **settings))
        yield from figures_of(compare(f"plain, {what}", ours, theirs, s.repeats, lambda _: None))

    def sweep(self) -> Iterator[Part]:
        from spectune.api import sweep

        s = self.settings
        outcome = sweep(
            target=s.target,
            drafts=[s.draft],
            k=SWEEP_KS,
            batch=SWEEP_BATCHES,
            suites=["code"],
            prompts=SWEEP_PROMPTS,
            max_new_tokens=s.tokens,
            synthetic_acceptance=",".join([str(RATE)] * max(SWEEP_KS)),
            dtype=s.dtype,
            device=str(self.device),
            output=s.output / "run",
            engine=self.engine,
        )
        yield Figure.of("cells finished", "", [len(outcome.results)], Aim(len(outcome.plan), at_least=True))
        for failed in outcome.failures:
            yield f"{failed.key}: {failed.message}"

    def report(self) -> Iterator[Part]:
        from spectune.reporting.page import render
        from spectune.reporting.store import write
        from spectune.reporting.summary import summarise

        folder = self.settings.output / "run"
        if not (folder / "run.json").is_file():
            raise Skipped("there is no run to report")
        write(folder / "report.html", render(summarise(folder, allow_empty=True)))
        yield "run/report.html"

    def assisted(self) -> Iterator[Part]:
        """Against assisted generation, on a pair that agrees: the target is the draft with more layers behind."""
        s = self.settings
        self.release()
        name = f"{GROWN}{s.draft}:{s.grown}"
        target = load(name, device=self.device, dtype=self.dtype)
        drafter = build_drafter(s.draft, target, device=self.device, dtype=self.dtype).drafter
        peer = Peer(
            load_original(name, device=self.device, dtype=self.dtype),
            device=self.device,
            dtype=self.dtype,
            ignore_eos=True,
        )
        helper = drafting(load_original(s.draft, device=self.device, dtype=self.dtype), s.k)
        prompts = self._prompts(target.model.vocab_size)
        decoder = decoder_of(target, drafter, s.k)
        ours = Side("spectune", lambda: run_ours(decoder, prompts, s.tokens))
        theirs = Side("transformers", lambda: peer.run(prompts, s.tokens, assistant_model=helper))
        yield f"target {name}, K {s.k}"
        yield from figures_of(compare("assisted", ours, theirs, s.repeats, lambda _: None), Aim(3.0, at_least=True))

    def _prompts(self, vocab_size: int) -> list[Sequence[int]]:
        return [random_requests(1, self.settings.context, 1, vocab_size)[0].token_ids]

    def release(self) -> None:
        """Let go of the loaded models."""
        for name in ("engine", "draft"):
            self.__dict__.pop(name, None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def figures_of(comparison: Comparison, aim: Aim | None = None) -> list[Part]:
    """Rates of both sides without the prefill, and their ratio repeat by repeat."""
    c = comparison
    return [
        Figure("spectune", "tokens/s", c.decode.ours),
        Figure("transformers", "tokens/s", c.decode.theirs),
        Figure("spectune / transformers", "x", c.decode.ratio, aim),
        f"tokens per target forward, prefill included: {c.our_tokens_per_forward:.3g} and "
        f"{c.their_tokens_per_forward:.3g}; {c.same_outputs} of {c.prompts} outputs are the same",
    ]


def count_tests(output: str) -> dict[str, int]:
    """What pytest's last line counts, as in `1 failed, 7 passed, 2 skipped in 3.1s`."""
    last = output.strip().splitlines()[-1:] or [""]
    return {word.removesuffix("s"): int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", last[0])}
