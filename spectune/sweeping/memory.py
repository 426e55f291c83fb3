"""The memory plan: the most bytes that a cell's passes hold at once, from sizes alone. Pure.

    weights     of the target and of every draft of the sweep on its device: they stay loaded
    caches      keys and values of the target and of the cell's own draft, for every row up to its last token, and K + 1
                slots more, which a round may write behind it; where plain decoding takes turns with it, its too
    logits      of K + 1 places a row, and what sampling makes of them: see `_bytes_per_logit`
    layer       the widest point of a layer for the longest prefill, or for the places that a round verifies
    graphs      private pools of captured CUDA graphs, as the engine states them

What the plan leaves out is small beside these: token ids, masks, a tree's spare slots, an allocator's waste. The
fraction of the device that cells may fill leaves room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from spectune.engines.engine import Request
from spectune.sweeping.cell import CellSpec, MemoryPlan, ModelInfo, Sampling
from spectune.sweeping.drafter_names import runs_on_target_cache
from spectune.sweeping.recording import interleaved

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # per parameter
_FLOAT, _DOUBLE, _INDEX = 4, 8, 8


@dataclass(frozen=True, slots=True)
class Device:
    """Where a sweep runs. `fraction` of `total_bytes` may be filled; None where the size is unknown."""

    name: str
    total_bytes: int | None
    fraction: float

    @property
    def limit(self) -> int | None:
        return None if self.total_bytes is None else int(self.fraction * self.total_bytes)


@dataclass(frozen=True, slots=True)
class Load:
    """What a cell puts on the device: everything `plan_memory` needs.

    `context` is the longest prompt with its new tokens; `weight_bytes` covers all models that stay loaded there.
    """

    target: ModelInfo
    drafter: ModelInfo | None
    weight_bytes: int
    batch: int
    context: int
    longest_prompt: int
    k: int
    rule: str
    sampling: Sampling
    graph_bytes: int = 0
    takes_turns: bool = False  # plain decoding runs beside, with a cache of its own


def load_of(
    spec: CellSpec, requests: Sequence[Request], target: ModelInfo, drafters: Mapping[str, ModelInfo | None]
) -> Load:
    """The load of a cell on its target's device. `drafters` are all of the sweep, `requests` the rendered suite."""
    own = drafters[spec.drafter]
    return Load(
        target=target,
        drafter=own if own is not None and own.device == target.device else None,
        weight_bytes=weight_bytes(target, drafters.values()),
        batch=spec.batch,
        context=max(len(r.token_ids) + r.max_new_tokens for r in requests),
        longest_prompt=max(len(r.token_ids) for r in requests),
        k=spec.k,
        rule=spec.rule,
        sampling=spec.sampling,
        takes_turns=interleaved(spec),
    )


def weight_bytes(target: ModelInfo, drafters: Iterable[ModelInfo | None]) -> int:
    """Bytes of all weights on the target's device; the target's own layers count once."""
    there = [d for d in drafters if d is not None and d.device == target.device and not is_part_of(target, d)]
    return sum(model.parameters * bytes_per_weight(model) for model in (target, *there))


def bytes_per_weight(model: ModelInfo) -> int:
    return 1 if model.int8 else BYTES.get(model.dtype, 4)


def is_part_of(target: ModelInfo, drafter: ModelInfo) -> bool:
    """Whether the drafter is some of the target's layers: it shares their weights and cache."""
    return drafter.digest.startswith(f"{target.digest}/")


def own_kv_bytes(target: ModelInfo, drafter: ModelInfo | None) -> int:
    """Bytes per token of a drafter's own cache; copies of the target in 8 bits run on the target's."""
    if drafter is None or is_part_of(target, drafter) or runs_on_target_cache(drafter.name):
        return 0
    return drafter.kv_bytes_per_token


def plan_memory(load: Load) -> MemoryPlan:
    """Bytes by what they are for."""
    target, draft = load.target, load.drafter
    slots = load.context + load.k + 1
    row = slots * (target.kv_bytes_per_token + own_kv_bytes(target, draft))
    if load.takes_turns:
        row += (load.context + 1) * target.kv_bytes_per_token
    verified = load.batch * (load.k + 1)
    return MemoryPlan(
        weight_bytes=load.weight_bytes,
        kv_bytes=load.batch * row,
        logits_bytes=verified * target.vocab_size * _bytes_per_logit(load),
        layer_bytes=max(load.longest_prompt, verified) * target.activation_bytes_per_token,
        graph_bytes=load.graph_bytes,
    )


def _bytes_per_logit(load: Load) -> int:
    """Bytes held for one logit of the verification at the moment when most is held."""
    logits = BYTES.get(load.target.dtype, 4)
    if load.sampling.greedy:
        return logits
    sampled = 2 * _FLOAT  # p, and the scaled logits that it is made from
    if load.sampling.top_p < 1:
        sampled += 2 * _FLOAT + _INDEX  # sorted logits, their order, their cumulative sum
    # After p: what the rule needs beside it.
    if load.rule == "match":
        judged = _FLOAT + 2 * _DOUBLE  # the cumulative sum to draw from
    else:
        judged = 2 * _FLOAT + (_INDEX if load.drafter is None else 0)  # p and q; a lookup's q is made of whole numbers
        if load.rule == "block":
            judged += 2 * _FLOAT
    return logits + max(sampled, judged)


def infeasible(load: Load, device: Device) -> str | None:
    """Why a cell cannot run, with the largest batch and context that can; None where it fits or the size is unknown."""
    limit = device.limit
    needed = plan_memory(load).total_bytes
    if limit is None or needed <= limit:
        return None
    lacking = (
        f"{size(needed)} are needed, and {device.fraction:.0%} of {device.name} are {size(limit)} ({describe(load)})"
    )
    if plan_memory(_with(load, batch=1, context=load.k + 2)).total_bytes > limit:
        return f"{lacking}; no batch and no context fits beside these weights"
    batch = _largest(lambda n: plan_memory(_with(load, batch=n)).total_bytes <= limit, load.batch)
    context = _largest(lambda n: plan_memory(_with(load, context=n)).total_bytes <= limit, load.context)
    fits = [f"batch {batch} fits at context {load.context}"] if batch else []
    fits += [f"context {context} fits at batch {load.batch}"] if context else []
    return f"{lacking}; {' and '.join(fits) or 'a smaller batch and a shorter context may fit together'}"


def describe(load: Load) -> str:
    """A load's parts in words."""
    plan = plan_memory(load)
    parts = [
        ("weights", plan.weight_bytes),
        ("key-value caches", plan.kv_bytes),
        ("logits", plan.logits_bytes),
        ("widest layer", plan.layer_bytes),
        ("graphs", plan.graph_bytes),
    ]
    return ", ".join(f"{name} {size(count)}" for name, count in parts if count)


def memory_lines(loads: Iterable[Load], device: Device) -> list[str]:
    """The plan for people: the largest cell of each batch, and whether it fits."""
    largest: dict[int, Load] = {}
    for load in loads:
        known = largest.get(load.batch)
        if known is None or plan_memory(load).total_bytes > plan_memory(known).total_bytes:
            largest[load.batch] = load
    whole = "unknown" if device.total_bytes is None else size(device.total_bytes)
    lines = [f"memory  {device.name} has {whole}; cells may fill {device.fraction:.0%}"]
    for batch, load in sorted(largest.items()):
        verdict = "" if infeasible(load, device) is None else ": does not fit"
        total = size(plan_memory(load).total_bytes)
        lines.append(f"  batch {batch}: {total} at context {load.context} and K {load.k} ({describe(load)}){verdict}")
    return lines


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _with(load: Load, *, batch: int | None = None, context: int | None = None) -> Load:
    context = load.context if context is None else context
    return replace(
        load,
        batch=load.batch if batch is None else batch,
        context=context,
        longest_prompt=min(load.longest_prompt, context),
    )


def _largest(fits: Callable[[int], bool], below: int) -> int:
    """The largest n < below that fits; 0 where none does. Sizes grow with n."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
