"""Attention of a few new tokens per row over the per-row key-value cache.

Decoding attends with few queries to many keys, so the work is split over the keys: each program reads one stretch of
one row's keys for all query heads that share them, and a second launch merges the stretches by their log-sum-exp.
Row lengths stay on the device: a captured graph serves every length up to the capacity, and a stretch behind a row's
end returns at once.

Only the last T slots need a mask: the text before them is visible to every query (or, in a sliding window, its end).
"""

# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spectune.kernels.checks import check_integers, check_rows

BLOCK_N = 64  # keys per step
MOST_SPLITS = 32


@triton.jit
def _attend_kernel(
    query_ptr,
    q_row,
    q_head,
    q_place,
    keys_ptr,
    k_row,
    k_head,
    k_slot,
    values_ptr,
    v_row,
    v_head,
    v_slot,
    prefix_ptr,
    mask_ptr,
    depths_ptr,
    partial_ptr,
    scales_ptr,
    scale,
    width,
    tail,
    window,
    capacity,
    kv_heads,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DEPTHS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    # The query heads of one key head, times the queries, are the rows of one matrix.
    packed = GROUPS * width
    line = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = line % width
    head = kv_head * GROUPS + line // width
    d = tl.arange(0, BLOCK_D)
    # One comparison per axis, since the interpreter has no product of masks of different shapes.
    used = (line < packed)[:, None] & (d < D)[None, :]

    prefix = tl.load(prefix_ptr + row)
    length = tl.minimum(prefix + tail, capacity)
    depth = place
    if DEPTHS:
        depth = tl.load(depths_ptr + row * width + place, mask=line < packed, other=0).to(tl.int32)
    oldest = prefix * 0
    if WINDOW:
        # Slots that no query of this program reaches are skipped.
        lowest = tl.min(tl.where(line < packed, depth, tail), 0)
        oldest = tl.maximum(prefix + lowest - window + 1, 0)
    stretch = tl.cdiv(tl.cdiv(length - oldest, splits), BLOCK_N) * BLOCK_N
    begin = oldest + split * stretch
    end = tl.minimum(begin + stretch, length)

    at = ((row * kv_heads + kv_head) * splits + split) * packed + line
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if begin < end:
        q_at = row * q_row + head[:, None] * q_head + place[:, None] * q_place + d[None, :]
        query = tl.load(query_ptr + q_at, mask=used, other=0.0)
        out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(begin, end, BLOCK_N):
            slot = start + tl.arange(0, BLOCK_N)
            stored = (slot < end)[:, None] & (d < D)[None, :]
            key = tl.load(
                keys_ptr + row * k_row + kv_head * k_head + slot[:, None] * k_slot + d[None, :], mask=stored, other=0.0
            )
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            step = slot - prefix  # place in the tail, negative in the text
            if CAUSAL:
                visible = step[None, :] <= place[:, None]
                if WINDOW:
                    visible = visible & (step[None, :] > (place - window)[:, None])
            else:
                in_tail = (line < packed)[:, None] & ((step >= 0) & (step < tail))[None, :]
                mask_at = (row * width + place)[:, None] * tail + step[None, :]
                seen = tl.load(mask_ptr + mask_at, mask=in_tail, other=0) != 0
                # Before the tail everything is visible, or what the window still reaches.
                reach = depth * 0 - capacity
                if WINDOW:
                    reach = depth - window
                visible = seen | ((step < 0)[None, :] & (step[None, :] > reach[:, None]))
            scores = tl.where(visible & (slot < end)[None, :], scores, -float("inf"))
            top = tl.maximum(peak, tl.max(scores, 1))
            finite = tl.where(top == -float("inf"), 0.0, top)
            weights = tl.exp(scores - finite[:, None])
            shrink = tl.exp(peak - finite)
            value = tl.load(
                values_ptr + row * v_row + kv_head * v_head + slot[:, None] * v_slot + d[None, :],
                mask=stored,
                other=0.0,
            )
            out = out * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            peak = top
        tl.store(partial_ptr + at[:, None] * D + d[None, :], out, mask=used)
    tl.store(scales_ptr + at * 2, peak, mask=line < packed)
    tl.store(scales_ptr + at * 2 + 1, total, mask=line < packed)


@triton.jit
def _merge_kernel(
    partial_ptr,
    scales_ptr,
    out_ptr,
    o_row,
    o_place,
    o_head,
    width,
    heads,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    place = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_S)
    packed = GROUPS * width
    line = (head % GROUPS) * width + place
    at = ((row * (heads // GROUPS) + head // GROUPS) * SPLITS + split) * packed + line
    peak = tl.load(scales_ptr + at * 2, mask=split < SPLITS, other=-float("inf"))
    total = tl.load(scales_ptr + at * 2 + 1, mask=split < SPLITS, other=0.0)
    top = tl.max(peak, 0)
    share = tl.exp(peak - tl.where(top == -float("inf"), 0.0, top))
    # A stretch behind the row's end wrote no partial sums; they are not read.
    written = (total > 0)[:, None] & (d < D)[None, :]
    partial = tl.load(partial_ptr + at[:, None] * D + d[None, :], mask=written, other=0.0)
    mass = tl.sum(share * total, 0)
    result = tl.sum(share[:, None] * partial, 0) / tl.where(mass > 0, mass, 1.0)
    tl.store(out_ptr + row * o_row + place * o_place + head * o_head + d, result, mask=d < D)


def splits_for(rows: int, kv_heads: int, capacity: int, device: torch.device) -> int:
    """Stretches per row: enough programs to fill the device twice, none shorter than two steps at full capacity."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    wanted = triton.cdiv(2 * processors, rows * kv_heads)
    return int(max(1, min(wanted, capacity // (2 * BLOCK_N), MOST_SPLITS)))


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    prefix: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    depths: torch.Tensor | None = None,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention over the per-row cache. Nothing is read back; fit for a CUDA graph.

    Row b's queries see its slots below `prefix[b]`, and of the T slots behind them what the mask says. In float32
    products are exact float32 (no TF32); otherwise sums and softmax are float32 and the weights are rounded to the
    values' dtype.

    Args:
        query: [B, heads, q, d]; keys, values: [B, kv_heads, capacity, d], views with d contiguous, one dtype.
        prefix: [B] int64 length of the text before the tail; prefix + T at most the capacity.
        mask: [B, q, T] bool or uint8, contiguous: which tail slots each query sees, a sliding window already applied
            to them; every query sees at least its own. None: a chain, query i stands in slot prefix + i.
        scale: of the scores; 1/sqrt(d) without.
        window: reach of a sliding-window layer, the query's own place included.
        depths: [B, q] int64, each query's position behind the prefix; only needed for a window with a mask.
        splits: stretches of keys per row; chosen from the device without.
        out: [B, q, heads, d] to be written into, d contiguous.

    Returns:
        [B, q, heads, d] in the query's dtype.
    """
    rows, heads, width, d = query.shape
    kv_heads, capacity = keys.shape[1:3]
    assert keys.shape == (rows, kv_heads, capacity, d), f"keys are {list(keys.shape)}, the query {list(query.shape)}"
    assert values.shape == keys.shape, f"values are {list(values.shape)}, the keys {list(keys.shape)}"
    assert heads % kv_heads == 0, f"{heads} query heads do not share {kv_heads} key heads evenly"
    assert d <= 256, f"head_dim {d} is more than 256"
    for name, x in (("query", query), ("keys", keys), ("values", values)):
        assert x.dtype in (torch.float32, torch.float16, torch.bfloat16), f"attention takes no {x.dtype} {name}"
        assert x.dtype == query.dtype, f"{name} are {x.dtype}, the query {query.dtype}"
        assert x.device == query.device, f"{name} are on {x.device}, the query on {query.device}"
        assert x.stride(3) == 1, f"{name} must be contiguous in their last dimension"
    check_rows(rows, query.device, prefix=prefix)
    assert window is None or window > 0, f"a window of {window} sees nothing"
    tail = width
    if mask is not None:
        tail = mask.shape[-1]
        assert mask.shape == (rows, width, tail), f"mask must be {[rows, width, tail]}, not {list(mask.shape)}"
        assert mask.dtype in (torch.bool, torch.uint8), f"mask must be bool or uint8, not {mask.dtype}"
        assert mask.is_contiguous(), "mask must be contiguous"
        assert window is None or depths is not None, "a window over a masked tail needs the queries' depths"
        assert mask.device == query.device, f"mask must be on {query.device}, not on {mask.device}"
    if depths is not None:
        check_integers(query.device, depths=depths)
        assert depths.shape == (rows, width), f"depths must be {[rows, width]}, not {list(depths.shape)}"
        assert depths.is_contiguous(), "depths must be contiguous"
    if out is None:
        out = torch.empty(rows, width, heads, d, dtype=query.dtype, device=query.device)
    assert out.shape == (rows, width, heads, d), f"out must be {[rows, width, heads, d]}, not {list(out.shape)}"
    assert out.dtype == query.dtype, f"out is {out.dtype}, the query {query.dtype}"
    assert out.device == query.device, f"out must be on {query.device}, not on {out.device}"
    assert out.stride(3) == 1, "out must be contiguous in its last dimension"
    if rows == 0 or width == 0:
        return out

    groups = heads // kv_heads
    packed = groups * width
    splits = splits or splits_for(rows, kv_heads, capacity, query.device)
    block_m = min(64, max(16, triton.next_power_of_2(packed)))  # 16: the least a matrix product takes
    block_d = max(16, triton.next_power_of_2(d))
    partial = torch.empty(rows, kv_heads, splits, packed, d, dtype=torch.float32, device=query.device)
    scales = torch.empty(rows, kv_heads, splits, packed, 2, dtype=torch.float32, device=query.device)
    # Compiled kernels take no null pointers: what is not used is the prefix.
    bits = prefix if mask is None else mask.view(torch.uint8)
    _attend_kernel[(rows * kv_heads, splits, triton.cdiv(packed, block_m))](
        query,
        *query.stride()[:3],
        keys,
        *keys.stride()[:3],
        values,
        *values.stride()[:3],
        prefix,
        bits,
        prefix if depths is None else depths,
        partial,
        scales,
        float(d**-0.5 if scale is None else scale),
        width,
        tail,
        window or 0,
        capacity,
        kv_heads,
        GROUPS=groups,
        D=d,
        CAUSAL=mask is None,
        WINDOW=window is not None,
        DEPTHS=depths is not None,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_D=block_d,
    )
    _merge_kernel[(rows * heads, width)](
        partial,
        scales,
        out,
        *out.stride()[:3],
        width,
        heads,
        GROUPS=groups,
        D=d,
        BLOCK_D=block_d,
        SPLITS=splits,
        BLOCK_S=triton.next_power_of_2(splits),
    )
    return out


def tree_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    prefix: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tree_attention` in plain torch: one masked SDPA over the whole capacity."""
    rows, heads, width, _ = query.shape
    place = torch.arange(width, device=query.device)
    if mask is None:
        mask = (place[:, None] >= place).expand(rows, -1, -1)
        if window is not None:
            mask = mask & (place[:, None] - place < window)
        depths = place.expand(rows, -1)
    tail = mask.shape[-1]
    step = torch.arange(keys.shape[2], device=query.device) - prefix[:, None]  # [B, capacity]
    inside = step.clamp(0, tail - 1)[:, None].expand(-1, width, -1)
    in_tail = ((step >= 0) & (step < tail))[:, None]
    in_text = (step < 0)[:, None].expand(-1, width, -1)
    if window is not None and depths is not None:
        in_text = in_text & (step[:, None] > depths[:, :, None] - window)
    visible = in_text | (in_tail & mask.bool().gather(2, inside))  # [B, q, capacity]
    groups = heads // keys.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        keys.repeat_interleave(groups, 1),
        values.repeat_interleave(groups, 1),
        attn_mask=visible[:, None],
        scale=scale,
    )
    return out.transpose(1, 2)
