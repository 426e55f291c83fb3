"""One token per row, drawn from the logits: temperature, top-k, top-p, min-p and the coin in a few small launches.

The result is that of `sampling.probabilities` and `random.pick`. Instead of sorting, the cut-off is searched for: a
logit's bits make an integer key of the same order, and eight passes of four bits each find the largest key above
which k tokens (top-k), or enough mass (top-p), remain. A pass is a launch over all tiles of the row.

Where it can differ: at the border of top-p or min-p, and where a coin meets the border between two tokens, by
rounding (here sums are float64 over tiles; torch adds up a sorted row in float32). Equal logits at the border of
top-p are cut from the lowest id up, as torch's sort leaves them.
"""

# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectune.decoding.random import Stream, pick, uniform
from spectune.decoding.sampling import NEGLIGIBLE_TEMPERATURE, probabilities
from spectune.kernels.checks import check_logits, check_rows
from spectune.kernels.coins import draw_tile, first_beyond
from spectune.kernels.logits import load_logits, tile_softmax
from spectune.sweeping.cell import Sampling

BLOCK = 2048
DIGITS = tl.constexpr(16)  # a pass settles four bits
LEVELS = 8


@triton.jit
def _load(logits_ptr, logits_row, row, ids, vocab, temperature):
    x = tl.div_rn(load_logits(logits_ptr + row * logits_row, ids, vocab), temperature)
    return tl.where(x == 0, 0.0, x)  # -0.0 equals 0.0, and its key must too


@triton.jit
def _key(x):
    """Integers in the order of the floats: 0 … 2**32 - 1."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _value(key):
    """The float of a key."""
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _top(stats_ptr, row, tiles, TILES: tl.constexpr):
    """Largest logit of the row; 0 where there is none."""
    tile = tl.arange(0, TILES)
    top = tl.max(tl.load(stats_ptr + row * 2 * tiles + tile, mask=tile < tiles, other=-float("inf")), 0)
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _stats_kernel(logits_ptr, logits_row, temperature, stats_ptr, vocab, tiles, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    top, total = tile_softmax(_load(logits_ptr, logits_row, row, ids, vocab, temperature))
    tl.store(stats_ptr + row * 2 * tiles + tile, top)
    tl.store(stats_ptr + row * 2 * tiles + tiles + tile, total)


@triton.jit
def _settle(lows_ptr, sums_ptr, amount, row, rows, tiles, level, TILES: tl.constexpr, MASS: tl.constexpr):
    """After `level` passes: the key so far, how much lies at or above it, and how much has to."""
    digit = tl.arange(0, DIGITS)
    tile = tl.arange(0, TILES)
    inside = (tile < tiles)[:, None] & (digit >= 0)[None, :]
    at = (row * tiles + tile)[:, None] * DIGITS + digit[None, :]
    first = tl.load(sums_ptr + at, mask=inside, other=0.0)
    last = tl.load(sums_ptr + (level - 1) * rows * tiles * DIGITS + at, mask=inside, other=0.0)
    goal = tl.max(tl.sum(first, 0), 0) * amount if MASS else amount
    above = tl.sum(last, 0)
    reached = tl.where(above >= goal, digit, 0)  # the sums fall from digit to digit; digit 0 was reached before
    chosen = tl.max(reached, 0)
    low = tl.load(lows_ptr + (level - 1) * rows + row) + (chosen.to(tl.int64) << (32 - 4 * level))
    return low, tl.sum(tl.where(digit == chosen, above, 0.0), 0), goal


@triton.jit(do_not_specialize=["level"])  # one program for all passes
def _pass_kernel(
    logits_ptr,
    logits_row,
    temperature,
    stats_ptr,
    floors_ptr,
    lows_ptr,
    sums_ptr,
    amount,
    rows,
    vocab,
    tiles,
    level,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Per tile and digit: how many tokens, or how much mass, lie at or above the key with that digit next."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    low = tl.full((), 0, tl.int64)
    if level > 0:
        low, _, _ = _settle(lows_ptr, sums_ptr, amount, row, rows, tiles, level, TILES, MASS)
    if tile == 0:
        tl.store(lows_ptr + level * rows + row, low)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = _load(logits_ptr, logits_row, row, ids, vocab, temperature)
    key = tl.where(ids < vocab, _key(x), -1)
    if MASS:
        weight = tl.exp(x - _top(stats_ptr, row, tiles, TILES))
        weight = tl.where(key >= tl.load(floors_ptr + row), weight, 0.0)
    else:
        weight = tl.where(ids < vocab, 1.0, 0.0)
    digit = tl.arange(0, DIGITS)
    edge = low + (digit.to(tl.int64) << (28 - 4 * level))
    sums = tl.sum(tl.where(key[:, None] >= edge[None, :], weight[:, None], 0.0), 0)
    at = ((level * rows + row) * tiles + tile) * DIGITS + digit
    tl.store(sums_ptr + at, sums.to(tl.float64))


@triton.jit
def _floor_kernel(
    stats_ptr,
    floors_ptr,
    surplus_ptr,
    lows_ptr,
    sums_ptr,
    amount,
    rows,
    tiles,
    LEVELS: tl.constexpr,
    MASS: tl.constexpr,
    TILES: tl.constexpr,
):
    """The lowest key that stays, and how many tokens of just that key top-p can still do without."""
    row = tl.program_id(0).to(tl.int64)
    floor, above, goal = _settle(lows_ptr, sums_ptr, amount, row, rows, tiles, LEVELS, TILES, MASS)
    tl.store(floors_ptr + row, floor)
    if MASS:
        weight = tl.exp(_value(floor) - _top(stats_ptr, row, tiles, TILES)).to(tl.float64)
        surplus = tl.where(weight > 0, tl.floor((above - goal) / weight), 0.0)
        tl.store(surplus_ptr + row, surplus.to(tl.int64))


@triton.jit
def _ties_kernel(logits_ptr, logits_row, temperature, floors_ptr, ties_ptr, vocab, tiles, BLOCK: tl.constexpr):
    """Tokens of the floor's key, per tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    key = _key(_load(logits_ptr, logits_row, row, ids, vocab, temperature))
    at_floor = tl.where(ids < vocab, key, -1) == tl.load(floors_ptr + row)
    tl.store(ties_ptr + row * tiles + tile, tl.sum(at_floor.to(tl.int32), 0))


@triton.jit
def _weights(
    logits_ptr,
    logits_row,
    temperature,
    stats_ptr,
    floors_ptr,
    surplus_ptr,
    ties_ptr,
    min_p,
    row,
    tile,
    vocab,
    tiles,
    CUT: tl.constexpr,
    TIES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """What is left of a tile's exponentials. -> [BLOCK] float64."""
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    x = _load(logits_ptr, logits_row, row, ids, vocab, temperature)
    weight = tl.exp(x - _top(stats_ptr, row, tiles, TILES))
    weight = tl.where(weight < min_p, 0.0, weight)
    if CUT:
        floor = tl.load(floors_ptr + row)
        key = tl.where(ids < vocab, _key(x), -1)
        if TIES:
            # Of the tokens at the floor the first ones go; the last always stays.
            each = tl.arange(0, TILES)
            ties = tl.load(ties_ptr + row * tiles + each, mask=each < tiles, other=0)
            dropped = tl.minimum(tl.load(surplus_ptr + row), tl.sum(ties, 0) - 1)
            at_floor = (key == floor).to(tl.int32)
            rank = tl.sum(tl.where(each < tile, ties, 0), 0) + tl.cumsum(at_floor, 0) - 1
            key = tl.where((key == floor) & (rank < dropped), -1, key)
        weight = tl.where(key >= floor, weight, 0.0)
    return weight.to(tl.float64)


@triton.jit
def _mass_kernel(
    logits_ptr,
    logits_row,
    temperature,
    stats_ptr,
    floors_ptr,
    surplus_ptr,
    ties_ptr,
    min_p,
    masses_ptr,
    vocab,
    tiles,
    CUT: tl.constexpr,
    TIES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    weights = _weights(
        logits_ptr,
        logits_row,
        temperature,
        stats_ptr,
        floors_ptr,
        surplus_ptr,
        ties_ptr,
        min_p,
        row,
        tile,
        vocab,
        tiles,
        CUT,
        TIES,
        BLOCK,
        TILES,
    )
    tl.store(masses_ptr + row * tiles + tile, tl.sum(weights, 0))


@triton.jit
def _draw_kernel(
    logits_ptr,
    logits_row,
    temperature,
    stats_ptr,
    floors_ptr,
    surplus_ptr,
    ties_ptr,
    min_p,
    masses_ptr,
    seeds_ptr,
    positions_ptr,
    token_ptr,
    vocab,
    tiles,
    CUT: tl.constexpr,
    TIES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, TILES)
    inside = each < tiles
    masses = tl.load(masses_ptr + row * tiles + each, mask=inside, other=0.0)
    whole = tl.sum(tl.load(stats_ptr + row * 2 * tiles + tiles + each, mask=inside, other=0.0), 0)  # NaN shows here
    tile, base, threshold, sound = draw_tile(seeds_ptr, positions_ptr, row, masses, TILES)
    weights = _weights(
        logits_ptr,
        logits_row,
        temperature,
        stats_ptr,
        floors_ptr,
        surplus_ptr,
        ties_ptr,
        min_p,
        row,
        tile,
        vocab,
        tiles,
        CUT,
        TIES,
        BLOCK,
        TILES,
    )
    token = tile * BLOCK + first_beyond(weights, base, threshold, BLOCK)
    tl.store(token_ptr + row, tl.where(sound & (whole < float("inf")), token, -1).to(tl.int64))


def sample(
    logits: torch.Tensor,
    sampling: Sampling,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row with the coins of `Stream.TARGET`. Nothing is read back; fit for a CUDA graph.

    Launches: 3, 9 more for top-k, 10 more for top-p.

    Args:
        logits: [B, V] float32, float16 or bfloat16, the vocabulary contiguous; a repetition penalty already applied.
        sampling: temperature above the negligible (greedy rows are `match_greedy`'s), top-k, top-p, min-p.
        seeds, positions: [B] int64, keys of the coins.
        out: [B] int64 to be written into.

    Returns:
        [B] int64; -1 in a row that holds NaN or no mass at all: the reader must raise.
    """
    rows, vocab = logits.shape
    check_logits("sample", logits)
    assert sampling.temperature >= NEGLIGIBLE_TEMPERATURE, f"temperature {sampling.temperature} is greedy"
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    check_rows(rows, logits.device, seeds=seeds, positions=positions, out=out)
    if rows == 0:
        return out

    tiles = triton.cdiv(vocab, BLOCK)
    blocks = {"BLOCK": BLOCK, "TILES": triton.next_power_of_2(tiles)}
    device = logits.device
    stats = torch.empty(rows, 2, tiles, dtype=torch.float32, device=device)
    floors = torch.zeros(rows, dtype=torch.int64, device=device)
    surplus = torch.zeros(rows, dtype=torch.int64, device=device)
    ties = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    masses = torch.empty(rows, tiles, dtype=torch.float64, device=device)
    source = (logits, logits.stride(0), float(sampling.temperature))
    grid = (rows, tiles)
    _stats_kernel[grid](*source, stats, vocab, tiles, BLOCK=BLOCK)

    top_k = 0 < sampling.top_k < vocab
    top_p = sampling.top_p < 1.0
    for wanted, amount, mass in ((top_k, float(sampling.top_k), False), (top_p, sampling.top_p, True)):
        if not wanted:
            continue
        lows = torch.empty(LEVELS, rows, dtype=torch.int64, device=device)
        sums = torch.empty(LEVELS, rows, tiles, DIGITS.value, dtype=torch.float64, device=device)
        for level in range(LEVELS):
            _pass_kernel[grid](
                *source,
                stats,
                floors,
                lows,
                sums,
                amount,
                rows,
                vocab,
                tiles,
                level=level,
                MASS=mass,
                **blocks,
                num_warps=8,
            )
        _floor_kernel[(rows,)](
            stats, floors, surplus, lows, sums, amount, rows, tiles, LEVELS=LEVELS, MASS=mass, TILES=blocks["TILES"]
        )
    if top_p:
        _ties_kernel[grid](*source, floors, ties, vocab, tiles, BLOCK=BLOCK)
    left = (*source, stats, floors, surplus, ties, sampling.min_p)
    cuts = {"CUT": top_k or top_p, "TIES": top_p, **blocks}
    _mass_kernel[grid](*left, masses, vocab, tiles, **cuts)
    _draw_kernel[(rows,)](*left, masses, seeds, positions, out, vocab, tiles, **cuts)
    return out


def sample_reference(
    logits: torch.Tensor, sampling: Sampling, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`sample` in plain torch, for sound rows."""
    u = uniform(seeds, Stream.TARGET, positions, torch.zeros_like(positions))
    return pick(probabilities(logits, sampling), u)
