"""Dynamic trees: the batched selection against a plain one, and the order that keeps trees connected."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectune.decoding.tree import TokenTree
from spectune.decoding.tree_growth import DynamicTree, Grown

STOP = 7
V = 8


def scores_of(rng: random.Random, ties: bool) -> list[tuple[int, float]]:
    """The draft's distribution behind one path, likeliest first."""
    values = [rng.choice([0.0, -0.5, -1.0, -float("inf")]) if ties else -rng.expovariate(1.0) for _ in range(V)]
    return sorted(enumerate(values), key=lambda pair: -pair[1])


class Drafter:
    """A random draft: what it says behind a path is a function of the path."""

    def __init__(self, seed: int, ties: bool) -> None:
        self.seed, self.ties = seed, ties

    def top(self, path: tuple[int, ...], k: int) -> list[tuple[int, float]]:
        return scores_of(random.Random(f"{self.seed} {path}"), self.ties)[:k]


def plain(drafter: Drafter, limit: int, width: int, k: int, steps: int, nodes: int) -> list[tuple[int, ...]]:
    """EAGLE-2's tree for one row, path by path."""
    candidates: list[tuple[float, int, tuple[int, ...]]] = []  # score, age, path
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(min(limit, steps)):
        level = []
        for score, path in frontier:
            for token, log_p in drafter.top(path, k):
                total = float(torch.tensor(score) + torch.tensor(log_p))
                if total > -float("inf"):
                    level.append((total, len(candidates) + len(level), (*path, token)))
        candidates += level
        open_ = sorted((c for c in level if c[2][-1] != STOP), key=lambda c: (-c[0], c[1]))
        frontier = [(score, path) for score, _, path in open_[:width]]
    best = sorted(candidates, key=lambda c: (-c[0], c[1]))[:nodes]
    return [path for _, _, path in sorted(best, key=lambda c: c[1])]


def grown(drafters: list[Drafter], limits: list[int], width: int, k: int, steps: int, nodes: int) -> Grown:
    """The production tree for a batch, with the drafter's paths followed through `previous`."""
    growth = DynamicTree(width, torch.tensor(limits), torch.tensor([STOP]))
    paths: list[list[tuple[int, ...]]] = [[()] for _ in drafters]
    entries: list[list[tuple[int, ...]]] = [[] for _ in drafters]
    for step in range(steps):
        top = [[d.top(path, k) for path in row] for d, row in zip(drafters, paths, strict=True)]
        frontier = growth.extend(
            torch.tensor([[[t for t, _ in node] for node in row] for row in top]),
            torch.tensor([[[s for _, s in node] for node in row] for row in top]),
        )
        for b, row in enumerate(paths):
            paths[b] = [
                (*row[i], t) for i, t in zip(frontier.previous[b].tolist(), frontier.tokens[b].tolist(), strict=True)
            ]
            entries[b] += paths[b]
            assert frontier.depths[b].tolist() == [len(path) - 1 for path in entries[b]]
            if step < limits[b]:
                assert_sees_own_path(frontier.visible[b], paths[b], entries[b])
    return growth.select(nodes)


def assert_sees_own_path(
    visible: torch.Tensor, frontier: list[tuple[int, ...]], entries: list[tuple[int, ...]]
) -> None:
    """Each entry of the frontier sees the beginnings of its own path and nothing else."""
    for sees, path in zip(visible.tolist(), frontier, strict=True):
        seen = [entry for entry, yes in zip(entries, sees, strict=True) if yes]
        assert seen == [path[:i] for i in range(1, len(path) + 1)]


def paths_in(result: Grown, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for j in range(int(result.counts[row])):
        paths.append((*paths[int(result.tree.parents[row, j])], int(result.tokens[row, j])))
    return paths[1:]


settings_of_a_tree = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 14))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), settings_of_a_tree, st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_the_batched_tree_is_the_plain_one_row_by_row(seed, ties, setting, limits):
    width, k, steps, nodes = setting
    drafters = [Drafter(seed + b, ties) for b in range(len(limits))]
    result = grown(drafters, limits, width, k, steps, nodes)
    for row, (drafter, limit) in enumerate(zip(drafters, limits, strict=True)):
        assert paths_in(result, row) == plain(drafter, limit, width, k, steps, nodes)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), settings_of_a_tree, st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_a_dynamic_tree_is_connected_sorted_and_within_its_limits(seed, ties, setting, limits):
    width, k, steps, nodes = setting
    result = grown([Drafter(seed + b, ties) for b in range(len(limits))], limits, width, k, steps, nodes)
    tree = TokenTree(result.tree.parents)  # checks that parents stand before their children
    assert result.tokens.shape == result.tree.parents.shape
    assert result.tokens.shape[1] <= nodes
    assert tree.height <= result.tree.height
    for row, limit in enumerate(limits):
        count = int(result.counts[row])
        depths = tree.depths[row, 1 : count + 1].tolist()
        assert depths == sorted(depths)
        assert max(depths, default=0) <= limit
        paths = paths_in(result, row)
        assert len(set(paths)) == len(paths)  # siblings are distinct
        assert all(STOP not in path[:-1] for path in paths)  # nothing follows a stop token
        assert result.tree.parents[row, count:].tolist() == [0] * (result.tokens.shape[1] - count)


def test_children_as_likely_as_their_parents_never_lose_them():
    """A draft that is certain of everything: all scores are equal, and age alone decides."""
    growth = DynamicTree(2, torch.tensor([3]), torch.tensor([STOP]))
    certain = torch.zeros(1, 1, 2)
    growth.extend(torch.tensor([[[1, 2]]]), certain)
    for _ in range(2):
        growth.extend(torch.tensor([[[3, 4], [5, 6]]]), certain.expand(1, 2, 2))
    for nodes in range(1, 11):
        result = growth.select(nodes)
        assert result.counts.tolist() == [nodes]
        assert result.tokens[0].tolist() == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6][:nodes]
        assert result.tree.parents[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4][:nodes]


def test_log_probabilities_that_round_above_zero_do_not_lift_a_child_over_its_parent():
    growth = DynamicTree(1, torch.tensor([2]), torch.tensor([STOP]))
    growth.extend(torch.tensor([[[1, 2]]]), torch.tensor([[[-0.1, -0.2]]]))
    growth.extend(torch.tensor([[[3]]]), torch.tensor([[[1e-7]]]))
    assert growth.select(1).tokens.tolist() == [[1]]


def test_a_stop_token_is_offered_and_leaves_its_place_in_the_frontier():
    growth = DynamicTree(1, torch.tensor([2]), torch.tensor([STOP]))
    frontier = growth.extend(torch.tensor([[[STOP, 2]]]), torch.tensor([[[-0.1, -2.0]]]))
    assert frontier.tokens.tolist() == [[2]]
    growth.extend(torch.tensor([[[3, 4]]]), torch.tensor([[[-0.1, -3.0]]]))
    result = growth.select(3)
    assert result.tokens.tolist() == [[STOP, 2, 3]]
    assert result.tree.parents.tolist() == [[0, 0, 2]]


def test_rows_of_different_limits_share_a_batch():
    growth = DynamicTree(1, torch.tensor([0, 1, 2]), torch.tensor([STOP]))
    for token in (1, 2):
        growth.extend(torch.full((3, 1, 1), token), torch.full((3, 1, 1), -0.5))
    result = growth.select(4)
    assert result.counts.tolist() == [0, 1, 2]
    assert result.tokens.tolist() == [[0, 0], [1, 0], [1, 2]]
    assert result.tree.parents.tolist() == [[0, 0], [0, 0], [0, 1]]
