"""Static tree shapes: the growth and the dynamic programme against every tree there is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectune.decoding.tree import TokenTree
from spectune.decoding.tree_shapes import SequoiaTable, Shape, choose, grow

PUBLISHED = (0.62, 0.14, 0.06, 0.04, 0.02)  # an acceptance vector with known optima


def rank_paths(shape: Shape) -> list[tuple[int, ...]]:
    """Ranks from the root to each drafted node."""
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(*shape, strict=True):
        paths.append((*paths[parent], rank))
    return paths[1:]


def tokens_of(shape: Shape, rank_acceptance: Sequence[Sequence[float]]) -> float:
    return 1 + sum(prod(rank_acceptance[i][r] for i, r in enumerate(path)) for path in rank_paths(shape))


def assert_well_formed(shape: Shape) -> None:
    tree = TokenTree(torch.tensor([shape.parents], dtype=torch.long))
    depths = tree.depths[0].tolist()
    assert depths == sorted(depths)
    siblings = list(zip(shape.parents, shape.ranks, strict=True))
    assert len(set(siblings)) == len(siblings)
    for parent in set(shape.parents):
        ranks = [r for p, r in siblings if p == parent]
        assert ranks == sorted(ranks)


# Growth by measured rank accuracies.


def best_subset(rank_acceptance: Sequence[Sequence[float]], nodes: int) -> float:
    """Tokens of the best tree of so many nodes: every set of rank paths that holds each path's beginning."""
    every = [
        p
        for d in range(1, len(rank_acceptance) + 1)
        for p in itertools.product(*map(range, map(len, rank_acceptance[:d])))
    ]
    best = 1.0
    for chosen in itertools.combinations(every, min(nodes, len(every))):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            best = max(best, 1 + sum(prod(rank_acceptance[i][r] for i, r in enumerate(path)) for path in chosen))
    return best


chances = st.floats(0, 1, allow_nan=False, width=16)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(chances, min_size=1, max_size=2), min_size=1, max_size=3), st.integers(0, 5))
def test_a_grown_tree_is_the_best_of_its_size(rank_acceptance, nodes):
    shape = grow(rank_acceptance, nodes)
    assert_well_formed(shape)
    assert tokens_of(shape, rank_acceptance) == pytest.approx(best_subset(rank_acceptance, nodes))


def test_a_grown_tree_has_the_size_asked_for_or_all_there_is():
    accuracy = [[0.5, 0.2], [0.4]]
    assert [len(grow(accuracy, n).parents) for n in range(6)] == [0, 1, 2, 3, 4, 4]


def test_growth_takes_the_likeliest_paths_and_names_their_ranks():
    # By product: (0) .6, (0,0) .24, (1) .1, (0,1) .06, (2) .05, (1,0) .04
    accuracy = [[0.6, 0.1, 0.05], [0.4, 0.1]]
    assert rank_paths(grow(accuracy, 3)) == [(0,), (1,), (0, 0)]
    assert grow(accuracy, 5) == Shape(parents=(0, 0, 0, 1, 1), ranks=(0, 1, 2, 0, 1))
    assert grow(accuracy, 6) == Shape(parents=(0, 0, 0, 1, 1, 2), ranks=(0, 1, 2, 0, 1, 0))


def test_a_better_later_guess_is_taken_without_the_earlier_one():
    assert grow([[0.1, 0.6]], 1) == Shape(parents=(0,), ranks=(1,))


def test_equal_chances_grow_shallow_first_and_then_by_rank():
    assert grow([[0.5, 0.5], [1.0, 1.0]], 3) == Shape(parents=(0, 0, 1), ranks=(0, 1, 0))
    assert rank_paths(grow([[0.5, 0.5], [1.0, 1.0]], 4)) == [(0,), (1,), (0, 0), (0, 1)]


# Sequoia.


@cache
def trees(nodes: int, depth: int) -> tuple[tuple[object, ...], ...]:
    """Every ordered tree of exactly so many nodes and at most so many levels below its root, as nested tuples."""
    return forests(nodes - 1, depth - 1) if nodes else ()


@cache
def forests(nodes: int, depth: int) -> tuple[tuple[object, ...], ...]:
    if nodes == 0:
        return ((),)
    if depth < 0:
        return ()
    return tuple(
        (first, *rest)
        for size in range(1, nodes + 1)
        for first in trees(size, depth)
        for rest in forests(nodes - size, depth)
    )


def value(tree: tuple, acceptance: Sequence[float]) -> float:
    """Expected tokens; -inf for more children than there are ranks."""
    if len(tree) > len(acceptance):
        return -np.inf
    return 1 + sum(a * value(child, acceptance) for a, child in zip(acceptance, tree, strict=False) if a)


vectors = st.lists(st.floats(0.001, 1, allow_nan=False), min_size=1, max_size=4).map(
    lambda x: [a / (sum(x) + 0.1) for a in x]
)


@settings(max_examples=40, deadline=None)
@given(vectors, st.integers(0, 4))
def test_the_programme_finds_the_best_of_all_trees(acceptance, depth):
    table = SequoiaTable(acceptance, max_nodes=6, max_depth=depth)
    best = 1.0
    for nodes in range(7):
        best = max([best, *(value(tree, acceptance) for tree in trees(nodes + 1, depth))])
        assert table.expected[depth, nodes] == pytest.approx(best, abs=1e-12)
        shape = table.shape(nodes, depth)
        assert_well_formed(shape)
        assert len(shape.parents) <= nodes
        assert max((len(path) for path in rank_paths(shape)), default=0) <= depth
        assert tokens_of(shape, [acceptance] * depth) == pytest.approx(best, abs=1e-12)
        # Children are drawn one after the other: no rank without the one before.
        assert shape.ranks == tuple(TokenTree(torch.tensor([shape.parents], dtype=torch.long)).ranks[0].tolist())


def test_the_brute_force_knows_every_tree():
    assert [len(trees(n, 9)) for n in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]  # Catalan numbers
    assert [len(trees(n, 1)) for n in range(1, 5)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("size", "levels", "tokens"),
    [
        (8, 4, 2.62),
        (8, 6, 2.71),
        (16, 4, 2.94),
        (16, 6, 3.13),
        (16, 10, 3.15),
        (64, 4, 3.30),
        (64, 6, 3.86),
        (64, 10, 3.99),
    ],
)
def test_known_optima(size, levels, tokens):
    """Sizes and levels here count the root."""
    table = SequoiaTable(PUBLISHED, max_nodes=63, max_depth=9)
    assert table.expected[levels - 1, size - 1] == pytest.approx(tokens, abs=0.005)


def test_more_nodes_and_more_depth_never_emit_less():
    table = SequoiaTable(PUBLISHED, max_nodes=40, max_depth=6)
    assert (np.diff(table.expected, axis=0) >= 0).all()
    assert (np.diff(table.expected, axis=1) >= 0).all()


def test_nodes_that_add_nothing_are_left_out():
    table = SequoiaTable([0.5, 0.0], max_nodes=6, max_depth=2)
    assert table.shape(6, 2) == Shape(parents=(0, 1), ranks=(0, 0))


@pytest.mark.parametrize("acceptance", [[0.5, -0.1], [0.8, 0.3]])
def test_chances_that_cannot_be_are_refused(acceptance):
    with pytest.raises(ValueError, match="exclusive"):
        SequoiaTable(acceptance, 4, 4)


def test_the_chosen_tree_takes_the_least_time_per_token():
    table = SequoiaTable(PUBLISHED, max_nodes=30, max_depth=6)

    def verify(n: int) -> float:
        return 10 + 0.3 * n + (4 if n > 16 else 0)

    choice = choose(table, 1.5, verify)
    depth = max(len(path) for path in rank_paths(choice.shape))
    assert choice.tokens == pytest.approx(tokens_of(choice.shape, [PUBLISHED] * depth))
    assert choice.seconds == pytest.approx(1.5 * depth + verify(len(choice.shape.parents) + 1))
    for d in range(7):
        for n in range(31):
            assert choice.seconds / choice.tokens <= (1.5 * d + verify(n + 1)) / table.expected[d, n] + 1e-12


def test_measured_times_decide_the_tree():
    table = SequoiaTable(PUBLISHED, max_nodes=30, max_depth=6)
    assert len(choose(table, 0.01, lambda n: 1.0).shape.parents) == 30  # verification is free: the largest tree
    assert choose(table, 5.0, lambda n: 1.0).shape == Shape((), ())  # no draft is worth its step
    steep = choose(table, 0.05, lambda n: 1.0 if n <= 8 else 3.0).shape
    assert len(steep.parents) == 7
