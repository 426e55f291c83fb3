"""Logits inside kernels: a tile of them, divided by the temperature, and what a softmax needs of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_logits(logits_ptr, ids, vocab):
    """Logits of one place in float32; -inf outside the vocabulary."""
    return tl.load(logits_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def tile_softmax(x):
    """Largest logit of a tile and its sum of exponentials relative to that. NaN and +inf make the sum NaN."""
    top = tl.max(x, 0)
    # A tile without any finite logit has no mass, and -inf - -inf must not be formed.
    total = tl.sum(tl.exp(x - tl.where(top == -float("inf"), 0.0, top)), 0)
    return top, total
