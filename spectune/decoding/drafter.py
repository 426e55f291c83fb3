"""What the decoder asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from spectune.decoding.cache import KVStore
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


@dataclass(frozen=True, slots=True)
class Kept:
    """What a round left behind."""

    accepted: Sequence[int]  # [B] drafted tokens that were delivered
    path: Tensor  # [B, D + 1] nodes: the root, then the accepted ones in order, padded with 0
    states: Tensor | None  # [B, K + 1, taps * h] the target's states at every node; None for drafters without taps


@dataclass(frozen=True, slots=True)
class Round:
    """What a drafter may know: the rows, how much each may draft, and how the target will choose."""

    rows: Sequence[Row]
    limits: Sequence[int]  # most tokens a row may accept: the length of a chain, the depth of a tree
    width: int  # the largest limit
    nodes: int  # K of this round: a tree has at most so many nodes
    rule: Rule
    sampling: Sampling
    history: History
    stop_ids: Tensor  # [n] on the target's device
    device: torch.device  # the target's

    def refuse_block(self) -> None:
        """For drafters of trees. Raises UsageError under block verification, which looks at one path."""
        if self.rule == "block":
            raise UsageError(
                "block verification is for chains, and this drafter drafts trees", "use --rule speculative"
            )

    def seeds(self, device: torch.device) -> Tensor:
        return torch.tensor([row.seed for row in self.rows], device=device)

    def positions(self, device: torch.device) -> Tensor:
        """[B] position of the first token the round can emit."""
        return torch.tensor([row.length for row in self.rows], device=device)

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
        limits = torch.tensor(self.limits, device=tokens.device)
        is_stop = torch.isin(tokens, self.stop_ids)
        before = (~is_stop).long().cumprod(1).sum(1)
        return torch.minimum(limits, before + 1)


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
