"""Counter-based coins and draws inside kernels: `decoding/random.py` in Triton, bit for bit.

`coin` is the same integer mix and gives the same float64 numbers. `first_beyond` inverts a cumulative sum as `pick`
does; a kernel applies it twice, to the tiles of a row (`draw_tile`) and to the tile that holds the coin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectune.decoding.random import Stream, uniform
from spectune.kernels.checks import check_rows

BLOCK = 1024

ACCEPT = tl.constexpr(int(Stream.ACCEPT))
TARGET = tl.constexpr(int(Stream.TARGET))
_GOLDEN = tl.constexpr(-0x61C8864680B583EB)
_FIRST = tl.constexpr(-0x40A7B892E31B1A47)
_SECOND = tl.constexpr(-0x6B2FB644ECCEEE15)


@triton.jit
def _mix(x):
    # `>>` alone copies the sign; the masks make it a logical shift.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def coin(seed, STREAM: tl.constexpr, position, index):
    """Coins in (0, 1), float64; the arguments are int64 and broadcast."""
    stream = tl.full((1,), STREAM, tl.int64)
    x = _mix((seed + _GOLDEN) ^ _mix(stream + _GOLDEN))
    x = _mix((x + _GOLDEN) ^ _mix(position + _GOLDEN))
    x = _mix((x + _GOLDEN) ^ _mix(index + _GOLDEN))
    return (((x >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52


@triton.jit
def first_beyond(weights, base, threshold, N: tl.constexpr):
    """The first place whose cumulative weight exceeds the threshold. [N] float64 -> a place, -1 without any weight.

    `base` is what lies before the first place. A place of no weight is never returned, however sums are rounded.
    """
    place = tl.arange(0, N)
    cumulative = base + tl.cumsum(weights, 0)
    first = tl.min(tl.where((cumulative > threshold) & (weights > 0), place, N), 0)
    last = tl.max(tl.where(weights > 0, place, -1), 0)
    return tl.minimum(first, last)


@triton.jit
def draw_tile(seeds_ptr, positions_ptr, row, sums, N: tl.constexpr):
    """The tile that holds the row's coin of the target. sums: [N] float64, the weight of each tile.

    -> tile, the weight before it, the threshold that the coin sets, whether the weights are finite and not all zero.
    """
    total = tl.sum(sums, 0)
    zero = tl.zeros((1,), tl.int64)
    u = tl.max(coin(tl.load(seeds_ptr + row), TARGET, tl.load(positions_ptr + row), zero), 0)
    # A coin is at most 1 - 2**-53, so the threshold stays below the total.
    threshold = u * total
    tile = first_beyond(sums, 0.0, threshold, N)
    sound = (total < float("inf")) & (tile >= 0)
    tile = tl.maximum(tile, 0)
    base = tl.sum(tl.where(tl.arange(0, N) < tile, sums, 0.0), 0)
    return tile, base, threshold, sound


@triton.jit
def _coins_kernel(seeds_ptr, positions_ptr, indices_ptr, out_ptr, n, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    seed = tl.load(seeds_ptr + place, mask=mask, other=0)
    position = tl.load(positions_ptr + place, mask=mask, other=0)
    index = tl.load(indices_ptr + place, mask=mask, other=0)
    tl.store(out_ptr + place, coin(seed, STREAM, position, index), mask=mask)


def coins(seeds: torch.Tensor, stream: Stream, positions: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Coins of `n` keys: three [n] int64 tensors -> [n] float64."""
    check_rows(seeds.numel(), seeds.device, seeds=seeds, positions=positions, indices=indices)
    out = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    if seeds.numel():
        grid = (triton.cdiv(seeds.numel(), BLOCK),)
        _coins_kernel[grid](seeds, positions, indices, out, seeds.numel(), int(stream), BLOCK)
    return out


def coins_reference(
    seeds: torch.Tensor, stream: Stream, positions: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    """`coins` in plain torch."""
    return uniform(seeds, stream, positions, indices)
