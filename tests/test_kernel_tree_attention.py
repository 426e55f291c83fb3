"""The attention kernel against masked SDPA and against the decoder's own attention over its cache."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import generator, on_every_device

from spectune.decoding.adapter import attend_rows
from spectune.decoding.cache import Step, Tail
from spectune.decoding.tree import TokenTree
from spectune.kernels.tree_attention import tree_attention, tree_attention_reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PARENTS = (0, 0, 0, 1, 1, 2, 4, 4, 7)  # nine nodes, four levels


def case(prefix, heads, kv_heads, width, d, *, dtype=torch.float32, device="cpu", capacity=150):
    """Random queries and a cache whose stale slots hold garbage that must not be seen."""
    g = generator(heads * 100 + d)
    rows = len(prefix)
    query = torch.randn(rows, heads, width, d, generator=g).to(device, dtype)
    keys, values = (torch.randn(rows, kv_heads, capacity, d, generator=g).to(device, dtype) for _ in range(2))
    return query, keys, values, torch.tensor(prefix, device=device)


def spoil(keys, values, prefix, tail) -> None:
    """Slots behind a row's tail hold NaN: any read of them shows."""
    for row, length in enumerate(prefix.tolist()):
        keys[row, :, length + tail :] = torch.nan
        values[row, :, length + tail :] = torch.nan


def check(query, keys, values, prefix, mask=None, **options) -> None:
    expected = tree_attention_reference(
        query, keys, values, prefix, mask, **{k: v for k, v in options.items() if k != "splits"}
    )
    spoil(keys, values, prefix, query.shape[2] if mask is None else mask.shape[-1])
    found = tree_attention(query, keys, values, prefix, mask, **options)
    assert found.dtype == query.dtype
    assert (found - expected).abs().max() <= TOLERANCE[query.dtype]


def skip_where_the_interpreter_is_wrong(device, dtype) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the raw bits of bfloat16 matrices")


@on_every_device
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "d", "dtype"),
    [
        (2, 2, 1, 64, torch.float32),
        (9, 3, 5, 64, torch.float32),  # SmolLM2
        (4, 1, 4, 128, torch.float16),
        (8, 1, 9, 64, torch.float32),  # 72 queries per key head: more than one block of them
        (4, 2, 3, 48, torch.float16),  # no power of two
        (9, 3, 5, 64, torch.bfloat16),
    ],
)
def test_a_chain_attends_as_sdpa(device, heads, kv_heads, width, d, dtype):
    skip_where_the_interpreter_is_wrong(device, dtype)
    check(*case([130, 0, 63], heads, kv_heads, width, d, dtype=dtype, device=device), splits=2)


@on_every_device
@pytest.mark.parametrize("splits", [1, 3, 7, None])
def test_rows_of_any_length_are_merged_from_any_number_of_stretches(device, splits):
    """Lengths around the block of 64 keys, most of them too short for seven stretches."""
    check(*case([0, 1, 59, 60, 61, 140], 2, 1, 4, 16, device=device), splits=splits)


@on_every_device
@pytest.mark.parametrize("window", [None, 1000, 40, 3])
def test_a_tree_attends_as_the_decoder_does(device, window):
    """Against `attend_rows`, with the decoder's own masks, for trees that start at different lengths."""
    tree = TokenTree.of(PARENTS, 2, torch.device(device))
    starts = (70, 12)
    query, keys, values, prefix = case(starts, 6, 2, 10, 32, device=device)
    step = Step(0, starts, 10, torch.device(device), Tail(starts, tree.depths, tree.ancestors))
    expected = attend_rows(query, keys[:, :, : step.length], values[:, :, : step.length], step, None, window)
    mask = tree.ancestors
    if window is not None:
        mask = mask & (tree.depths[:, :, None] - tree.depths[:, None, :] < window)
    depths = None if window is None else tree.depths.contiguous()
    found = tree_attention(query, keys, values, prefix, mask.contiguous(), window=window, depths=depths, splits=2)
    assert (found - expected).abs().max() <= TOLERANCE[torch.float32]


@on_every_device
def test_the_last_level_of_a_tree_sees_the_levels_before_it(device):
    """Fewer queries than tail slots: T counts the whole tree, the queries are its last five nodes."""
    mask = TokenTree.of(PARENTS, 3, torch.device(device)).ancestors[:, 5:].contiguous()
    check(*case([90, 5, 0], 4, 4, 5, 32, device=device), mask, splits=2)


@on_every_device
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_window_ends_the_view_of_a_chain(device, window):
    check(*case([100, 3, 64], 4, 2, 6, 32, device=device), window=window, splits=3)


@on_every_device
def test_strided_views_are_read_where_they_stand(device):
    """Rows and slots of a larger store, queries as a model's projection leaves them, an output passed in."""
    g = generator(8)
    store = torch.randn(2, 5, 3, 200, 64, generator=g).to(device)
    keys, values = store[0, 1:4, :, :150], store[1, 1:4, :, :150]
    query = torch.randn(3, 5, 9, 64, generator=g).to(device).transpose(1, 2)
    prefix = torch.tensor([11, 99, 64], device=device)
    out = torch.full((3, 9, 5, 64), 7.0, device=device).transpose(1, 2)
    expected = tree_attention_reference(query, keys, values, prefix)
    assert tree_attention(query, keys, values, prefix, out=out, splits=2) is out
    assert (out - expected).abs().max() <= TOLERANCE[torch.float32]


@on_every_device
def test_a_scale_replaces_the_usual_one(device):
    check(*case([33], 2, 2, 2, 16, device=device), scale=0.5)


@on_every_device
def test_wrong_arguments_are_refused_with_the_reason(device):
    query, keys, values, prefix = case([5, 9], 4, 2, 3, 32, device=device)
    mask = torch.ones(2, 3, 3, dtype=torch.bool, device=device)
    wrong = [
        ((query.half(), keys, values, prefix), {}, "keys are torch.float32, the query torch.float16"),
        ((query[:, :3], keys, values, prefix), {}, "3 query heads do not share 2 key heads evenly"),
        ((query, keys, values[:, :, :9], prefix), {}, "values are"),
        ((query, keys.mT.contiguous().mT, values, prefix), {}, "keys must be contiguous in their last dimension"),
        ((query, keys, values, prefix.int()), {}, "prefix must be int64"),
        ((query, keys, values, prefix, mask[:1]), {}, r"mask must be \[2, 3, 3\]"),
        ((query, keys, values, prefix, mask.float()), {}, "mask must be bool or uint8"),
        ((query, keys, values, prefix, mask), {"window": 4}, "needs the queries' depths"),
        ((query, keys, values, prefix), {"window": 0}, "a window of 0 sees nothing"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises(AssertionError, match=message):
            tree_attention(*arguments, **options)
