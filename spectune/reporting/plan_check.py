"""The fast plan held against a full grid of the same cells, as Markdown.

    python -m spectune.reporting.plan_check FAST_RUN FULL_RUN -o FILE

Per suite and batch: what the fast plan's cells make the best choice, what that choice is worth in the grid, and the
grid's own best. The latter is the largest of many noisy numbers, so even a perfect choice loses a little against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from spectune.errors import SpectuneError, UsageError
from spectune.reporting.methods import markdown
from spectune.speedup.run import Run, load_run
from spectune.sweeping.atomic import write_atomically
from spectune.sweeping.cell import CellResult, CellSpec
from spectune.sweeping.fast_plan import prediction_errors
from spectune.sweeping.fast_sweep import FastRecord, read_record
from spectune.sweeping.figures import figures

OFF = 1.0  # the speedup of plain decoding
NEAR = 0.03  # a choice that loses no more than this is as good as the best


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
class Check:
    """Seconds of measuring, warm-up included; errors are |predicted / measured - 1| of cells that the plan left out."""

    choices: tuple[Choice, ...]
    fast_seconds: float
    full_seconds: float
    fast_cells: int
    full_cells: int
    errors: tuple[float, ...]


def check(fast: Run, full: Run, record: FastRecord) -> Check:
    """Raises UsageError where the grid lacks a cell that the fast plan chose."""
    truth = {cell.key: figures(cell).speedup for cell in full.cells}
    grid = {cell.key: cell.spec for cell in full.cells}
    missing = [cell.key for cell in fast.cells if cell.key not in truth]
    if missing:
        raise UsageError(f"the full grid lacks {len(missing)} cells of the fast plan", "sweep both with equal options")
    left_out = {key: value for key, value in truth.items() if key not in {cell.key for cell in fast.cells}}
    return Check(
        tuple(
            _choice(place, fast.cells, grid, truth)
            for place in dict.fromkeys((s.suite, s.batch) for s in full.info.plan)
        ),
        sum(map(_seconds, fast.cells)) + sum(p.cost_seconds for p in record.probes),
        sum(map(_seconds, full.cells)),
        len(fast.cells),
        len(full.cells),
        tuple(prediction_errors({p.key: p for p in record.predictions}, left_out)),
    )


def _choice(
    place: tuple[str, int],
    measured: Sequence[CellResult],
    grid: Mapping[str, CellSpec],
    truth: Mapping[str, float | None],
) -> Choice:
    own = {c.key: figures(c).speedup for c in measured if (c.spec.suite, c.spec.batch) == place}
    here = {key: truth[key] for key, spec in grid.items() if (spec.suite, spec.batch) == place}
    chosen, best = _largest(own), _largest(here)
    return Choice(
        *place,
        grid[chosen] if chosen else None,
        truth[chosen] or OFF if chosen else OFF,
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
        for c in found.choices
    ]
    losses = [c.loss for c in found.choices]
    share = found.fast_seconds / found.full_seconds
    said = (
        f"The fast plan measured {found.fast_cells} of {found.full_cells} cells and some timed rounds in "
        f"{found.fast_seconds / 60:.1f} of the grid's {found.full_seconds / 60:.1f} minutes ({share:.1%}). Its choice "
        f"lies within {NEAR:.0%} of the grid's best in {sum(loss <= NEAR for loss in losses)} of {len(losses)} places, "
        f"the worst {max(losses):.1%} below it."
    )
    if found.errors:
        median, p90 = np.percentile(found.errors, [50, 90])
        said += (
            f" On the {len(found.errors)} cells that it left out its predictions were off by {median:.1%} in the "
            f"median and {p90:.1%} at the 90th percentile."
        )
    where = (
        f"Target `{full.info.target.name}`, {spec.dtype} on {spec.device}; {full.info.created_at[:10]}, spectune "
        f"{full.info.spectune_version}; the fast run: {fast.info.created_at[:10]}. `make grid` measures both again."
    )
    return "\n\n".join(["# The fast plan against the full grid", said, where, markdown(head, rows)]) + "\n"


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
