"""The fast plan held against a full grid of the same cells, as Markdown.

    python -m spectune.reporting.plan_check FAST_RUN FULL_RUN -o FILE

Per suite and batch: what the fast plan's cells make the best choice, what that choice is worth in the grid, and the
grid's own best. The latter is the largest of many noisy numbers, so even a perfect choice loses against it. How much
is told, and so is what the choice loses once the grid's costs are pooled (`speedup.pooled`), beside what the grid's own
largest measurements lose then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import numpy as np
import typer

from spectune.errors import SpectuneError, UsageError
from spectune.reporting.methods import markdown
from spectune.speedup.pooled import Pooled, pooled
from spectune.speedup.run import Run, load_run
from spectune.sweeping.atomic import write_atomically
from spectune.sweeping.cell import CellResult, CellSpec
from spectune.sweeping.fast_plan import prediction_errors
from spectune.sweeping.fast_record import FastRecord, read_record
from spectune.sweeping.figures import figures

OFF = 1.0  # the speedup of plain decoding
NEAR = 0.03  # a choice that loses no more than this is as good as the best
_DRAWS = 2000  # noisy grids drawn to tell what a perfect choice loses in one


@dataclass(frozen=True, slots=True)
class Choice:
    """`chosen` and `best` are None for OFF; both values are speedups as the full grid measured them."""

    suite: str
    batch: int
    chosen: CellSpec | None
    value: float
    best: CellSpec | None
    best_value: float

    @property
    def loss(self) -> float:
        return 1 - self.value / self.best_value


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fast plan held against one set of speedups; errors are |predicted / shown - 1| of cells that it left out."""

    choices: tuple[Choice, ...]
    errors: tuple[float, ...]

    @property
    def losses(self) -> list[float]:
        return [choice.loss for choice in self.choices]


@dataclass(frozen=True, slots=True)
class Check:
    """Seconds of measuring, warm-up included. The last four are None where the grid is too small to be pooled.

    `share_at_one_pace` is the fast plan's share of the time, had the machine been as quick in it as in the grid.
    `full_pooled` is `pooled` of the grid itself, whose choice is its own largest measurement.
    `perfect_loss` is what the choice of the best cell itself loses on average against the largest of equally noisy
    measurements.
    """

    measured: Verdict
    fast_seconds: float
    full_seconds: float
    share_at_one_pace: float
    fast_cells: int
    full_cells: int
    length_errors: tuple[float, ...]  # of the predicted acceptance lengths of the cells left out
    pooled: Verdict | None = None
    full_pooled: Verdict | None = None
    steady: Pooled | None = None
    perfect_loss: float | None = None


def check(fast: Run, full: Run, record: FastRecord) -> Check:
    """Raises UsageError where the grid lacks a cell that the fast plan chose."""
    truth = {cell.key: figures(cell).speedup for cell in full.cells}
    missing = [cell.key for cell in fast.cells if cell.key not in truth]
    if missing:
        raise UsageError(f"the full grid lacks {len(missing)} cells of the fast plan", "sweep both with equal options")
    in_grid = {cell.key: _seconds(cell) for cell in full.cells}
    in_fast = sum(map(_seconds, fast.cells))
    fast_seconds = in_fast + sum(p.cost_seconds for p in record.probes)
    full_seconds = sum(in_grid.values())
    found = Check(
        _verdict(fast, full, record, truth),
        fast_seconds,
        full_seconds,
        fast_seconds / full_seconds * sum(in_grid[cell.key] for cell in fast.cells) / in_fast,
        len(fast.cells),
        len(full.cells),
        _length_errors(record, full, {cell.key for cell in fast.cells}),
    )
    steady = pooled(full.cells)
    if steady is None:
        return found
    places = [[c.key for c in full.cells if (c.spec.suite, c.spec.batch) == place] for place in _places(full)]
    rivals = [[steady.speedups[key] for key in keys if key in steady.speedups] for keys in places]
    return replace(
        found,
        pooled=_verdict(fast, full, record, steady.speedups),
        full_pooled=_verdict(full, full, record, steady.speedups),
        steady=steady,
        perfect_loss=float(np.mean([perfect_loss(own, steady.noise) for own in rivals if own])),
    )


def _length_errors(record: FastRecord, full: Run, seen: set[str]) -> tuple[float, ...]:
    lengths = {cell.key: figures(cell).acceptance_length for cell in full.cells if cell.key not in seen}
    return tuple(
        abs(p.acceptance_length / length - 1) for p in record.predictions if (length := lengths.get(p.key)) is not None
    )


def perfect_loss(speedups: Sequence[float], noise: float) -> float:
    """Mean over noisy measurements of a place of 1 - (measured at its best cell, or OFF) / (the largest measured)."""
    true = np.array([OFF, *speedups])
    draws = true * np.exp(np.random.default_rng(0).normal(0, noise, (_DRAWS, len(true))))
    draws[:, 0] = OFF
    return float(np.mean(1 - draws[:, true.argmax()] / draws.max(axis=1)))


def _places(full: Run) -> list[tuple[str, int]]:
    return list(dict.fromkeys((s.suite, s.batch) for s in full.info.plan))


def _verdict(fast: Run, full: Run, record: FastRecord, truth: Mapping[str, float | None]) -> Verdict:
    grid = {cell.key: cell.spec for cell in full.cells}
    left_out = {key: value for key, value in truth.items() if key not in {cell.key for cell in fast.cells}}
    return Verdict(
        tuple(_choice(place, fast.cells, grid, truth) for place in _places(full)),
        tuple(prediction_errors({p.key: p for p in record.predictions}, left_out)),
    )


def _choice(
    place: tuple[str, int],
    measured: Sequence[CellResult],
    grid: Mapping[str, CellSpec],
    truth: Mapping[str, float | None],
) -> Choice:
    own = {c.key: figures(c).speedup for c in measured if (c.spec.suite, c.spec.batch) == place}
    here = {key: truth.get(key) for key, spec in grid.items() if (spec.suite, spec.batch) == place}
    chosen, best = _largest(own), _largest(here)
    return Choice(
        *place,
        grid[chosen] if chosen else None,
        truth.get(chosen) or OFF if chosen else OFF,
        grid[best] if best else None,
        truth[best] or OFF if best else OFF,
    )


def _largest(speedups: Mapping[str, float | None]) -> str | None:
    """The key of the largest speedup above plain decoding."""
    known = {key: value for key, value in speedups.items() if value is not None and value > OFF}
    return max(known, key=lambda key: known[key]) if known else None


def _seconds(cell: CellResult) -> float:
    return (datetime.fromisoformat(cell.finished_at) - datetime.fromisoformat(cell.started_at)).total_seconds()


def page(found: Check, fast: Run, full: Run) -> str:
    """The whole file."""
    spec = full.cells[0].spec
    share = found.fast_seconds / found.full_seconds
    said = (
        f"The fast plan measured {found.fast_cells} of {found.full_cells} cells and some timed rounds in "
        f"{found.fast_seconds / 60:.1f} of the grid's {found.full_seconds / 60:.1f} minutes ({share:.1%}; "
        f"{found.share_at_one_pace:.1%} had each of its cells taken as long as in the grid). " + _said(found.measured)
    )
    if found.length_errors:
        median, p90 = np.percentile(found.length_errors, [50, 90])
        said += f" Their acceptance lengths alone are off by {median:.1%} and {p90:.1%}."
    where = (
        f"Target `{full.info.target.name}`, {spec.dtype} on {spec.device}; {full.info.created_at[:10]}, spectune "
        f"{full.info.spectune_version}; the fast run: {fast.info.created_at[:10]}. `make grid` measures both again."
    )
    parts = ["# The fast plan against the full grid", said, where, "## As measured", _table(found.measured)]
    if found.steady and found.pooled and found.full_pooled and found.perfect_loss is not None:
        noise = found.steady.noise
        noisy = (
            f"The machine is not steady: what a round costs in plain steps of the same cell spreads by {noise:.1%} "
            f"around a smooth curve in K. With speedups that are known to that only, the best cell itself would lose "
            f"{found.perfect_loss:.1%} on average against the largest measurement of its place, and predictions "
            f"without any error would seem off by {_typical_error(noise, 0.5):.1%} in the median and "
            f"{_typical_error(noise, 0.9):.1%} at the 90th percentile. So here the grid's costs are pooled: each "
            f"cell keeps its own acceptance length, counted over all rounds; what its round costs comes from a curve "
            f"fitted to all cells of its batch. {_said(found.pooled)} What the whole grid measured as "
            f"fastest lies, judged alike, {_near(found.full_pooled)}."
        )
        parts += ["## With the costs pooled", noisy, _table(found.pooled)]
    return "\n\n".join(parts) + "\n"


def _typical_error(noise: float, share: float) -> float:
    """The size that this share of normal errors stays below."""
    return NormalDist(0, noise).inv_cdf((1 + share) / 2) if noise else 0.0


def _near(verdict: Verdict) -> str:
    losses = verdict.losses
    places = f"{sum(loss <= NEAR for loss in losses)} of {len(losses)} places"
    return f"within {NEAR:.0%} of the grid's best in {places}, the worst {max(losses):.1%} below it"


def _said(verdict: Verdict) -> str:
    said = f"Its choice lies {_near(verdict)}."
    if verdict.errors:
        median, p90 = np.percentile(verdict.errors, [50, 90])
        said += (
            f" On the {len(verdict.errors)} cells that it left out its predictions are off by {median:.1%} in the "
            f"median and {p90:.1%} at the 90th percentile."
        )
    return said


def _table(verdict: Verdict) -> str:
    head = [
        "suite",
        "batch",
        "choice of the fast plan",
        "its speedup in the grid",
        "the grid's best",
        "speedup",
        "loss",
    ]
    rows = [
        [
            c.suite,
            str(c.batch),
            _name(c.chosen),
            f"{c.value:.2f}",
            _name(c.best),
            f"{c.best_value:.2f}",
            f"{c.loss:.1%}",
        ]
        for c in verdict.choices
    ]
    return markdown(head, rows)


def _name(spec: CellSpec | None) -> str:
    return "OFF" if spec is None else f"`{spec.drafter}`, K {spec.k}"


def main(
    fast: Annotated[Path, typer.Argument(help="Run directory of a fast plan.")],
    full: Annotated[Path, typer.Argument(help="Run directory of the same grid, measured whole.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
) -> None:
    """Write what the fast plan's choices are worth."""
    try:
        record = read_record(fast)
        if record is None:
            raise UsageError(f"{fast} holds no fast plan", "sweep without --plan full")
        runs = load_run(fast), load_run(full)
        found = page(check(*runs, record), *runs)
        write_atomically(output, found)
        typer.echo(found)
    except SpectuneError as error:
        typer.echo(str(error), err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    typer.run(main)
