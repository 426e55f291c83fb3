"""Where the Triton kernels take the place of plain torch: on CUDA, for what they cover; everything else stays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectune.decoding.cache import KVStore, Step
from spectune.decoding.drafter import Draft, Round
from spectune.decoding.rules import Verdict
from spectune.sweeping.cell import Sampling

_LARGEST_HEAD = 256


def usable(device: torch.device) -> bool:
    """Whether kernels run on the device."""
    return device.type == "cuda"


def attend(
    query: Tensor, keys: Tensor, values: Tensor, step: Step, scaling: float | None, window: int | None
) -> Tensor | None:
    """Attention of a step whose places only the device knows. Shapes as in `adapter.attend`; None: not covered."""
    if not isinstance(step.starts, Tensor) or not usable(query.device) or query.shape[-1] > _LARGEST_HEAD:
        return None
    from spectune.kernels.tree_attention import tree_attention

    tail = step.tail
    if tail is None:
        return tree_attention(query, keys, values, step.starts, scale=scaling, window=window)
    if window is not None or not isinstance(tail.base, Tensor):
        return None
    return tree_attention(query, keys, values, tail.base, tail.visible.contiguous(), scale=scaling)


def accept(logits: Tensor, draft: Draft, round_: Round) -> Verdict | None:
    """A chain's verdict from the target's penalised logits [B, K + 1, V]; None: not covered.

    A row without a usable distribution has token -1.
    """
    if not usable(logits.device) or draft.tree is not None:
        return None
    if round_.rule == "greedy":
        from spectune.kernels.match import match_greedy

        found = match_greedy(logits, draft.tokens, draft.counts)
    elif round_.rule == "speculative" and _plain(round_.sampling):
        from spectune.kernels.accept import accept as fused

        seeds, positions = round_.seeds(logits.device), round_.positions(logits.device)
        temperature = round_.sampling.temperature
        found = fused(logits, draft.tokens, draft.counts, draft.probabilities, temperature, seeds, positions)
    else:
        return None
    return Verdict(found.accepted, found.token)


def _plain(sampling: Sampling) -> bool:
    """Whether the temperature alone shapes the distribution."""
    return sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0


def prepare(store: KVStore) -> None:
    """Let a cache move paths by kernel, before that is recorded."""
    buffers = [*store.keys.values(), *store.values.values()]
    if not buffers or not usable(buffers[0].device):
        return
    if not isinstance(store.compaction, Compaction) or store.compaction.addresses != _addresses(buffers):
        store.compaction = Compaction(buffers)


def _addresses(buffers: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in buffers)


class Compaction:
    """Moves accepted paths in the buffers of a cache, all layers of one kind in one launch.

    Made before anything is recorded, since the addresses have to be sent to the device.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        from spectune.kernels.compact import buffer_table

        kinds: dict[tuple[object, ...], list[Tensor]] = {}
        for x in buffers:
            kinds.setdefault((x.shape, x.stride(), x.dtype), []).append(x)
        self.addresses = _addresses(buffers)
        self.tables = [buffer_table(kind) for kind in kinds.values()]

    def __call__(self, starts: Tensor, path: Tensor, accepted: Tensor) -> None:
        """starts, accepted: [B]; path: [B, D + 1]."""
        from spectune.kernels.compact import compact

        for table in self.tables:
            compact(table, starts, path, accepted)
