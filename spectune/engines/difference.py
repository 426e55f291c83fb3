"""Why two outputs of one request differ: a near-tie that rounding decides, or a mistake.

Verifying K + 1 tokens at once multiplies other shapes than decoding one by one, and sums in another order. Where the
two best logits lie closer than that noise, either token is a right answer of greedy decoding. The noise is measured at
the very place, with fresh caches, so an error of the decoder cannot excuse itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step
from spectune.engines.engine import Request
from spectune.sweeping.cell import Difference

# A run's cache holds entries of many shapes, each with its own rounding; two fresh shapes show only part of that.
NOISE_FACTOR = 4.0
ULPS = 2.0


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one is a prefix of the other."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@torch.inference_mode()
def find_difference(
    model: CausalModel, request: Request, first: Sequence[int], second: Sequence[int], *, width: int
) -> Difference:
    """Judge the first difference between two outputs of a request.

    Args:
        width: tokens a verification feeds at once, K + 1.
    """
    position = first_difference(first, second)
    if position >= min(len(first), len(second)):
        # The same tokens, but one output ends early: no rounding does that.
        return Difference(id=request.id, position=position, gap=0.0, noise=0.0, is_tie=False)
    known = [*request.token_ids, *first[:position]]
    ahead = list(first[position : position + width - 1])
    store = KVStore(1, len(known) + width)
    device = model.device
    if len(known) > 1:
        prefix = torch.tensor([known[:-1]], device=device)
        model.forward(prefix, Step(0, (0,), len(known) - 1, device), store, last_only=True)
    start = (len(known) - 1,)
    block = torch.tensor([[known[-1], *ahead]], device=device)
    wide = model.forward(block, Step(0, start, block.shape[1], device), store)[0, 0].float()
    single = model.forward(block[:, :1], Step(0, start, 1, device), store)[0, 0].float()
    noise = (wide - single).abs().max().item()
    chosen = [first[position], second[position]]
    gap = min((logits.max() - logits[chosen].min()).item() for logits in (wide, single))
    top = wide.abs().max()
    ulp = (torch.finfo(model.model.dtype).eps * 2.0 ** torch.floor(torch.log2(top))).item()
    tie = gap <= max(NOISE_FACTOR * noise, ULPS * ulp)
    return Difference(id=request.id, position=position, gap=gap, noise=noise, is_tie=tie)
