"""How far dynamic trees are searched. Without torch, so that exports can name the same sizes."""

from __future__ import annotations

import math
from typing import NamedTuple


class TreeSize(NamedTuple):
    """How far a dynamic tree is searched."""

    width: int  # nodes of a level that are extended, and candidates behind each
    depth: int  # levels


def default_growth(nodes: int) -> TreeSize:
    """Search as wide as the root of the node budget, and a little deeper than a binary tree of that size.

    EAGLE-2's own settings for 60 nodes are width 10 and depth 7; this gives 8 and 8.
    """
    return TreeSize(min(10, max(2, round(math.sqrt(nodes)))), math.ceil(math.log2(nodes)) + 2)
