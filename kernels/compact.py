"""Moving each row's accepted path together, in every layer at once.

After a tree was verified its accepted nodes lie scattered behind the root; one launch copies them to the slots right
behind it, for the keys and values of all layers. Each program owns one buffer, row and head. It reads the whole path
before it writes any of it, so that source and destination may overlap.
"""

# mypy: disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from spectune.kernels.checks import check_integers, check_rows

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BufferTable:
    """Where buffers of one shape lie. Holds on to them: their addresses are in use as long as the table is."""

    buffers: tuple[torch.Tensor, ...]  # each [rows, kv_heads, capacity, d]
    addresses: torch.Tensor  # [N] int64, on the buffers' device


def buffer_table(buffers: Sequence[torch.Tensor]) -> BufferTable:
    """Table of the keys and values of all layers. Copies addresses to the device: build it once, not per round.

    Layers whose heads or sizes differ need a table per kind.
    """
    assert buffers, "a table needs at least one buffer"
    first = buffers[0]
    assert first.ndim == 4, f"buffers must be [rows, kv_heads, capacity, d], not {list(first.shape)}"
    assert first.stride(3) == 1, "buffers must be contiguous in their last dimension"
    for x in buffers:
        assert x.shape == first.shape, f"shapes differ: {list(first.shape)} and {list(x.shape)}"
        assert x.stride() == first.stride(), f"strides differ: {first.stride()} and {x.stride()}"
        assert x.dtype == first.dtype, f"dtypes differ: {first.dtype} and {x.dtype}"
        assert x.device == first.device, f"devices differ: {first.device} and {x.device}"
    addresses = torch.tensor([x.data_ptr() for x in buffers], dtype=torch.int64, device=first.device)
    return BufferTable(tuple(buffers), addresses)


@triton.jit
def _compact_kernel(
    addresses_ptr,
    like_ptr,
    stride_row,
    stride_head,
    stride_slot,
    starts_ptr,
    path_ptr,
    path_row,
    path_place,
    accepted_ptr,
    longest,
    capacity,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, BLOCK_P) + 1  # 0 is the root, which stays
    count = tl.minimum(tl.load(accepted_ptr + row), longest)
    start = tl.load(starts_ptr + row)
    node = tl.load(path_ptr + row * path_row + place * path_place, mask=place <= count, other=0)
    source = start + node
    target = start + place
    # Nothing moves where the node is in place already; nothing outside the buffer is touched.
    moves = (place <= count) & (node > place) & (target >= 0) & (source < capacity)
    d = tl.arange(0, BLOCK_D)
    both = moves[:, None] & (d < D)[None, :]
    base = tl.load(addresses_ptr + tl.program_id(0)).to(tl.pointer_type(like_ptr.dtype.element_ty))
    base += row * stride_row + tl.program_id(2).to(tl.int64) * stride_head
    moved = tl.load(base + source[:, None] * stride_slot + d[None, :], mask=both)
    tl.debug_barrier()  # no thread writes before all have read
    tl.store(base + target[:, None] * stride_slot + d[None, :], moved, mask=both)


def compact(table: BufferTable, starts: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor) -> None:
    """Move the accepted path of rows 0 … B - 1 to consecutive slots, in every buffer of the table.

    Nothing is read back; fit for a CUDA graph. Slots behind a row's own path are left alone.

    Args:
        starts: [B] int64 slot of each row's root.
        path: [B, D + 1] int64 node numbers on the path, ascending, root 0 first, padded behind it.
        accepted: [B] int64 how many nodes behind the root are kept.
    """
    like = table.buffers[0]
    rows, length = path.shape
    assert rows <= like.shape[0], f"{rows} paths for {like.shape[0]} rows"
    check_integers(like.device, path=path)
    check_rows(rows, like.device, starts=starts, accepted=accepted)
    if rows == 0 or length < 2:
        return
    _, heads, capacity, d = like.shape
    _compact_kernel[(len(table.buffers), rows, heads)](
        table.addresses,
        like.view(_BITS[like.element_size()]),  # bits are moved, whatever they mean
        *like.stride()[:3],
        starts,
        path,
        *path.stride(),
        accepted,
        length - 1,
        capacity,
        D=d,
        BLOCK_P=triton.next_power_of_2(length - 1),
        BLOCK_D=triton.next_power_of_2(d),
    )


def compact_reference(
    buffers: Sequence[torch.Tensor], starts: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor
) -> None:
    """`compact` in plain torch."""
    place = torch.arange(1, path.shape[1], device=path.device)
    node = torch.where(place <= accepted[:, None], path[:, 1:], place)
    row = torch.arange(len(starts), device=path.device)[:, None]
    # Behind a short path the slots are copied onto themselves; they may lie past the end.
    for buffer in buffers:
        last = buffer.shape[2] - 1
        source, target = ((starts[:, None] + x).clamp(max=last) for x in (node, place))
        buffer[row, :, target] = buffer[row, :, source]
