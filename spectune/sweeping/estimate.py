"""How much work a plan is: tokens, time left, and before measuring a floor for time and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from spectune.engines.engine import Request
from spectune.measuring.bytes_model import TheoryCard
from spectune.suites.prompt import Suite
from spectune.sweeping.cell import CellSpec, ModelInfo
from spectune.sweeping.memory import bytes_per_weight, is_part_of, own_kv_bytes


def planned_tokens(spec: CellSpec, suite: Suite) -> int:
    """New tokens of all passes of a cell if no stop token comes first."""
    once = sum(min(p.max_new_tokens or spec.max_new_tokens, spec.max_new_tokens) for p in suite.prompts)
    turns = -(-spec.batch // len(suite.prompts))  # the suite is repeated until it fills the batch
    return 2 * spec.repeats * turns * once


class TimeLeft:
    """Time left, from the planned tokens and the pace of finished cells; each batch has its own pace."""

    def __init__(self, suites: Mapping[str, Suite]) -> None:
        self._suites = suites
        self._seconds: dict[int, float] = defaultdict(float)
        self._tokens: dict[int, int] = defaultdict(int)

    def record(self, spec: CellSpec, seconds: float) -> None:
        """A cell took this long, warm-up included."""
        self._seconds[spec.batch] += seconds
        self._tokens[spec.batch] += planned_tokens(spec, self._suites[spec.suite])

    def seconds(self, remaining: Iterable[CellSpec]) -> float | None:
        """None before the first cell is recorded."""
        if not self._tokens:
            return None
        pace = {batch: self._seconds[batch] / tokens for batch, tokens in self._tokens.items()}
        usual = sum(self._seconds.values()) / sum(self._tokens.values())
        return sum(planned_tokens(spec, self._suites[spec.suite]) * pace.get(spec.batch, usual) for spec in remaining)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan needs at the least, as assumed. `seconds` is None where no peak is known."""

    cells: int
    tokens: int
    seconds: float | None
    assumption: str
    weight_bytes: int
    kv_bytes: int  # of the largest cell


def estimate(
    plan: Sequence[CellSpec],
    suites: Mapping[str, Suite],
    requests: Mapping[str, Sequence[Request]],
    target: ModelInfo,
    drafters: Mapping[str, ModelInfo | None],
    card: TheoryCard,
) -> Estimate:
    """A floor for time and memory. `requests` are the rendered suites, by name."""
    tokens = [planned_tokens(spec, suites[spec.suite]) for spec in plan]
    ceilings = {theory.batch: theory.ceiling_tokens_per_second for theory in card.batches}
    seconds, reasons = 0.0, []
    for spec, count in zip(plan, tokens, strict=True):
        ceiling = ceilings[spec.batch]
        if ceiling.value:
            seconds += count / ceiling.value
        else:
            reasons.append(ceiling.reason)
    models = [target, *(d for d in drafters.values() if d is not None and not is_part_of(target, d))]
    return Estimate(
        cells=len(plan),
        tokens=sum(tokens),
        seconds=None if reasons else seconds,
        assumption=str(reasons[0]) if reasons else _ASSUMPTION,
        weight_bytes=sum(model.parameters * bytes_per_weight(model) for model in models),
        kv_bytes=max(_kv_bytes(spec, requests[spec.suite], target, drafters[spec.drafter]) for spec in plan),
    )


def mean_context(requests: Mapping[str, Sequence[Request]]) -> float:
    """Mean cached tokens halfway through the output, over all requests."""
    return fmean(len(r.token_ids) + r.max_new_tokens / 2 for suite in requests.values() for r in suite)


_ASSUMPTION = (
    "every pass decodes at the bandwidth ceiling of plain decoding and to its token limit; prefill, "
    "drafting, overhead and warm-up come on top, accepted drafts and stop tokens save time"
)


def _kv_bytes(spec: CellSpec, requests: Sequence[Request], target: ModelInfo, drafter: ModelInfo | None) -> int:
    longest = max(len(r.token_ids) + r.max_new_tokens for r in requests) + spec.k
    return spec.batch * longest * (target.kv_bytes_per_token + own_kv_bytes(target, drafter))
