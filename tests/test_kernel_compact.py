"""Path compaction against the key-value cache's own."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import generator, on_every_device

from spectune.decoding.cache import KVStore
from spectune.kernels.compact import buffer_table, compact, compact_reference

PATHS = [
    [0, 2, 3, 4, 5],  # overlapping: every destination but the first is a source
    [0, 1, 2, 3, 4],  # in place already
    [0, 3, 7, 9, 0],
    [0, 4, 5, 0, 0],
    [0, 1, 4, 6, 8],
]
STARTS = [3, 0, 20, 11, 7]
ACCEPTED = [4, 4, 3, 1, 2]


def filled_store(device, dtype, *, rows=6, heads=3, capacity=32, d=48, layers=3) -> KVStore:
    store = KVStore(rows, capacity)
    g = generator(2)
    for buffers in (store.keys, store.values):
        for layer in range(layers):
            buffers[layer] = torch.randn(rows, heads, capacity, d, generator=g).to(device, dtype)
    return store


def buffers_of(store: KVStore) -> list[torch.Tensor]:
    return [*store.keys.values(), *store.values.values()]


def on(device, *lists):
    return [torch.tensor(x, device=device) for x in lists]


@on_every_device
@pytest.mark.parametrize(("dtype", "d"), [(torch.float32, 48), (torch.float16, 64), (torch.bfloat16, 16)])
def test_compact_moves_every_layer_as_the_cache_does(device, dtype, d):
    store, expected, third = (filled_store(device, dtype, d=d) for _ in range(3))
    starts, path, accepted = on(device, STARTS, PATHS, ACCEPTED)
    expected.compact(STARTS, path, ACCEPTED)
    compact(buffer_table(buffers_of(store)), starts, path, accepted)
    compact_reference(buffers_of(third), starts, path, accepted)
    for found, plain, wanted in zip(buffers_of(store), buffers_of(third), buffers_of(expected), strict=True):
        assert torch.equal(found, wanted)
        assert torch.equal(plain, wanted)


@on_every_device
def test_long_overlapping_paths_arrive_whole(device):
    """16 nodes, each moved by one slot: a copy that reads what it has written repeats the last one."""
    store, expected = (filled_store(device, torch.float32, rows=2, d=128, layers=1) for _ in range(2))
    shifted = [0, *range(2, 18)]
    starts, path, accepted = on(device, [1, 14], [shifted, shifted], [16, 16])
    expected.compact([1, 14], path, [16, 16])
    compact(buffer_table(buffers_of(store)), starts, path, accepted)
    for found, wanted in zip(buffers_of(store), buffers_of(expected), strict=True):
        assert torch.equal(found, wanted)


@on_every_device
def test_a_view_of_a_stacked_cache_and_a_strided_path_work(device):
    stacked = torch.randn(2, 4, 6, 3, 40, 32, generator=generator(4)).to(device)
    layers = [stacked[i, j, :, :, :32] for i in range(2) for j in range(4)]
    expected = stacked.clone()
    starts, path, accepted = on(device, STARTS, PATHS, ACCEPTED)
    compact_reference([expected[i, j, :, :, :32] for i in range(2) for j in range(4)], starts, path, accepted)
    compact(buffer_table(layers), starts, path.T.contiguous().T, accepted)
    assert torch.equal(stacked, expected)


@on_every_device
def test_nothing_accepted_or_nothing_drafted_moves_nothing(device):
    store, before = filled_store(device, torch.float32), filled_store(device, torch.float32)
    table = buffer_table(buffers_of(store))
    starts, path, none = on(device, STARTS, PATHS, [0] * 5)
    compact(table, starts, path, none)
    compact(table, starts, path[:, :1], none)
    compact(table, starts[:0], path[:0], none[:0])
    for found, wanted in zip(buffers_of(store), buffers_of(before), strict=True):
        assert torch.equal(found, wanted)


@on_every_device
def test_paths_at_the_end_of_the_cache_stay_inside(device):
    """A padded or too long path must not touch the neighbouring head's slots."""
    store, before = filled_store(device, torch.float32), filled_store(device, torch.float32)
    starts, path, accepted = on(device, [30], [[0, 1, 5, 6]], [3])
    compact(buffer_table(buffers_of(store)), starts, path, accepted)
    for found, wanted in zip(buffers_of(store), buffers_of(before), strict=True):
        assert torch.equal(found, wanted)


@on_every_device
def test_wrong_arguments_are_refused_with_the_reason(device):
    store = filled_store(device, torch.float32)
    starts, path, accepted = on(device, STARTS, PATHS, ACCEPTED)
    table = buffer_table(buffers_of(store))
    with pytest.raises(AssertionError, match="shapes differ"):
        buffer_table([store.keys[0], store.keys[1][:, :2]])
    with pytest.raises(AssertionError, match="dtypes differ"):
        buffer_table([store.keys[0], store.keys[1].half()])
    with pytest.raises(AssertionError, match="at least one buffer"):
        buffer_table([])
    with pytest.raises(AssertionError, match="starts must be int64"):
        compact(table, starts.int(), path, accepted)
    with pytest.raises(AssertionError, match=r"accepted must be \[5\], not \[2\]"):
        compact(table, starts, path, accepted[:2])
    with pytest.raises(AssertionError, match="7 paths for 6 rows"):
        compact(table, starts, path[:1].expand(7, -1), accepted)
