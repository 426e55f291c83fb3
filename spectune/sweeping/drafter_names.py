"""What a drafter's name says about how it drafts, without loading anything."""

from __future__ import annotations

import re

from spectune.errors import UsageError
from spectune.sweeping.cell import Rule

TREE_PREFIXES = ("tree", "sequoia", "specinfer")  # each before the drafter that drafts the trees
HEADS = ("medusa", "blockwise", "eagle", "eagle3", "mlp-speculator")  # each before a folder, a hub id or `demo`
INT8 = "int8"  # before a drafter with weights: they are stored in 8 bits
WHOLE_TARGET = "target"  # behind int8: the target itself
KINDS = ("ngram", "early-exit", "layer-skip", *HEADS, "eagle2", *TREE_PREFIXES, INT8, "staged")
_AT_ONCE = ("ngram", "medusa", "blockwise")


def drafts_trees(name: str) -> bool:
    return name.partition(":")[0] in (*TREE_PREFIXES, "eagle2")


def drafts_at_once(name: str) -> bool:
    """Whether all tokens of a round come from one step, whatever K is."""
    return name.removeprefix(f"{INT8}:").partition(":")[0] in _AT_ONCE


def has_int8_weights(name: str) -> bool:
    """Whether some weights of a drafter are stored in 8 bits: `int8:…`, `tree:int8:…`, `staged:ngram>int8:…`."""
    return INT8 in re.split("[:>]", name)


def runs_on_target_cache(name: str) -> bool:
    """Whether a drafter with weights in 8 bits is some of the target's layers, or all: it has no cache of its own."""
    trees = "|".join(TREE_PREFIXES)
    parts = rf"(?:(?:{trees}):)?{INT8}:(?:{WHOLE_TARGET}$|early-exit:|layer-skip:)"
    return re.match(parts, name) is not None


def has_random_weights(name: str) -> bool:
    """Whether a model or drafter of this name has random weights somewhere: `shape:…`, `eagle3:shape`, …"""
    return "shape" in re.split("[:>]", name.partition("{")[0])


def refuse_block(name: str, rule: Rule) -> None:
    """Block verification looks at one path. Raises UsageError for a drafter that drafts trees."""
    if rule == "block" and drafts_trees(name):
        raise UsageError(f"block verification is for chains, and {name!r} drafts trees", "use --rule speculative")
