"""The losslessness check: greedy output token-identical to transformers' `generate`, in float32.

    python -m spectune.engines.lossless --prompts 20 --tokens 32

Every drafter × K × batch decodes HumanEval prompts (as raw text) and our own (through the chat template).
The exit code is 0 only if every output is identical. A mismatch names its first differing place and how far
apart the target's two best tokens are there: a margin near 0 is rounding, a wide one is a bug.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.drafter import Drafter
from spectune.decoding.drafters import build_drafter
from spectune.decoding.loading import Loaded, load, pick_device
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.engine import Request
from spectune.engines.peers import (
    Peer,
    exit_on_error,
    folder_of,
    save_draft,
    spread_prompts,
    tokenizer_of,
)
from spectune.suites import load_suite, render
from spectune.suites.bundled import HUMAN_EVAL

TRIMMED = "draft-model"  # stands for the target without some layers, saved as a model of its own
DRAFTERS = (TRIMMED, "ngram", "early-exit:20", "layer-skip:12-15")
KS = (1, 4, 8)
BATCHES = (1, 3, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    drafter: str
    k: int
    batch: int

    def __str__(self) -> str:
        return f"{self.drafter}, K {self.k}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a request's output first differs; None stands for an output that has ended."""

    request: str
    position: int
    expected: int | None
    found: int | None
    margin: float

    def __str__(self) -> str:
        tokens = f"token {self.found}, want {self.expected}"
        return f"{self.request}: output position {self.position}: {tokens} (top-2 margin {self.margin:.3g})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a configuration gave."""

    case: Case
    requests: int
    tokens: int
    rounds: int
    mismatches: tuple[Mismatch, ...]
    seconds: float

    @property
    def identical(self) -> bool:
        return not self.mismatches


class Oracle:
    """The outputs of transformers, generated once."""

    def __init__(self, peer: Peer, requests: Sequence[Request]) -> None:
        self.peer = peer
        self.requests = list(requests)
        self.outputs = {r.id: peer.generate(r.token_ids, r.max_new_tokens) for r in requests}

    def compare(self, request: Request, output: Sequence[int]) -> Mismatch | None:
        """The first difference from what transformers gave."""
        for place, (expected, found) in enumerate(zip_longest(self.outputs[request.id], output)):
            if expected != found:
                margin = self.peer.top_margin([*request.token_ids, *output[:place]])
                return Mismatch(request.id, place, expected, found, margin)
        return None


def plan(drafters: Sequence[str] = DRAFTERS, ks: Sequence[int] = KS, batches: Sequence[int] = BATCHES) -> list[Case]:
    """All configurations, in an order that meets every pair of values early.

    With three K and three batches each block of `len(drafters)` moves both on, so the first three blocks
    already pair every drafter with every K and every batch, and every K with every batch.
    """
    return [
        Case(name, ks[(i + d) % len(ks)], batches[(turn + 2 * i + d) % len(batches)])
        for turn in range(len(batches))
        for i in range(len(ks))
        for d, name in enumerate(drafters)
    ]


def check(target: Loaded, oracle: Oracle, drafters: Mapping[str, Drafter], cases: Sequence[Case]) -> Iterator[Outcome]:
    """Decode the oracle's requests in every configuration and compare."""
    for case in cases:
        began = time.perf_counter()
        settings = DecodeSettings(KSchedule.constant(case.k), rule="greedy")
        decoder = Decoder(target.model, drafters[case.drafter], settings, StopRule(target.stop_ids))
        run = decoder.decode(oracle.requests, case.batch)
        found = [
            oracle.compare(request, generation.tokens)
            for request, generation in zip(oracle.requests, run.generations, strict=True)
        ]
        yield Outcome(
            case=case,
            requests=len(oracle.requests),
            tokens=sum(len(g.tokens) for g in run.generations),
            rounds=sum(len(g.rounds) for g in run.generations),
            mismatches=tuple(m for m in found if m is not None),
            seconds=time.perf_counter() - began,
        )


def requests_for(target: Loaded, prompts: int, tokens: int) -> list[Request]:
    """`prompts` of HumanEval and as many of our own, in turn, so that batches mix short and long ones."""
    theirs = load_suite(HUMAN_EVAL, limit=prompts).prompts
    chosen = chain.from_iterable(zip(theirs, spread_prompts(prompts), strict=True))
    tokenizer = tokenizer_of(target)
    return [Request(p.id, tuple(render(p, tokenizer)), tokens, 0) for p in chosen]


def build(name: str, target: Loaded, scratch: Path) -> Drafter:
    """A drafter by its name, or the trimmed target."""
    if name == TRIMMED:
        save_draft(folder_of(target), scratch)
        name = str(scratch)
    return build_drafter(name, target, device=target.model.device, dtype=target.model.model.dtype).drafter


def report_line(outcome: Outcome) -> str:
    state = "identical" if outcome.identical else f"{len(outcome.mismatches)} DIFFER"
    return f"{outcome.case}: {outcome.requests} outputs, {state}, {outcome.seconds:.0f} s"


def table(outcomes: Sequence[Outcome]) -> Table:
    """A line per configuration."""
    grid = Table(box=None, pad_edge=False)
    grid.add_column("drafter")
    for name in ("K", "batch", "identical", "tokens", "tokens/round"):
        grid.add_column(name, justify="right")
    for o in outcomes:
        same = f"{o.requests - len(o.mismatches)} of {o.requests}"
        # The first token of a request comes from its prefill.
        length = f"{(o.tokens - o.requests) / o.rounds:.2f}" if o.rounds else "—"
        grid.add_row(o.case.drafter, str(o.case.k), str(o.case.batch), same, str(o.tokens), length)
    return grid


def check_all(
    target: Loaded,
    requests: Sequence[Request],
    cases: Sequence[Case],
    say: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Run all configurations, saying a line about each and about every mismatch."""
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        names = dict.fromkeys(case.drafter for case in cases)
        drafters = {name: build(name, target, Path(scratch)) for name in names}
        peer = Peer(folder_of(target), device=target.model.device, dtype=target.model.model.dtype)
        say(f"{len(requests)} references from transformers")
        oracle = Oracle(peer, requests)
        for number, outcome in enumerate(check(target, oracle, drafters, cases), 1):
            say(f"[{number}/{len(cases)}] {report_line(outcome)}")
            for mismatch in outcome.mismatches:
                say(f"  {mismatch}")
            outcomes.append(outcome)
    return outcomes


def main(
    target: Annotated[str, typer.Option(help="Model folder, hub id or smollm2.")] = "smollm2",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of HumanEval, and as many of our own.")] = 20,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    k: Annotated[list[int] | None, typer.Option(min=1, help="K; may be repeated. [1, 4, 8]")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch; may be repeated. [1, 3, 8]")] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help=f"Drafter name, model folder or {TRIMMED}; may be repeated. [{', '.join(DRAFTERS)}]"),
    ] = None,
) -> None:
    """Check that greedy speculative decoding gives exactly the tokens of transformers."""
    loaded = load(target, device=pick_device(device), dtype=torch.float32)
    requests = requests_for(loaded, prompts, tokens)
    cases = plan(drafter or DRAFTERS, k or KS, batch or BATCHES)
    outcomes = check_all(loaded, requests, cases, typer.echo)
    Console(highlight=False).print(table(outcomes))
    different = [o for o in outcomes if not o.identical]
    typer.echo(f"{len(outcomes) - len(different)} of {len(outcomes)} configurations identical")
    if different:
        raise typer.Exit(1)


if __name__ == "__main__":
    exit_on_error(lambda: typer.run(main))
