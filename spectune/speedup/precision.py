"""Sample-size planning: how many prompts until an interval is as tight as was asked for.

An interval over n prompts narrows as 1/√n, so a relative half-width w over n prompts needs n·(w / wanted)² of them.
The plan is made again whenever new prompts are in, since w itself is an estimate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.errors import UsageError
from spectune.speedup.acceptance import speculative_requests
from spectune.speedup.positions import Measured, acceptance_length
from spectune.sweeping.cell import CellResult, CellSpec

_FEWEST = 5  # prompts; a bootstrap over fewer says too little about its own width
_LARGEST_STEP = 4  # times as many prompts as there are: a width from few prompts is a rough guess


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """`half_width` is that of the 95 % interval, relative; `prompts` are those to have in all before looking again."""

    enough: bool
    half_width: float | None
    prompts: int


@dataclass(frozen=True, slots=True)
class CellSample:
    """The plan of one cell, which was measured on so many prompts."""

    spec: CellSpec
    prompts: int
    plan: SamplePlan


def parse_precision(text: str) -> float:
    """`2%` or `0.02` as a share. Raises UsageError for what is not between 0 and 1, both excluded."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text, re.ASCII)
    value = 0.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 < value < 1:
        raise UsageError(f"a precision lies between 0 and 100 %, not {text!r}", "write for instance 2%")
    return value


def plan_sample(found: Measured | None, prompts: int, precision: float) -> SamplePlan:
    """Whether `prompts` were enough for a half-width of `precision`, and else how many to have next."""
    width = found.half_width if found is not None else None
    if width is None or prompts < _FEWEST:
        return SamplePlan(False, width, max(_FEWEST, 2 * prompts))
    if width <= precision:
        return SamplePlan(True, width, prompts)
    wanted = math.ceil(prompts * (width / precision) ** 2)
    return SamplePlan(False, width, min(max(wanted, prompts + 1), _LARGEST_STEP * prompts))


def sample_plans(cells: Sequence[CellResult], precision: float) -> tuple[CellSample, ...]:
    """The plan of each cell's acceptance length."""
    counted = [(cell, len({r.prompt_id for r in speculative_requests(cell)})) for cell in cells]
    return tuple(CellSample(c.spec, n, plan_sample(acceptance_length(c), n, precision)) for c, n in counted)
