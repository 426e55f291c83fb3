"""What the decoder asks of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from spectune.decoding.cache import KVStore, send
from spectune.decoding.graphs import Graphs, Tensors
from spectune.decoding.random import Stream, uniform
from spectune.decoding.sampling import History
from spectune.decoding.tree import Siblings, TokenTree
from spectune.errors import UsageError
from spectune.sweeping.cell import Rule, Sampling


@dataclass(slots=True)
class Row:
    """One running sequence. The last token is known but in no cache yet."""

    tokens: list[int]  # prompt and output
    seed: int

    @property
    def length(self) -> int:
        return len(self.tokens)


class Draft(NamedTuple):
    """A round's proposals, on the target's device.

    Node 0 is the root, the row's newest token; node j + 1 is `tokens[:, j]`.
    """

    tokens: Tensor  # [B, K] int64, parents before children and sorted by depth
    counts: Tensor  # [B] int64, how many of a row's K tokens are real
    probabilities: Tensor | None  # [B, K or K + 1, V] row i: what node i's children were drawn from; None: not drawn
    steps: int  # drafter forwards this took
    tree: TokenTree | None = None  # None: a chain, node j + 1 follows node j
    siblings: Siblings = "distinct"  # how the children of one node were produced
    ahead: bool = False  # drafted while the host still looked at the round before
    breadths: tuple[int, ...] | None = None  # most children of a node by level, the root's first, if known beforehand


@dataclass(frozen=True, slots=True)
class Kept:
    """What a round left behind."""

    accepted: Sequence[int]  # [B] drafted tokens that were delivered
    path: Tensor  # [B, D + 1] nodes: the root, then the accepted ones in order, padded with 0
    states: Tensor | None  # [B, K + 1, taps * h] the target's states at every node; None for drafters without taps


class Numbers(NamedTuple):
    """What a round's computations need to know of its rows, on one device. [B] int64 each."""

    seeds: Tensor
    positions: Tensor  # of the first token the round can emit
    limits: Tensor


@dataclass(frozen=True, slots=True)
class Round:
    """What a drafter may know: the rows, how much each may draft, and how the target will choose.

    A round of `fixed` width drafts as many places as K says, so that all rounds of a run have one shape; what a row may
    not draft is left out of its count.
    """

    rows: Sequence[Row]
    limits: Sequence[int]  # most tokens a row may accept: the length of a chain, the depth of a tree
    width: int  # the largest limit
    nodes: int  # K of this round: a tree has at most so many nodes
    rule: Rule
    sampling: Sampling
    history: History
    stop_ids: Tensor  # [n] on the target's device
    device: torch.device  # the target's
    fixed: bool = False
    bound: Numbers | None = None  # inside a recorded computation, where nothing is known to the host
    _numbers: dict[torch.device, Numbers] = field(default_factory=dict, init=False, compare=False)

    @property
    def count(self) -> int:
        """B."""
        return len(self.rows) if self.bound is None else len(self.bound.seeds)

    def numbers(self, device: torch.device, limits: Sequence[int] | None = None) -> Numbers:
        """The rows' numbers, in one copy to the device.

        Args:
            limits: a drafter's own, where they are tighter.
        """
        if self.bound is not None:
            return self.bound
        if limits is not None and list(limits) != list(self.limits):
            return self._send(device, limits)
        if device not in self._numbers:
            self._numbers[device] = self._send(device, self.limits)
        return self._numbers[device]

    def _send(self, device: torch.device, limits: Sequence[int]) -> Numbers:
        columns = [[row.seed for row in self.rows], [row.length for row in self.rows], list(limits)]
        return Numbers(*send(columns, device).reshape(3, -1))

    def refuse_block(self) -> None:
        """For drafters of trees. Raises UsageError under block verification, which looks at one path."""
        if self.rule == "block":
            raise UsageError(
                "block verification is for chains, and this drafter drafts trees", "use --rule speculative"
            )

    def seeds(self, device: torch.device) -> Tensor:
        return self.numbers(device).seeds

    def positions(self, device: torch.device) -> Tensor:
        """[B] position of the first token the round can emit."""
        return self.numbers(device).positions

    def draft_coins(self, place: int, device: torch.device) -> Tensor:
        """[B] coins that choose the draft's token at `place`.

        Under `match` the draft uses the target's own coin for that position: the output is the target's choice
        whatever is drafted, and equal coins make equal choices likely.
        """
        first = self.positions(device)
        zero = torch.zeros_like(first)
        if self.rule == "match":
            return uniform(self.seeds(device), Stream.TARGET, first + place, zero)
        return uniform(self.seeds(device), Stream.DRAFT, first, zero + place)

    def counts_before_stop(self, tokens: Tensor) -> Tensor:
        """A draft ends at its first stop token, which itself is offered. [B, K] -> [B]."""
        before = (~is_any(tokens, self.stop_ids.to(tokens.device))).long().cumprod(1).sum(1)
        return torch.minimum(self.numbers(tokens.device).limits, before + 1)

    def places(self, limits: Sequence[int]) -> int:
        """How many places are drafted where rows may draft `limits` tokens."""
        return self.nodes if self.fixed and max(limits) > 0 else max(limits)

    def inputs(self, device: torch.device, limits: Sequence[int] | None = None) -> dict[str, Tensor | None]:
        """What a recorded computation on `device` must be given to know this round; see `on`."""
        seen = self.history.seen
        numbers = self.numbers(device, limits)._asdict()
        return {**numbers, "seen": None if seen is None else seen[: self.count].to(device)}

    def on(self, inputs: Mapping[str, Any]) -> Round:
        """This round as a recorded computation sees it, from its inputs alone."""
        bound = Numbers(inputs["seeds"], inputs["positions"], inputs["limits"])
        history = History.of(inputs["seen"], self.history.penalty)
        return replace(self, rows=(), limits=(), history=history, bound=bound, device=bound.seeds.device)


def no_draft(rows: int, device: torch.device) -> Draft:
    """Nothing offered to any row."""
    nothing = torch.zeros(rows, 0, dtype=torch.long, device=device)
    return Draft(nothing, nothing.sum(1), None, 0)


def draft_recorded(
    graphs: Graphs, name: tuple[Hashable, ...], round_: Round, inputs: Tensors, compute: Callable[[Any, Round], Draft]
) -> dict[str, Any]:
    """A draft's tensors from a recording of `compute`.

    Args:
        name: of the computation; all that decides it but the round's rule and sampling, and the inputs' shapes.
        inputs: what it reads, those of the round (`Round.inputs`) included.
        compute: given the inputs and the round as they show it.
    """

    def computation(given: dict[str, Any]) -> dict[str, Any]:
        draft = compute(given, round_.on(given))
        parents = None if draft.tree is None else draft.tree.parents
        return {"tokens": draft.tokens, "counts": draft.counts, "q": draft.probabilities, "parents": parents}

    return graphs.run((*name, round_.rule, round_.sampling), computation, inputs)


def is_any(tokens: Tensor, ids: Tensor) -> Tensor:
    """Which tokens are among a few ids. [...], [n] -> [...] bool."""
    return (tokens[..., None] == ids).any(-1)


class Drafter(Protocol):
    """Proposes tokens. Rows are numbered 0 … B - 1 and stay packed: `move` closes gaps."""

    taps: tuple[int, ...]
    """Target states it reads, ascending: i enters layer i, the number of layers feeds the output head."""

    @property
    def device(self) -> torch.device | None:
        """Where it runs; None on the host."""

    def start(self, rows: int, capacity: int) -> None:
        """Make room for `rows` sequences of up to `capacity` tokens; forget everything."""

    def admit(self, index: int, row: Row, states: Tensor | None) -> None:
        """A new sequence takes a row: its prompt and first token are known.

        `states` [n, taps * h] belong to the n prompt tokens; None for drafters without taps.
        """

    def propose(self, round_: Round) -> Draft | None:
        """Draft for all rows; None if nothing could be drafted."""

    def keep(self, rows: Sequence[Row], kept: Kept) -> None:
        """The round is over and the rows have grown; drop what was not accepted."""

    def move(self, source: int, destination: int) -> None:
        """Copy one row's state over another's."""


@runtime_checkable
class SharesCache(Protocol):
    """A drafter that may run on the target's own cache."""

    def adopt(self, store: KVStore) -> None:
        """The target's cache of this run, after `start`."""


@runtime_checkable
class Recordable(Protocol):
    """A drafter whose computations can be recorded (see `graphs`)."""

    @property
    def device(self) -> torch.device | None: ...

    def record_with(self, graphs: Graphs | None) -> None:
        """Record the coming runs' computations; None: call them. Before `start`."""


@runtime_checkable
class DraftsAhead(Protocol):
    """A drafter that can begin a round before the host knows how the one before ended."""

    def draft_ahead(self, round_: Round, newest: Tensor, tokens: Tensor, accepted: Tensor, closing: Tensor) -> None:
        """Draft as if every row went on; whether they did is found out at the next `propose`.

        Args:
            round_: the round that was just verified.
            newest: [B, 1] the rows' last tokens before it; tokens: [B, K] what it drafted.
            accepted, closing: [B] how it ended.
        """
