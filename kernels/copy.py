"""Copy and read kernels: how fast a device moves bytes when it does nothing else.

Decoding reads every weight once per forward and computes little with it, so its speed limit is the rate at
which memory can be streamed. `copy` writes what it reads (traffic: 2 × the buffer); `read` folds each block
of BLOCK elements into one sum (traffic: the buffer, since the sums are 1/BLOCK of it).
"""

# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _copy_kernel(src_ptr, dst_ptr, n, BLOCK: tl.constexpr):
    # 64 bits, because buffers beyond 2**31 elements are usual on large GPUs.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(dst_ptr + offsets, tl.load(src_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def _read_kernel(src_ptr, sums_ptr, n, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(src_ptr + offsets, mask=offsets < n, other=0.0)
    # The sum is stored so that the compiler cannot drop the loads.
    tl.store(sums_ptr + block, tl.sum(values.to(tl.float32), axis=0))


def copy(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """Write `src` [n] to `dst` [n] and return `dst`."""
    assert src.is_contiguous(), "copy needs a contiguous source"
    assert dst.is_contiguous(), "copy needs a contiguous destination"
    assert src.numel() == dst.numel(), f"sizes differ: {src.numel()} and {dst.numel()}"
    assert src.dtype == dst.dtype, f"dtypes differ: {src.dtype} and {dst.dtype}"
    if src.numel():
        _copy_kernel[(triton.cdiv(src.numel(), BLOCK),)](src, dst, src.numel(), BLOCK, num_warps=8)
    return dst


def read(src: torch.Tensor) -> torch.Tensor:
    """The float32 sum of each block of BLOCK elements of `src` [n]: [ceil(n / BLOCK)]."""
    assert src.is_contiguous(), "read needs a contiguous tensor"
    assert src.dtype.is_floating_point, f"read sums floating-point values, not {src.dtype}"
    sums = torch.empty(triton.cdiv(src.numel(), BLOCK), dtype=torch.float32, device=src.device)
    if src.numel():
        _read_kernel[(sums.numel(),)](src, sums, src.numel(), BLOCK, num_warps=8)
    return sums


def copy_reference(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """`copy` in plain torch."""
    return dst.copy_(src)


def read_reference(src: torch.Tensor) -> torch.Tensor:
    """`read` in plain torch."""
    padding = -src.numel() % BLOCK
    return torch.nn.functional.pad(src.float(), (0, padding)).view(-1, BLOCK).sum(dim=1)
