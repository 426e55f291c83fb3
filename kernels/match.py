"""Greedy decoding of a chain, straight from the logits: argmax at every place, then the matching prefix.

Of equal logits the first wins, as in `torch.argmax` on a CPU; on CUDA torch promises no order. Without drafted
tokens (K = 0) this is the plain greedy choice.
"""

# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectune.decoding.rules import Verdict, match
from spectune.kernels.checks import check_chain, check_rows
from spectune.kernels.logits import load_logits

BLOCK = 4096


@triton.jit
def _tiles_kernel(
    logits_ptr, logits_row, logits_place, counts_ptr, tops_ptr, ids_ptr, k, vocab, tiles, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // (k + 1)).to(tl.int64)
    place = tl.program_id(0) % (k + 1)
    tile = tl.program_id(1)
    if place <= tl.load(counts_ptr + row):
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(logits_ptr + row * logits_row + place * logits_place, ids, vocab)
        # In a compiled maximum NaN may lose; as the largest it is seen below.
        x = tl.where(x == x, x, float("inf"))
        top = tl.max(x, 0)
        at = (row * (k + 1) + place) * tiles + tile
        tl.store(tops_ptr + at, top)
        tl.store(ids_ptr + at, tl.min(tl.where(x == top, ids, vocab), 0))


@triton.jit
def _match_kernel(
    tokens_ptr,
    tokens_row,
    tokens_place,
    counts_ptr,
    tops_ptr,
    ids_ptr,
    accepted_ptr,
    token_ptr,
    k,
    vocab,
    tiles,
    PLACES: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    tile = tl.arange(0, TILES)
    count = tl.minimum(tl.load(counts_ptr + row), k)
    at = ((row * (k + 1) + place) * tiles)[:, None] + tile[None, :]
    written = (place <= count)[:, None] & (tile < tiles)[None, :]
    tops = tl.load(tops_ptr + at, mask=written, other=-float("inf"))
    ids = tl.load(ids_ptr + at, mask=written, other=vocab)
    top = tl.max(tops, 1)
    choice = tl.min(tl.where(tops == top[:, None], ids, vocab), 1)
    drafted = tl.load(tokens_ptr + row * tokens_row + place * tokens_place, mask=place < count, other=-1)
    kept = (place < count) & (drafted == choice)
    accepted = tl.min(tl.where(kept, PLACES, place), 0)
    # +inf is no logit, and NaN was made one.
    bad = tl.max(((place <= count) & (top == float("inf"))).to(tl.int32), 0) > 0
    token = tl.sum(tl.where(place == accepted, choice, 0), 0)
    tl.store(accepted_ptr + row, tl.where(bad, 0, accepted).to(tl.int64))
    tl.store(token_ptr + row, tl.where(bad, -1, token).to(tl.int64))


def match_greedy(
    logits: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, out: Verdict | None = None
) -> Verdict:
    """Keep drafted tokens while they are the target's argmax. Nothing is read back; fit for a CUDA graph.

    Args:
        logits: [B, K + 1, V] float32, float16 or bfloat16; vocabulary contiguous, other strides free.
        tokens: [B, K] int64 drafted tokens; counts: [B] int64, how many of them are real.
        out: `accepted` and `token`, [B] int64 each, to be written into.

    Returns:
        accepted, token. A row whose logits hold NaN or +inf has token -1 and nothing accepted: the reader must raise.
    """
    rows, places, vocab = logits.shape
    k = places - 1
    check_chain("match", logits, tokens, counts=counts)
    out = out or Verdict(torch.empty_like(counts), torch.empty_like(counts))
    check_rows(rows, logits.device, accepted=out.accepted, token=out.token)
    if rows == 0:
        return out
    tiles = triton.cdiv(vocab, BLOCK)
    tops = torch.empty(rows, places, tiles, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, places, tiles, dtype=torch.int32, device=logits.device)
    sizes = {"k": k, "vocab": vocab, "tiles": tiles}
    _tiles_kernel[(rows * places, tiles)](logits, *logits.stride()[:2], counts, tops, ids, **sizes, BLOCK=BLOCK)
    _match_kernel[(rows,)](
        tokens,
        *tokens.stride(),
        counts,
        tops,
        ids,
        *out,
        **sizes,
        PLACES=triton.next_power_of_2(places),
        TILES=triton.next_power_of_2(tiles),
    )
    return out


def match_greedy_reference(logits: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> Verdict:
    """`match_greedy` in plain torch, for sound rows."""
    return match(tokens, counts, logits.argmax(-1))
