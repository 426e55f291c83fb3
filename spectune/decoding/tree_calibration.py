"""Static trees planned by Sequoia's programme for this target, this draft and this device.

What the programme needs is measured (`tree_measurement`) and kept in the cache folder: a sweep measures it once, and a
resumed sweep drafts the same trees.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock

from spectune.decoding.adapter import CausalModel
from spectune.decoding.demo import cache_folder
from spectune.decoding.drafter import Round
from spectune.decoding.loading import Loaded
from spectune.decoding.model_drafter import ModelDrafter
from spectune.decoding.tree import Siblings
from spectune.decoding.tree_measurement import Acceptance, StepTimes, measure_acceptance, measure_times
from spectune.decoding.tree_plans import draws_children
from spectune.decoding.tree_shapes import SequoiaTable, Shape, choose
from spectune.engines.engine import Request
from spectune.sweeping.atomic import write_atomically
from spectune.sweeping.cell import Rule, Sampling

T = TypeVar("T")

_FORMAT = 1
_LEVELS = 16  # deepest tree considered


@dataclass(frozen=True, slots=True)
class Calibration:
    """A planned tree and what it was planned from."""

    nodes: int  # the budget
    rows: int
    sampling: Sampling
    acceptance: Acceptance
    times: StepTimes
    shape: Shape
    tokens: float  # expected per round

    @property
    def note(self) -> str:
        """The plan in one line."""
        table = SequoiaTable(self.acceptance.ranks, self.nodes, min(_LEVELS, self.nodes))
        cheapest = len(choose(table, self.times.draft_seconds(1), self.times.verify_seconds).shape.parents)
        advice = f"{cheapest} nodes should take the least time per token" if cheapest else "no tree should pay"
        return (
            f"tree of {self.nodes} nodes at batch {self.rows}, temperature {self.sampling.temperature:g}: children "
            f"accepted by rank {' '.join(f'{chance:.3f}' for chance in self.acceptance.ranks[:8])} (over "
            f"{self.acceptance.positions} tokens), nodes by level "
            f"{'+'.join(map(str, level_sizes(self.shape.parents))) or 'none'}, {self.tokens:.2f} tokens per round "
            f"expected; draft step {self.times.draft_seconds(1) * 1e3:.3g} ms, verification "
            f"{self.times.verify_seconds(self.nodes + 1) * 1e3:.3g} ms; by these times {advice}"
        )


def load_or_calibrate(
    target: Loaded,
    drafter: ModelDrafter,
    draft_digest: str,
    *,
    nodes: int,
    rows: int,
    siblings: Siblings,
    sampling: Sampling,
    requests: Sequence[Request] | None = None,
    folder: Path | None = None,
) -> Calibration:
    """Plan the tree of a node budget that takes the least time per token, from measurements kept in a folder.

    Args:
        drafter: names the draft model and its vocabulary; `draft_digest` pins its weights.
        nodes: drafted nodes, at most.
        rows: the batch size that steps are timed at.
        siblings: how children are drawn; "distinct" are the draft's likeliest tokens.
        requests: what the target answers while acceptance is measured; prompts of the training book if None.
        folder: in place of `trees` in the cache folder.
    """
    folder = cache_folder() / "trees" if folder is None else folder
    models = {"target": target.model, "draft": drafter.model}
    pair = {"target_digest": target.info.digest, "draft_digest": draft_digest}
    pair |= {f"{name}_dtype": str(model.model.dtype) for name, model in models.items()}
    asked = [[r.token_ids, r.max_new_tokens, r.seed] for r in requests] if requests is not None else None
    acceptance = _kept(
        folder,
        "acceptance",
        {**pair, "siblings": siblings, "sampling": sampling.model_dump(), "requests": asked},
        lambda: measure_acceptance(target, drafter, siblings, sampling, requests),
        lambda data: Acceptance(tuple(data["ranks"]), data["positions"]),
    )
    devices = {f"{name}_device": _device_name(model) for name, model in models.items()}
    times = _kept(
        folder,
        "times",
        {**pair, **devices, "nodes": nodes, "rows": rows},
        lambda: measure_times(target.model, drafter.model, nodes, rows),
        lambda data: StepTimes(tuple(data["widths"]), tuple(data["draft"]), tuple(data["verify"])),
    )
    shape, tokens = plan(acceptance, times, nodes)
    return Calibration(nodes, rows, sampling, acceptance, times, shape, tokens)


def plan(acceptance: Acceptance, times: StepTimes, nodes: int) -> tuple[Shape, float]:
    """The tree of a node budget whose depth gives the least time per token, and the tokens it is expected to emit.

    Every level costs a draft step over its nodes that have children; verification always costs the whole budget.
    """
    table = SequoiaTable(acceptance.ranks, nodes, min(nodes, _LEVELS))

    def seconds_per_token(depth: int) -> float:
        drafting = sum(map(times.draft_seconds, fed_sizes(table.shape(nodes, depth).parents)))
        return (drafting + times.verify_seconds(nodes + 1)) / float(table.expected[depth, nodes])

    depth = min(range(1, len(table.expected)), key=seconds_per_token)
    return table.shape(nodes, depth), float(table.expected[depth, nodes])


def level_sizes(parents: Sequence[int]) -> list[int]:
    """How many nodes each level below the root has."""
    depths = _depths(parents)
    return [depths.count(depth) for depth in range(1, max(depths) + 1)]


def fed_sizes(parents: Sequence[int]) -> list[int]:
    """How many nodes of each level, the root's first, have children."""
    depths = _depths(parents)
    inner = [depths[node] for node in set(parents)]
    return [inner.count(depth) for depth in range(max(depths))]


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


class CalibratedShapes:
    """Shapes by Sequoia's programme, each planned when it is first wanted.

    Planning takes seconds to a minute the first time; `prepare` has it done before a clock runs.

    Args:
        target, drafter, draft_digest, requests, folder: as for `load_or_calibrate`.
        siblings: how children are drawn under rules that use the draft's distribution.
    """

    def __init__(
        self,
        target: Loaded,
        drafter: ModelDrafter,
        draft_digest: str,
        siblings: Siblings,
        *,
        requests: Sequence[Request] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.draft_digest = draft_digest
        self.siblings: Siblings = siblings
        self.requests = requests
        self.folder = folder
        self.calibrations: dict[tuple[int, int, Siblings, Sampling], Calibration] = {}

    def prepare(self, nodes: int, slots: int, rule: Rule, sampling: Sampling) -> Calibration:
        """The plan for a node budget at a batch size."""
        siblings: Siblings = self.siblings if draws_children(rule, sampling) else "distinct"
        key = nodes, slots, siblings, sampling
        if key not in self.calibrations:
            self.calibrations[key] = load_or_calibrate(
                self.target,
                self.drafter,
                self.draft_digest,
                nodes=nodes,
                rows=slots,
                siblings=siblings,
                sampling=sampling,
                requests=self.requests,
                folder=self.folder,
            )
        return self.calibrations[key]

    def parents(self, round_: Round, slots: int) -> Sequence[int]:
        return self.prepare(round_.nodes, slots, round_.rule, round_.sampling).shape.parents

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for every plan so far."""
        return tuple(calibration.note for calibration in self.calibrations.values())


def _device_name(model: CausalModel) -> str:
    """What times depend on: the GPU's model, or the number of threads."""
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return f"cpu, {torch.get_num_threads()} threads"


def _kept(folder: Path, name: str, key: dict[str, Any], measure: Callable[[], Any], read: Callable[[Any], T]) -> T:
    """A measurement from the folder, made now if it is not there or does not read."""
    digest = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{name}-{digest}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        try:
            return read(json.loads(path.read_text("utf-8"))["measured"])
        except (OSError, ValueError, KeyError, TypeError):
            measured = asdict(measure())
            write_atomically(path, json.dumps({"key": key, "measured": measured}, indent=2) + "\n")
            return read(measured)
