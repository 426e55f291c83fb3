"""What the sweep asks of an engine: load models, render requests, warm up, run one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from spectune.suites.prompt import Suite
from spectune.sweeping.cell import (
    CellSpec,
    Count,
    Difference,
    Excerpt,
    ModelInfo,
    NonNegative,
    OverlapCount,
    PassResult,
    Positive,
    Record,
    Sampling,
)

Mode = Literal["plain", "speculative"]


@dataclass(frozen=True, slots=True)
class Request:
    """A rendered prompt, ready to decode. The seed belongs to the request, so batch mates cannot change it."""

    id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    repeats: str | None = None  # the id of the prompt that this one repeats to fill the batch


@dataclass(frozen=True, slots=True)
class Requests:
    """The rendered suite; `notes` name every prompt that was left out, and why."""

    requests: tuple[Request, ...]
    notes: tuple[str, ...] = ()


class RoundTiming(Record):
    """The three times of a round at K, in seconds: medians over `rounds` rounds.

    `drafted` are tokens per row; `error` is the relative standard error of a round's time.
    """

    k: Count
    rounds: Count
    drafted: NonNegative
    draft_seconds: NonNegative
    verify_seconds: Positive
    overhead_seconds: NonNegative
    error: NonNegative


class Engine(Protocol):
    """One way to run a cell."""

    @property
    def target(self) -> ModelInfo: ...

    def drafter(self, name: str) -> ModelInfo | None:
        """Load (or look up) a drafter and check that it fits the target.

        Returns None for a drafter without weights. Raises UsageError where it cannot work.
        """

    def render(self, spec: CellSpec, suite: Suite) -> Requests:
        """Token ids of each prompt. Prompts are repeated (`id#2`, …) until they fill the batch once."""

    def warm_up(self, spec: CellSpec, requests: Sequence[Request]) -> None:
        """Run every tensor shape of the cell's rounds, so that no first-use cost is measured in them."""

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
        """Decode all requests once. `on_tokens(n)` is called after each round with the tokens it emitted."""

    def time_rounds(
        self, spec: CellSpec, requests: Sequence[Request], ks: Sequence[int], *, drafting: bool
    ) -> tuple[RoundTiming, ...]:
        """Time a few rounds of each K with every slot busy; the prompts matter for their lengths.

        Without `drafting` the drafts come from nowhere, and rounds cost what verifying K tokens costs; 0 is a plain
        step. A K that found no room in the context is left out.
        """

    def difference(self, spec: CellSpec, request: Request, outputs: tuple[str, str]) -> Difference:
        """Look at where two outputs of a request, named by their digests, part.

        Both must come from passes since the cell's warm-up.
        """

    def generation_defaults(self) -> Sampling:
        """Sampling settings of the model's own generation config."""

    def drafter_notes(self, name: str) -> Sequence[str]:
        """What a reader of the results should know about a drafter."""

    def release(self) -> None:
        """Give back caches and scratch memory, for instance after an out-of-memory cell."""


@runtime_checkable
class SeesDistributions(Protocol):
    """An engine that can look at the distributions themselves, beside counting what was accepted."""

    def overlap(self, spec: CellSpec, requests: Sequence[Request]) -> tuple[OverlapCount, ...]:
        """The overlap 1 − TV(p, q) at each position of the draft, over a few requests, outside the timed passes.

        Empty where it does not decide acceptance: at temperature 0, for trees, and under any rule but `speculative`.
        """


@runtime_checkable
class Interleaves(Protocol):
    """An engine that can let a plain and a speculative pass take turns, so that both meet the same disturbances."""

    def interleaves(self, spec: CellSpec) -> bool:
        """Whether it can for this cell; otherwise its passes run one after the other."""

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
        """Both passes of a repeat, in the order of `modes`. Neither's times contain the other's."""


@runtime_checkable
class KeepsRecordings(Protocol):
    """An engine whose rounds may run from recordings."""

    def recorded_bytes(self) -> int:
        """What the recordings of the current cell hold on the device, beside the caches."""

    def unrecorded(self) -> Sequence[str]:
        """Why computations of the current cell were called and not run from a recording."""


@runtime_checkable
class KeepsText(Protocol):
    """An engine that can show what a cell wrote."""

    def excerpt(self, requests: Sequence[Request]) -> Excerpt | None:
        """The first request of the cell's first speculative pass; None without a tokenizer."""
