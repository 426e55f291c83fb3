"""The cell: one point of a plan, and what was measured there.

A cell file holds everything the analysis needs, so nothing to the right of it ever touches torch.
Words and formulas follow the project's definitions: a *round* is one target forward that verifies a draft;
`drafted`, `accepted` and `emitted` count that round's tokens (a stop token cuts all three).
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

SCHEMA_VERSION = 1
EXCERPT_TOKENS = 64  # of an excerpt
EXCERPT_PROMPT = 600  # characters of its prompt

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Bounded, since means are floats and an int of 400 digits has none.
Count = Annotated[int, Field(ge=0, lt=2**63)]
PositiveCount = Annotated[int, Field(ge=1, lt=2**63)]
Rate = Annotated[float, Field(ge=0, le=1)]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(Record):
    """How the target's distribution is shaped; temperature 0 is greedy decoding."""

    temperature: NonNegative = 0.0
    top_k: Count = 0  # 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Positive = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


Rule = Literal["greedy", "speculative", "block", "match", "typical"]
LOSSY_RULES = frozenset({"typical"})  # the output law is not the target's


# Random weights of a given shape, or trained ones with random layers behind them: times are real, text means nothing.
WeightOrigin = Literal["trained", "random", "grown"]


class CellSpec(Record):
    """Everything that changes a cell's result. `key` is its hash.

    `target` and `drafter` are the names the user wrote; the digests pin the weights behind them.
    """

    target: str
    target_digest: str
    drafter: str  # "ngram", "early-exit:8", "layer-skip:10-14", or a model folder / hub id
    drafter_digest: str
    suite: str
    suite_digest: str  # of the prompts really used, after filter, sample and limit
    k: Count  # 0: the speculative loop with its drafter at rest, which is not the same as plain decoding
    batch: PositiveCount
    rule: Rule
    sampling: Sampling = Sampling()
    seed: int = 0
    max_new_tokens: PositiveCount
    ignore_eos: bool = False
    chat_template: bool | None  # None: the template for messages, raw text as it is
    dtype: str
    device: str
    draft_device: str
    engine: str = "native"
    repeats: PositiveCount = 1
    # Forced conditional acceptance of positions 1 … k; None: what the models agree on.
    synthetic: tuple[Rate, ...] | None = None
    graphs: bool = False  # rounds run from recordings (CUDA graphs)
    # Stop as soon as the acceptance length is known to this share of it; None: every prompt is measured.
    precision: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _synthetic_covers_k(self) -> CellSpec:
        if self.synthetic is not None and len(self.synthetic) != self.k:
            raise ValueError(f"{len(self.synthetic)} synthetic rates for K {self.k}")
        return self

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Left out where it is not used, so that the keys of older runs and audits stay what they were."""
        settings: dict[str, object] = serialize(self)
        for name, used in (("synthetic", self.synthetic), ("graphs", self.graphs), ("precision", self.precision)):
            if not used:
                del settings[name]
        return settings

    @property
    def key(self) -> str:
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:20]


class RoundCount(Record):
    """`count` rounds of one request that offered `drafted` tokens and kept `accepted` of them.

    A tree offers as many tokens as its longest path has.
    """

    drafted: Count
    accepted: Count
    count: PositiveCount

    @model_validator(mode="after")
    def _prefix_of_draft(self) -> RoundCount:
        if self.accepted > self.drafted:
            raise ValueError(f"accepted {self.accepted} of {self.drafted} drafted tokens")
        return self


class RequestResult(Record):
    """One request of one pass.

    `output_tokens` includes the first token, which comes from the prefill. `decode_seconds` runs from the first
    token to the last. `full_tokens`, `full_seconds` and `full_rounds` cover only rounds in which all B slots were
    busy; the decode throughput that follows from them is in `figures`.
    """

    id: str  # unique within the pass
    repeats: str | None = None  # the prompt id, where the prompt is repeated to fill the batch
    prompt_tokens: PositiveCount
    output_tokens: PositiveCount
    finish_reason: Literal["stop", "length", "context"]
    output_digest: str  # hash of the token ids: equal digests mean token-identical output
    ttft_seconds: NonNegative
    decode_seconds: NonNegative
    full_tokens: Count
    full_seconds: NonNegative
    full_rounds: Count | None = None  # None in older files
    rounds: tuple[RoundCount, ...]  # empty where the first token ended the request; drafted=0 rounds are included

    @property
    def prompt_id(self) -> str:
        return self.id if self.repeats is None else self.repeats


class RoundTimes(Record):
    """Medians and means over the full-occupancy rounds of a pass, in seconds."""

    rounds: Count  # how many rounds stand behind the figures
    draft_mean: NonNegative | None
    verify_mean: NonNegative | None
    overhead_mean: NonNegative | None
    draft_median: NonNegative | None
    verify_median: NonNegative | None
    overhead_median: NonNegative | None
    mean_context: NonNegative | None  # mean cached tokens per row
    draft_steps_mean: NonNegative | None  # drafter forwards per round (0 for n-gram)
    verified_nodes_mean: NonNegative | None = None  # draft tokens verified per row and round; None in older files


class PassResult(Record):
    """One walk over the suite's requests: plain (no draft) or speculative."""

    mode: Literal["plain", "speculative"]
    repeat: Count
    order: Count  # position in the A B B A sequence of this cell
    wall_seconds: Positive  # prefill included
    target_forwards: Count  # verify forwards, prefills not counted
    requests: Annotated[tuple[RequestResult, ...], Field(min_length=1)]
    times: RoundTimes


class Reading(Record):
    """A measured or derived number with its source, or null with the reason."""

    value: Finite | None
    source: str | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _null_has_reason(self) -> Reading:
        if self.value is None and not self.reason:
            raise ValueError("a null reading needs a reason")
        return self


class Bandwidth(Record):
    """Bytes a round must read, against the device's peak. MBU above 1 is never clipped: on a GPU the time is refused.

    `mbu_draft` and `mbu_verify` are those of a speculative round's two phases; None in files of older versions.
    """

    bytes_per_plain_step: Count
    bytes_per_round: Count
    peak_bytes_per_second: Reading  # the achievable peak, from the copy benchmark
    mbu_plain: Reading
    mbu_speculative: Reading
    mbu_draft: Reading | None = None
    mbu_verify: Reading | None = None
    dram_utilization: Reading  # NVML GPM, share of theoretical bandwidth
    memory_busy: Reading  # NVML utilization.memory: share of time, not bandwidth
    power_watts: Reading
    sm_clock_mhz: Reading
    throttle_reasons: tuple[str, ...] = ()


class Difference(Record):
    """Where one request's outputs part, and whether rounding explains it.

    `gap` is how far the less likely of the two tokens lies below the target's best logit there; `noise` is the largest
    change of a logit between two exact ways to compute it (one token at a time, and K + 1 at once).
    """

    id: str
    position: Count  # of the first differing output token
    gap: NonNegative
    noise: NonNegative
    is_tie: bool


class OutputCheck(Record):
    """Whether speculative and plain decoding gave the same tokens, where the rule promises it."""

    verdict: Literal["identical", "numeric ties", "different"]
    differences: tuple[Difference, ...] = ()


class OverlapCount(Record):
    """How much of p and q overlaps at one position of the draft, beside what was accepted there.

    `overlap` is the sum of 1 − TV(p, q) = Σ_v min(p(v), q(v)) over the `reached` drafted tokens that came up for
    acceptance, `variance` the sum of overlap·(1 − overlap). `accepted` of them were kept.
    """

    position: PositiveCount
    reached: Count
    accepted: Count
    overlap: NonNegative
    variance: NonNegative


class MemoryPlan(Record):
    """Predicted bytes at a cell's peak, by what they are for."""

    weight_bytes: Count
    kv_bytes: Count
    logits_bytes: Count
    layer_bytes: Count
    graph_bytes: Count = 0

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.logits_bytes + self.layer_bytes + self.graph_bytes


class Memory(Record):
    """What a cell was predicted to hold, and the most that its passes did hold: torch's peak on a GPU, else null."""

    plan: MemoryPlan
    predicted_bytes: Count
    measured_bytes: Reading


TokenKind = Literal["prefill", "draft", "correction", "bonus", "plain"]


class ExcerptPiece(Record):
    """Text of neighbouring tokens of one round that came from the same place."""

    text: str
    kind: TokenKind  # as `spectune generate` names them
    tokens: PositiveCount


class Excerpt(Record):
    """The start of what the first request of the first speculative pass read and wrote."""

    id: str  # of the request
    prompt: Annotated[str, Field(max_length=EXCERPT_PROMPT)]  # as rendered, special tokens left out
    prompt_cut: bool  # there was more of it
    pieces: Annotated[tuple[ExcerptPiece, ...], Field(min_length=1, max_length=EXCERPT_TOKENS)]
    cut: bool  # there was more of the output


class CellResult(Record):
    """A finished cell file. Passes come in pairs: each repeat has one plain and one speculative pass."""

    schema_version: Literal[1] = 1
    key: str
    spec: CellSpec
    started_at: str  # ISO 8601, UTC
    finished_at: str
    warmup_seconds: NonNegative
    passes: Annotated[tuple[PassResult, ...], Field(min_length=2)]
    bandwidth: Bandwidth
    output_check: OutputCheck | None  # None where the rule promises equal laws, not equal tokens
    overlap: tuple[OverlapCount, ...] = ()  # for speculative sampling in chains, where the engine sees distributions
    memory: Memory | None = None  # None in files of older versions
    excerpt: Excerpt | None = None  # left out of the file where there is none
    warnings: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_excerpt(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = serialize(self)
        if self.excerpt is None:
            del fields["excerpt"]
        return fields

    @model_validator(mode="after")
    def _passes_are_paired(self) -> CellResult:
        for repeat in {p.repeat for p in self.passes}:
            modes = sorted(p.mode for p in self.passes if p.repeat == repeat)
            if modes != ["plain", "speculative"]:
                raise ValueError(f"repeat {repeat} has passes {modes}, want one plain and one speculative")
        if self.key != self.spec.key:
            raise ValueError("key does not match the spec")
        return self


class FailedCell(Record):
    """Why a cell has no result; "infeasible" was predicted not to fit the device's memory, and not tried."""

    schema_version: Literal[1] = 1
    key: str
    spec: CellSpec
    failed_at: str
    reason: Literal["oom", "error", "refused", "infeasible"]
    message: str


class ModelInfo(Record):
    """Facts about a loaded model that the analysis and the theory card need."""

    name: str
    digest: str
    parameters: Count
    weight_bytes_per_step: Count  # read by one forward: embedding rows left out, a tied head counted once
    kv_bytes_per_token: Count
    layers: Count
    vocab_size: Count
    max_context: Count
    dtype: str
    device: str
    weights: WeightOrigin = "trained"
    activation_bytes_per_token: Count = 0  # of the widest layer; 0: unknown
    int8: bool = False  # weights are stored in 8 bits; states and keys are of `dtype`


class RunInfo(Record):
    """run.json: the plan and where it ran."""

    schema_version: Literal[1] = 1
    name: str
    created_at: str
    spectune_version: str
    command: tuple[str, ...]
    environment: dict[str, object]  # the fingerprint
    target: ModelInfo
    drafters: dict[str, ModelInfo | None]  # name as in CellSpec.drafter; None for n-gram
    plan: tuple[CellSpec, ...]
