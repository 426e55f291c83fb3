"""Why two outputs of one request differ: a near-tie that rounding decides, or a mistake.

Verifying K + 1 tokens at once multiplies other shapes than decoding one by one, and sums in another order. Where the
two best logits lie closer than that noise, either token is a right answer of greedy decoding. The noise is measured at
the very place, with fresh caches, so an error of the decoder cannot excuse itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectune.decoding.adapter import CausalModel
from spectune.decoding.cache import KVStore, Step
from spectune.decoding.random import Stream, uniform
from spectune.decoding.sampling import is_greedy, penalize, probabilities
from spectune.engines.engine import Request
from spectune.sweeping.cell import Difference, Sampling

# A run's cache holds entries of many shapes, each with its own rounding; two fresh shapes show only part of that.
NOISE_FACTOR = 4.0
ULPS = 2.0


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one is a prefix of the other."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@torch.inference_mode()
def find_difference(
    model: CausalModel,
    request: Request,
    first: Sequence[int],
    second: Sequence[int],
    *,
    width: int,
    batch: int = 1,
    sampling: Sampling | None = None,
) -> Difference:
    """Judge the first difference between two outputs of a request.

    Greedy choices are compared by their logits. A sampled choice is where the request's coin falls in the cumulative
    distribution, so there the distances are between the coin and the chosen tokens' intervals.

    Args:
        width: tokens a verification feeds at once, K + 1.
        batch: rows the cell decodes at once.
        sampling: the cell's settings; greedy if None.
    """
    sampling = sampling or Sampling()
    position = first_difference(first, second)
    if position >= min(len(first), len(second)):
        # The same tokens, but one output ends early: no rounding does that.
        return Difference(id=request.id, position=position, gap=0.0, noise=0.0, is_tie=False)
    known = [*request.token_ids, *first[:position]]
    logits = _ways(model, known, first[position : position + width - 1], batch)  # [ways, V]
    seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=model.device)
    seen[known] = True
    logits = penalize(logits, seen, sampling.repetition_penalty)
    chosen = [first[position], second[position]]
    eps = torch.finfo(model.model.dtype).eps
    if is_greedy(sampling):
        noise = (logits.amax(0) - logits.amin(0)).max().item()
        gap = (logits.amax(-1) - logits[:, chosen].amin(-1)).min().item()
        floor = ULPS * eps * 2.0 ** torch.floor(torch.log2(logits.abs().max())).item()
    else:
        edges = probabilities(logits, sampling).double().cumsum(-1)
        edges = edges / edges[:, -1:]
        noise = (edges.amax(0) - edges.amin(0)).max().item()
        at, zero = torch.tensor(len(known), device=model.device), torch.tensor(0, device=model.device)
        coin = uniform(torch.tensor(request.seed, device=model.device), Stream.TARGET, at, zero)
        below = torch.nn.functional.pad(edges, (1, 0))[:, :-1]
        outside = torch.maximum(below - coin, coin - edges).clamp(min=0)  # how far the coin is from each interval
        gap = outside[:, chosen].amax(-1).min().item()
        floor = ULPS * eps
    tie = gap <= max(NOISE_FACTOR * noise, floor)
    return Difference(id=request.id, position=position, gap=gap, noise=noise, is_tie=tie)


def _ways(model: CausalModel, known: list[int], ahead: Sequence[int], batch: int) -> Tensor:
    """The logits behind `known`, computed in the shapes a cell uses: 1 or `batch` rows, 1 or K + 1 tokens."""
    rows = max(1, batch)
    store = KVStore(rows, len(known) + len(ahead))
    if len(known) > 1:
        prefix = torch.tensor([known[:-1]], device=model.device)
        model.forward(prefix, Step(0, (0,), len(known) - 1, model.device), store, last_only=True)
        for row in range(1, rows):
            store.move(0, row)
    block = torch.tensor([[known[-1], *ahead]], device=model.device)
    found = []
    for count in {1, rows}:
        for ids in (block, block[:, :1]):
            step = Step(0, (len(known) - 1,) * count, ids.shape[1], model.device)
            found.append(model.forward(ids.repeat(count, 1), step, store)[0, 0].float())
    return torch.stack(found)
