"""Token trees: depths, ancestors and paths against a walk along the parents."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectune.decoding.tree import TokenTree

CPU = torch.device("cpu")


def random_parents(rng: random.Random, k: int) -> list[int]:
    """A tree of k drafted nodes whose depths never fall, so that every prefix is a tree."""
    depths, parents = [0], []
    for j in range(k):
        parent = rng.choice([i for i in range(j + 1) if depths[i] + 1 >= depths[-1]])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def way(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to a node."""
    return [0] if node == 0 else [*way(parents, parents[node - 1]), node]


batches = st.builds(
    lambda rng, rows, k: [random_parents(rng, k) for _ in range(rows)],
    st.randoms(use_true_random=False),
    st.integers(1, 4),
    st.integers(0, 12),
)


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(0, 99))
def test_a_tree_knows_what_a_walk_along_the_parents_finds(batch, pick):
    rows, k = len(batch), len(batch[0])
    tree = TokenTree(torch.tensor(batch, dtype=torch.long).reshape(rows, k))
    ways = [[way(parents, node) for node in range(k + 1)] for parents in batch]
    longest = max(len(w) for row in ways for w in row) - 1
    assert tree.depths.tolist() == [[len(w) - 1 for w in row] for row in ways]
    assert tree.ancestors.tolist() == [[[j in w for j in range(k + 1)] for w in row] for row in ways]
    assert tree.ranks.tolist() == [[parents[:j].count(parents[j]) for j in range(k)] for parents in batch]
    assert tree.height == longest
    ends = [(pick + b) % (k + 1) for b in range(rows)]
    wanted = [row[end] + [0] * (longest + 1 - len(row[end])) for row, end in zip(ways, ends, strict=True)]
    assert tree.path_to(torch.tensor(ends)).tolist() == wanted


@settings(max_examples=60, deadline=None)
@given(batches, st.data())
def test_breadths_count_the_children_of_each_levels_widest_node_without_padding(batch, data):
    rows, k = len(batch), len(batch[0])
    counts = [data.draw(st.integers(0, k)) for _ in batch]
    tree = TokenTree(torch.tensor(batch, dtype=torch.long).reshape(rows, k))
    wanted = [0] * (tree.height + 1)
    for parents, count in zip(batch, counts, strict=True):
        real = parents[:count]
        for node in range(count + 1):
            level = len(way(parents, node)) - 1
            wanted[level] = max(wanted[level], real.count(node))
    assert tree.breadths(torch.tensor(counts)) == wanted


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(0, 6))
def test_a_depth_limit_keeps_a_prefix_of_the_nodes(batch, limit):
    rows, k = len(batch), len(batch[0])
    tree = TokenTree(torch.tensor(batch, dtype=torch.long).reshape(rows, k))
    counts = tree.within(torch.full((rows,), limit))
    for parents, count in zip(batch, counts.tolist(), strict=True):
        shallow = [len(way(parents, node + 1)) - 1 <= limit for node in range(k)]
        assert shallow == [True] * count + [False] * (k - count)


def test_a_chain_is_a_tree():
    tree = TokenTree.chain(2, 3, CPU)
    assert tree.parents.tolist() == [[0, 1, 2]] * 2
    assert tree.depths.tolist() == [[0, 1, 2, 3]] * 2
    assert tree.ancestors[0].tolist() == torch.ones(4, 4).tril().bool().tolist()
    assert TokenTree(tree.parents).height == tree.height == 3


def test_one_shape_serves_all_rows():
    tree = TokenTree.of((0, 0, 1, 1), 3, CPU)
    assert (tree.rows, tree.width, tree.height) == (3, 4, 2)
    assert tree.parents.tolist() == [[0, 0, 1, 1]] * 3


def test_a_tree_may_be_empty():
    for tree in (TokenTree.chain(2, 0, CPU), TokenTree.of((), 2, CPU), TokenTree(torch.zeros(2, 0, dtype=torch.long))):
        assert tree.height == 0
        assert tree.depths.tolist() == [[0], [0]]
        assert tree.path_to(torch.tensor([0, 0])).tolist() == [[0], [0]]
        assert tree.breadths(torch.tensor([0, 0])) == [0]


@pytest.mark.parametrize(("parents", "node"), [([[0, 1], [2, 0]], 1), ([[0, 2]], 2), ([[0, -1]], 2)])
def test_a_node_before_its_parent_is_refused(parents, node):
    with pytest.raises(ValueError, match=f"node {node} does not stand behind its parent"):
        TokenTree(torch.tensor(parents))


def test_a_parents_tensor_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"\[B, K\]"):
        TokenTree(torch.tensor([0, 1]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_finds_what_the_host_finds():
    rng = random.Random(1)
    host = TokenTree(torch.tensor([random_parents(rng, 12) for _ in range(5)]))
    device = TokenTree(host.parents.cuda())
    counts, ends = torch.tensor([12, 3, 0, 7, 9]), torch.tensor([12, 1, 0, 5, 9])
    assert torch.equal(device.depths.cpu(), host.depths)
    assert torch.equal(device.ancestors.cpu(), host.ancestors)
    assert torch.equal(device.ranks.cpu(), host.ranks)
    assert torch.equal(device.path_to(ends.cuda()).cpu(), host.path_to(ends))
    assert device.breadths(counts.cuda()) == host.breadths(counts)
