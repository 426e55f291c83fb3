"""fast.json in a run directory: what a fast plan knew, and what it made of it (see `fast_plan`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from spectune.sweeping.atomic import write_atomically
from spectune.sweeping.cell import Record
from spectune.sweeping.fast_plan import Prediction
from spectune.sweeping.round_costs import Probe

FILE = "fast.json"


class FastRecord(Record):
    """A fast plan of a grid of `grid_cells` cells; `complete` once all that it measures is in the run's plan."""

    schema_version: Literal[2] = 2
    grid_cells: int
    probes: tuple[Probe, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    checks: tuple[str, ...] = ()  # keys of cells measured for the predictions' sake
    complete: bool | None = None  # None in older files


def read_record(run: Path) -> FastRecord | None:
    """None where there is none, or one that cannot be understood: it can be made again."""
    try:
        return FastRecord.model_validate_json((run / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write_record(run: Path, record: FastRecord) -> None:
    """Replaces the one that is there."""
    write_atomically(run / FILE, record.model_dump_json(indent=1) + "\n")
