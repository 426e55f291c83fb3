"""Self-speculation by skipping: the target without some of its blocks drafts for the whole target.

A decoder layer is two blocks, attention and MLP, each added to the residual stream; a skipped block adds nothing
(Zhang et al. 2023, arXiv 2309.08168). Which blocks a model can spare differs from model to model: a searched set is
kept in a folder whose config.json says {"spectune_head": "layer-skip", "skip": ["12-15", "a3", "m7"]}.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spectune.decoding.adapter import CausalModel
from spectune.decoding.lean import LeanModel
from spectune.errors import UsageError
from spectune.heads.checkpoint import read_config

_PART = re.compile(r"([am]?)([0-9]{1,5})(?:-([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Skip:
    """The blocks that are left out."""

    attention: frozenset[int]  # layers without their attention
    mlp: frozenset[int]  # layers without their MLP

    @property
    def layers(self) -> frozenset[int]:
        """Layers that are skipped as a whole."""
        return self.attention & self.mlp

    @property
    def parts(self) -> list[str]:
        """The shortest list that `parse_skip` reads as this set."""
        return [
            *_ranges("", self.layers),
            *_ranges("a", self.attention - self.layers),
            *_ranges("m", self.mlp - self.layers),
        ]

    def __str__(self) -> str:
        return ",".join(self.parts)


def parse_skip(name: str, text: str) -> Skip:
    """`12-15,a3,m7`: layers 12 to 15, the attention of layer 3 and the MLP of layer 7.

    Args:
        name: of the drafter, for errors.

    Raises:
        UsageError: a part that is none of these, or a range that runs backwards.
    """
    attention: set[int] = set()
    mlp: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(
                f"drafter {name!r} needs a whole number where {part!r} stands",
                "layers are written 12 or 12-15, one layer's attention a3, its MLP m7, as in layer-skip:12-15,a3,m7",
            )
        block, first, last = match[1], int(match[2]), int(match[3] or match[2])
        if last < first:
            raise UsageError(f"drafter {name!r}: {part!r} runs backwards")
        if block != "m":
            attention.update(range(first, last + 1))
        if block != "a":
            mlp.update(range(first, last + 1))
    return Skip(frozenset(attention), frozenset(mlp))


def read_skip(folder: Path) -> Skip:
    """The set that a folder's config.json holds.

    Raises:
        UsageError: no such file, another kind of head, or a malformed list.
    """
    config = read_config(folder)
    parts = config.get("skip")
    if config.get("spectune_head") != "layer-skip" or not isinstance(parts, list) or not parts:
        raise UsageError(
            f"{folder / 'config.json'} lists no layers to skip",
            'it should say {"spectune_head": "layer-skip", "skip": ["12-15", "a3", "m7"]}',
        )
    return parse_skip(str(folder), ",".join(map(str, parts)))


def skip_of(name: str, argument: str) -> Skip:
    """What `layer-skip:ARGUMENT` asks for: a folder, or a list of layers and blocks.

    Raises:
        UsageError: neither.
    """
    is_list = all(_PART.fullmatch(part) for part in argument.split(","))
    if not is_list and (folder := Path(argument).expanduser()).is_dir():
        return read_skip(folder)
    return parse_skip(name, argument)


def skipped_model(target: CausalModel, skip: Skip) -> CausalModel:
    """The target without some blocks: the same weights, on cache layers of the same numbers.

    Raises:
        UsageError: layers that the target lacks, nothing left to run, or single blocks of a model whose forward is not
            written out (see `lean`).
    """
    count = target.layers_count
    if beyond := sorted(i for i in skip.attention | skip.mlp if i >= count):
        raise UsageError(f"layer {beyond[0]} cannot be skipped: the target's layers are 0 to {count - 1}")
    if len(skip.layers) == count:
        raise UsageError("every layer of the target is skipped", f"leave at least one of 0 to {count - 1}")
    if skip.attention == skip.mlp:
        return target.subset([i for i in range(count) if i not in skip.layers])
    if not isinstance(target, LeanModel):
        single = Skip(skip.attention - skip.layers, skip.mlp - skip.layers)
        raise UsageError(
            f"{type(target.model).__name__} can skip whole layers only, not {single}",
            "skip whole layers, for example layer-skip:3",
        )
    return target.without_blocks(skip.attention, skip.mlp)


def _ranges(prefix: str, numbers: Iterable[int]) -> list[str]:
    """{3, 12, 13, 14} -> ["3", "12-14"], each with the prefix."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{prefix}{run[0]}" if len(run) == 1 else f"{prefix}{run[0]}-{run[-1]}" for run in runs]
