"""A scripted engine: tokens and counts follow from spec and request seed alone, times are made up."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Literal

from spectune.engines.engine import Request, Requests, RoundTiming
from spectune.errors import UsageError
from spectune.suites.prompt import Suite
from spectune.sweeping.cell import (
    CellSpec,
    Difference,
    ModelInfo,
    PassResult,
    RequestResult,
    RoundCount,
    RoundTimes,
    Sampling,
)

ROUND_SECONDS = 0.01


def model(name: str, *, digest: str | None = None, parameters: int = 1_000_000) -> ModelInfo:
    return ModelInfo(
        name=name,
        digest=digest or hashed(name).hex()[:12],
        parameters=parameters,
        weight_bytes_per_step=parameters * 4,
        kv_bytes_per_token=512,
        layers=2,
        vocab_size=128,
        max_context=4096,
        dtype="float32",
        device="cpu",
    )


class FakeEngine:
    """`failures` says per cell which exception to raise, `lengths` how many tokens a request may emit.

    `first_use_seconds` is slept at the first use of each (batch, tokens per forward), `pass_seconds` in
    each pass. With `vary`, every pass gives other tokens, `gap` below the best.
    `log` has every call: ("warm_up" | "plain" | "speculative" | "release", key).
    """

    def __init__(
        self,
        *,
        target: ModelInfo | None = None,
        failures: Callable[[CellSpec], BaseException | None] = lambda spec: None,
        lengths: Callable[[Request], int] = lambda request: request.max_new_tokens,
        first_use_seconds: float = 0.0,
        pass_seconds: float = 0.0,
        defaults: Sampling | None = None,
        vary: bool = False,
        gap: float = 1.0,
    ) -> None:
        self.target = target or model("fake-target")
        self.failures = failures
        self.lengths = lengths
        self.first_use_seconds = first_use_seconds
        self.pass_seconds = pass_seconds
        self.defaults = defaults or Sampling()
        self.vary = vary
        self.gap = gap
        self.used: set[tuple[int, int]] = set()
        self.log: list[tuple[str, str]] = []

    def generation_defaults(self) -> Sampling:
        return self.defaults

    def drafter_notes(self, name: str) -> tuple[str, ...]:
        return ()

    def drafter(self, name: str) -> ModelInfo | None:
        if name == "misfit":
            raise UsageError("draft misfit has another vocabulary")
        return None if name == "ngram" else model(name, parameters=100_000)

    def render(self, spec: CellSpec, suite: Suite) -> Requests:
        requests: list[Request] = []
        turn = 1
        while len(requests) < spec.batch or turn == 1:
            for prompt in suite.prompts:
                name = prompt.id if turn == 1 else f"{prompt.id}#{turn}"
                limit = min(prompt.max_new_tokens or spec.max_new_tokens, spec.max_new_tokens)
                seed = int.from_bytes(hashed(spec.seed, name)[:4], "big")
                requests.append(Request(name, tuple(range(1, 6)), limit, seed))
            turn += 1
        return Requests(tuple(requests))

    def warm_up(self, spec: CellSpec, requests: Sequence[Request]) -> None:
        self.log.append(("warm_up", spec.key))
        for width in (1, spec.k + 1):
            self._use(spec.batch, width)

    def run_pass(
        self,
        spec: CellSpec,
        requests: Sequence[Request],
        *,
        mode: Literal["plain", "speculative"],
        repeat: int,
        order: int,
        on_tokens: Callable[[int], None] | None = None,
    ) -> PassResult:
        self.log.append((mode, spec.key))
        begin = time.perf_counter()
        error = self.failures(spec)
        if error is not None:
            raise error
        self._use(spec.batch, 1 if mode == "plain" else spec.k + 1)
        time.sleep(self.pass_seconds)
        salt = f"{mode}{repeat}" if self.vary else ""
        results = tuple(self._decode(request, spec, mode, salt) for request in requests)
        if on_tokens:
            on_tokens(sum(result.output_tokens for result in results))
        rounds = sum(count.count for result in results for count in result.rounds)
        zero = dict.fromkeys(("draft_mean", "draft_median", "overhead_mean", "overhead_median"), 0.0)
        return PassResult(
            mode=mode,
            repeat=repeat,
            order=order,
            wall_seconds=max(time.perf_counter() - begin, 1e-9),
            target_forwards=rounds,
            requests=results,
            times=RoundTimes(
                rounds=rounds,
                verify_mean=ROUND_SECONDS,
                verify_median=ROUND_SECONDS,
                mean_context=10.0,
                draft_steps_mean=0.0 if mode == "plain" else float(spec.k),
                **zero,
            ),
        )

    def time_rounds(
        self, spec: CellSpec, requests: Sequence[Request], ks: Sequence[int], *, drafting: bool
    ) -> tuple[RoundTiming, ...]:
        self.log.append(("time_rounds", spec.key))
        error = self.failures(spec)
        if error is not None:
            raise error
        times = {"draft_seconds": 0.0, "verify_seconds": ROUND_SECONDS, "overhead_seconds": 0.0}
        return tuple(RoundTiming(k=k, rounds=6, drafted=k, error=0.01, **times) for k in ks)

    def difference(self, spec: CellSpec, request: Request, outputs: tuple[str, str]) -> Difference:
        return Difference(id=request.id, position=1, gap=self.gap, noise=0.1, is_tie=self.gap < 0.2)

    def release(self) -> None:
        self.log.append(("release", ""))

    def _use(self, batch: int, width: int) -> None:
        if (batch, width) not in self.used:
            time.sleep(self.first_use_seconds)
            self.used.add((batch, width))

    def _decode(self, request: Request, spec: CellSpec, mode: str, salt: str) -> RequestResult:
        length = min(self.lengths(request), request.max_new_tokens)
        counts: dict[tuple[int, int], int] = {}
        left, turn = length - 1, 0
        while left > 0:
            drafted = min(spec.k, left - 1) if mode == "speculative" else 0
            accepted = hashed(request.seed, spec.drafter, turn)[0] % (drafted + 1)
            counts[drafted, accepted] = counts.get((drafted, accepted), 0) + 1
            left -= accepted + 1
            turn += 1
        seconds = turn * ROUND_SECONDS
        return RequestResult(
            id=request.id,
            prompt_tokens=len(request.token_ids),
            output_tokens=length,
            finish_reason="length" if length == request.max_new_tokens else "stop",
            output_digest=hashed(request.seed, length, salt).hex()[:16],
            ttft_seconds=ROUND_SECONDS,
            decode_seconds=seconds,
            full_tokens=length - 1,
            full_seconds=seconds,
            rounds=tuple(RoundCount(drafted=d, accepted=a, count=n) for (d, a), n in sorted(counts.items())),
        )


def hashed(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()
