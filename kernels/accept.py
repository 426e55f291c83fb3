"""Speculative sampling of a chain, straight from the logits: acceptance and the closing draw.

Four small launches, none of which writes probabilities: the softmax statistics of every tile of BLOCK logits; per row
the decision how many drafted tokens are kept; per tile the mass of the residual; the draw. The coins are those of
`CounterCoins`, so the result is that of `rules.speculative` on `sampling.probabilities`.

Where it can differ: exponentials and sums are rounded differently here, about 1e-6 of a probability. A coin that lies
so close to an acceptance ratio, or to the border between two tokens, may fall on its other side. With probabilities
that are exact in float32 nothing can differ.

Temperature is the only shaping done here. Rows with top-k, top-p or min-p stay on the torch path; a repetition
penalty is applied to the logits beforehand.
"""

# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectune.decoding.random import CounterCoins
from spectune.decoding.rules import Verdict, one_hot, speculative
from spectune.decoding.sampling import NEGLIGIBLE_TEMPERATURE, probabilities
from spectune.kernels.checks import check_chain, check_rows
from spectune.kernels.coins import ACCEPT, coin, draw_tile, first_beyond
from spectune.kernels.logits import load_logits, tile_softmax
from spectune.sweeping.cell import Sampling

BLOCK = 2048


@triton.jit
def _tiles_kernel(
    logits_ptr, logits_row, logits_place, counts_ptr, temperature, stats_ptr, k, vocab, tiles, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // (k + 1)).to(tl.int64)
    place = tl.program_id(0) % (k + 1)
    tile = tl.program_id(1)
    if place <= tl.load(counts_ptr + row):  # what stands behind a row's count is padding
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(logits_ptr + row * logits_row + place * logits_place, ids, vocab)
        top, total = tile_softmax(tl.div_rn(x, temperature))
        at = stats_ptr + (row * (k + 1) + place) * 2 * tiles + tile
        tl.store(at, top)
        tl.store(at + tiles, total)


@triton.jit
def _decide_kernel(
    logits_ptr,
    logits_row,
    logits_place,
    tokens_ptr,
    tokens_row,
    tokens_place,
    counts_ptr,
    q_ptr,
    q_row,
    q_place,
    seeds_ptr,
    positions_ptr,
    temperature,
    stats_ptr,
    accepted_ptr,
    rejected_ptr,
    closing_ptr,
    k,
    vocab,
    tiles,
    ONE_HOT: tl.constexpr,
    PLACES: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    tile = tl.arange(0, TILES)
    count = tl.minimum(tl.load(counts_ptr + row), k)
    drafted = place < count
    # Softmax of every place: [PLACES, TILES] -> [PLACES].
    at = stats_ptr + ((row * (k + 1) + place) * 2 * tiles)[:, None] + tile[None, :]
    written = (place <= count)[:, None] & (tile < tiles)[None, :]
    tops = tl.load(at, mask=written, other=-float("inf"))
    totals = tl.load(at + tiles, mask=written, other=0.0)
    top = tl.max(tops, 1)
    finite = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(totals * tl.exp(tops - finite[:, None]), 1)
    sound = (total > 0) & (total < float("inf"))

    token = tl.load(tokens_ptr + row * tokens_row + place * tokens_place, mask=drafted, other=0)
    legal = drafted & (token >= 0) & (token < vocab)
    x = tl.load(logits_ptr + row * logits_row + place * logits_place + token, mask=legal, other=-float("inf"))
    p = tl.div_rn(tl.exp(tl.div_rn(x.to(tl.float32), temperature) - finite), tl.where(sound, total, 1.0))
    if ONE_HOT:
        ratio = p
    else:
        q = tl.load(q_ptr + row * q_row + place * q_place + token, mask=legal, other=0.0)
        ratio = tl.where(q > 0, tl.div_rn(p, tl.where(q > 0, q, 1.0)), 0.0)
    u = coin(tl.load(seeds_ptr + row), ACCEPT, tl.load(positions_ptr + row), place.to(tl.int64))
    kept = legal & (u < tl.minimum(ratio, 1.0))
    accepted = tl.min(tl.where(kept, PLACES, place), 0)

    wrong = ((place <= count) & (sound == 0)) | (drafted & (legal == 0))
    bad = tl.max(wrong.to(tl.int32), 0) > 0
    accepted = tl.where(bad, 0, accepted)
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    # What closes the round: the token that was rejected there, and the softmax, whose NaN reaches the draw.
    here = place == accepted
    tl.store(rejected_ptr + row, tl.max(tl.where(here & legal, token, -1), 0))
    tl.store(closing_ptr + row * 2, tl.sum(tl.where(here, finite, 0.0), 0))
    tl.store(closing_ptr + row * 2 + 1, tl.where(bad, float("nan"), tl.sum(tl.where(here, total, 0.0), 0)))


@triton.jit
def _weights(
    logits_ptr,
    logits_row,
    logits_place,
    q_ptr,
    q_row,
    q_place,
    temperature,
    accepted_ptr,
    rejected_ptr,
    closing_ptr,
    row,
    ids,
    vocab,
    ONE_HOT: tl.constexpr,
):
    """p of the closing place and, after a rejection, relu(p - q); after full acceptance p twice."""
    accepted = tl.load(accepted_ptr + row)
    rejected = tl.load(rejected_ptr + row)
    top = tl.load(closing_ptr + row * 2)
    total = tl.load(closing_ptr + row * 2 + 1)
    x = load_logits(logits_ptr + row * logits_row + accepted * logits_place, ids, vocab)
    p = tl.div_rn(tl.exp(tl.div_rn(x, temperature) - top), total)
    if ONE_HOT:
        left = tl.where(ids == rejected, 0.0, p)
    else:
        end = tl.where(rejected >= 0, vocab, 0)
        q = tl.load(q_ptr + row * q_row + accepted * q_place + ids, mask=ids < end, other=0.0)
        left = p - q
        left = tl.where(left < 0, 0.0, left)  # keeps a NaN, which a maximum would drop
    return p, left


@triton.jit
def _residual_kernel(
    logits_ptr,
    logits_row,
    logits_place,
    q_ptr,
    q_row,
    q_place,
    temperature,
    accepted_ptr,
    rejected_ptr,
    closing_ptr,
    sums_ptr,
    vocab,
    tiles,
    ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    p, left = _weights(
        logits_ptr,
        logits_row,
        logits_place,
        q_ptr,
        q_row,
        q_place,
        temperature,
        accepted_ptr,
        rejected_ptr,
        closing_ptr,
        row,
        ids,
        vocab,
        ONE_HOT,
    )
    at = sums_ptr + row * 2 * tiles + tile
    tl.store(at, tl.sum(p.to(tl.float64), 0))
    tl.store(at + tiles, tl.sum(left.to(tl.float64), 0))


@triton.jit
def _draw_kernel(
    logits_ptr,
    logits_row,
    logits_place,
    q_ptr,
    q_row,
    q_place,
    temperature,
    accepted_ptr,
    rejected_ptr,
    closing_ptr,
    sums_ptr,
    seeds_ptr,
    positions_ptr,
    token_ptr,
    vocab,
    tiles,
    ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, TILES)
    at = sums_ptr + row * 2 * tiles + each
    p_sums = tl.load(at, mask=each < tiles, other=0.0)
    left_sums = tl.load(at + tiles, mask=each < tiles, other=0.0)
    # A residual without mass means that p equals q to rounding: p itself is then the right law.
    use_p = tl.sum(left_sums, 0) <= 0
    sums = tl.where(use_p, p_sums, left_sums)
    tile, base, threshold, sound = draw_tile(seeds_ptr, positions_ptr, row, sums, TILES)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    p, left = _weights(
        logits_ptr,
        logits_row,
        logits_place,
        q_ptr,
        q_row,
        q_place,
        temperature,
        accepted_ptr,
        rejected_ptr,
        closing_ptr,
        row,
        ids,
        vocab,
        ONE_HOT,
    )
    weights = tl.where(ids < vocab, tl.where(use_p, p, left), 0.0)
    token = tile * BLOCK + first_beyond(weights.to(tl.float64), base, threshold, BLOCK)
    tl.store(token_ptr + row, tl.where(sound, token, -1).to(tl.int64))
    tl.store(accepted_ptr + row, tl.where(sound, tl.load(accepted_ptr + row), 0))


def accept(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    q: torch.Tensor | None,
    temperature: float,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: Verdict | None = None,
) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023) of a chain. Nothing is read back; fit for a CUDA graph.

    Args:
        logits: [B, K + 1, V] the target's, float32, float16 or bfloat16; vocabulary contiguous, other strides free.
        tokens: [B, K] int64 drafted tokens; counts: [B] int64, how many of them are real.
        q: [B, K, V] float32, what the tokens were drawn from; None for a draft that did not sample (one-hot).
        temperature: above the negligible; greedy rows are `match_greedy`'s.
        seeds, positions: [B] int64, keys of the coins: the request's seed, the first position the round can emit.
        out: `accepted` and `token`, [B] int64 each, to be written into.

    Returns:
        accepted, token. A row whose logits or q hold NaN or no mass at all, or whose drafted token is outside the
        vocabulary, has token -1 and nothing accepted: the reader must raise.
    """
    rows, places, vocab = logits.shape
    k = places - 1
    check_chain("accept", logits, tokens, counts=counts, seeds=seeds, positions=positions)
    assert temperature >= NEGLIGIBLE_TEMPERATURE, f"accept samples; temperature {temperature} is greedy"
    if q is not None:
        assert q.shape == (rows, k, vocab), f"q must be {[rows, k, vocab]}, not {list(q.shape)}"
        assert q.dtype == torch.float32, f"q must be float32, not {q.dtype}"
        assert q.device == logits.device, f"q must be on {logits.device}, not on {q.device}"
        assert k == 0 or q.stride(2) == 1, "accept needs a q whose vocabulary is contiguous"
    out = out or Verdict(torch.empty_like(counts), torch.empty_like(counts))
    check_rows(rows, logits.device, accepted=out.accepted, token=out.token)
    if rows == 0:
        return out

    tiles = triton.cdiv(vocab, BLOCK)
    stats = torch.empty(rows, places, 2, tiles, dtype=torch.float32, device=logits.device)
    closing = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, 2, tiles, dtype=torch.float64, device=logits.device)
    rejected = torch.empty_like(counts)
    target = (logits, *logits.stride()[:2])
    offered = (logits, 0, 0) if q is None else (q, *q.stride()[:2])  # compiled kernels take no null pointer
    sizes = {"vocab": vocab, "tiles": tiles}
    one_hot_q = q is None or k == 0
    padded = triton.next_power_of_2(tiles)
    _tiles_kernel[(rows * places, tiles)](*target, counts, float(temperature), stats, k, **sizes, BLOCK=BLOCK)
    _decide_kernel[(rows,)](
        *target,
        tokens,
        *tokens.stride(),
        counts,
        *offered,
        seeds,
        positions,
        float(temperature),
        stats,
        out.accepted,
        rejected,
        closing,
        k,
        **sizes,
        ONE_HOT=one_hot_q,
        PLACES=triton.next_power_of_2(places),
        TILES=padded,
    )
    left = (*target, *offered, float(temperature), out.accepted, rejected, closing)
    _residual_kernel[(rows, tiles)](*left, sums, **sizes, ONE_HOT=one_hot_q, BLOCK=BLOCK)
    _draw_kernel[(rows,)](
        *left, sums, seeds, positions, out.token, **sizes, ONE_HOT=one_hot_q, BLOCK=BLOCK, TILES=padded
    )
    return out


def accept_reference(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    q: torch.Tensor | None,
    temperature: float,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> Verdict:
    """`accept` in plain torch, for sound rows."""
    p = probabilities(logits, Sampling(temperature=temperature))
    q = one_hot(tokens, logits.shape[-1], p.dtype) if q is None else q
    return speculative(tokens, counts, p, q, CounterCoins(seeds, positions))
