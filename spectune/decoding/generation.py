"""What decoding yields: tokens, where each came from, and the counts and times of every round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "context"]
Origin = Literal["prefill", "draft", "correction", "bonus", "plain"]


@dataclass(slots=True)
class RowRound:
    """One row's share of a round."""

    drafted: int  # of a tree: its longest path
    accepted: int
    emitted: int
    nodes: int  # tokens sent to the target; more than drafted only in a tree


@dataclass(slots=True)
class Generation:
    """One request's result. `tokens` ends with the stop token, if one ended it."""

    id: str
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    rounds: list[RowRound] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    stop_string: str | None = None
    ttft_seconds: float = 0.0
    decode_seconds: float = 0.0
    full_tokens: int = 0
    full_seconds: float = 0.0
    full_rounds: int = 0

    @property
    def digest(self) -> str:
        return hashlib.sha256(",".join(map(str, self.tokens)).encode()).hexdigest()[:16]

    def add_round(self, drafted: int, accepted: int, tokens: list[int], nodes: int) -> None:
        self.rounds.append(RowRound(drafted, accepted, len(tokens), nodes))
        last: Origin = "plain" if drafted == 0 else "bonus" if accepted == drafted else "correction"
        drafts: list[Origin] = ["draft"] * accepted
        self.origins += drafts + [last] * (len(tokens) - accepted)
        self.tokens += tokens


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """The three times of a round over all rows, in seconds, and what it had to do."""

    rows: int
    full: bool  # every slot was busy
    drafted: int  # of a tree: its longest path
    nodes: int  # verified draft tokens
    emitted: int
    draft_steps: int
    context: float  # mean cached tokens per row
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float
