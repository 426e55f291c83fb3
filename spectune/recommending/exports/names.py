"""What a drafter's name, as `sweep --draft` takes it, means to a server."""

from __future__ import annotations

from typing import Literal, get_args

from spectune.decoding.demo import DEMO_HUB_ID, DEMO_NAME
from spectune.sweeping.drafter_names import INT8, TREE_PREFIXES, WHOLE_TARGET

# The n-gram lengths that spectune's own drafter looks up where its name gives none.
NGRAM_MIN, NGRAM_MAX = 1, 4

Method = Literal[
    "draft-model",
    "ngram",
    "early-exit",
    "layer-skip",
    "eagle",
    "eagle3",
    "medusa",
    "mlp-speculator",
    "blockwise",
    "staged",
    "int8:target",
]
EAGLES: tuple[Method, ...] = ("eagle", "eagle3")


def method(drafter: str) -> Method:
    """The kind of drafter behind a name."""
    kind, _, rest = drafter.partition(":")
    if drafter == f"{INT8}:{WHOLE_TARGET}":
        return "int8:target"
    if kind in (*TREE_PREFIXES, INT8):
        return method(rest)
    if kind == "eagle2":
        return "eagle"
    return kind if kind in get_args(Method) else "draft-model"  # type: ignore[return-value]


def head_path(drafter: str) -> str:
    """The folder or hub id in `eagle3:PATH` or `tree:eagle3:PATH`; a draft model's name as it is.

    A shipped draft becomes a path to fill in: no engine reads its packed form.
    """
    return f"path/to/your-{method(drafter)}" if is_shipped(drafter) else _path(drafter)


def target_path(name: str) -> str:
    """A hub id for the demo model, which engines do not know by its name here."""
    return DEMO_HUB_ID if name == DEMO_NAME else name


def is_shipped(drafter: str) -> bool:
    """Whether the draft is one of those in the package."""
    return _path(drafter) == "demo" or _path(drafter).startswith("smollm2-")


def _path(drafter: str) -> str:
    kind, _, rest = drafter.partition(":")
    if kind in (*TREE_PREFIXES, INT8):
        return _path(rest)
    return rest if kind == "eagle2" or kind in get_args(Method) else drafter


def ngram_lengths(drafter: str) -> tuple[int, int]:
    """The shortest and longest n-gram that `ngram`, `ngram:N` or `ngram:MIN-MAX` looks up."""
    low, _, high = drafter.partition(":")[2].partition("-")
    return (int(low), int(high or low)) if low else (NGRAM_MIN, NGRAM_MAX)
