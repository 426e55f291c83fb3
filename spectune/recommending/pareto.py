"""The Pareto set: what cannot be bettered in one respect without losing in another."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_set(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Indices of the points that no other point matches in both respects and beats in one; larger is better.

    In falling order of the first respect. Equal points are kept once, the first of them.
    """
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1], i))
    kept: list[int] = []
    highest = float("-inf")
    for i in order:
        if points[i][1] > highest:
            kept.append(i)
            highest = points[i][1]
    return tuple(kept)
