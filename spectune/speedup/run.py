"""Reading a run directory: the plan, the finished cells and the failed ones.

Nothing is repaired here: a file that cannot be understood stops the analysis, since a mean over fewer cells
than the user thinks would be wrong in silence.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from spectune.errors import CannotJudge, UsageError
from spectune.sweeping.cell import SCHEMA_VERSION, CellResult, CellSpec, FailedCell, Record, RunInfo
from spectune.sweeping.fast_record import FastRecord, read_record
from spectune.sweeping.rundir import CELLS, FAILED, RUN_FILE
from spectune.sweeping.synthetic import one_setting

# What the cells of one run may differ in. Anything else would make their speeds incomparable.
_AXES = {
    "suite",
    "suite_digest",
    "drafter",
    "drafter_digest",
    "draft_device",
    "k",
    "batch",
    "rule",
    "synthetic",  # its rates are checked apart
    "repeats",
}
_Record = TypeVar("_Record", bound=Record)


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory in memory, in the order of the plan. `failed` leaves out cells that succeeded later.

    `fast` is what a fast plan knew and chose; None for a run that was to measure its whole grid.
    """

    path: Path
    info: RunInfo
    cells: tuple[CellResult, ...]
    failed: tuple[FailedCell, ...]
    fast: FastRecord | None = None


def load_run(path: Path | str, *, allow_empty: bool = False) -> Run:
    """Read and check a whole run. `allow_empty` accepts one in which no cell has finished.

    Raises:
        UsageError: no such directory, no run.json, a file that is truncated, invalid or newer than this
            version of spectune, or cells that were measured with different settings.
        CannotJudge: no cell has finished, unless `allow_empty`.
    """
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"there is no run directory {path}", "name the folder that holds run.json")
    if not (path / RUN_FILE).is_file():
        raise UsageError(f"{path} holds no {RUN_FILE}", "name the folder that `spectune sweep` wrote")
    info = _read(path / RUN_FILE, RunInfo)
    files = sorted((path / CELLS).glob("*.json"))
    with _collector_paused():
        cells = [_keyed(p, _read(p, CellResult), ".json") for p in files if not p.name.endswith(FAILED)]
        failed = [_keyed(p, _read(p, FailedCell), FAILED) for p in files if p.name.endswith(FAILED)]
    finished = {cell.key for cell in cells}
    failed = [cell for cell in failed if cell.key not in finished]
    _check_comparable([cell.spec for cell in cells])
    if not cells and not allow_empty:
        raise CannotJudge(
            f"no cell of {path} has finished ({len(failed)} failed)",
            "run `spectune sweep` to its end; `spectune report` shows why cells failed",
        )
    place = {spec.key: n for n, spec in enumerate(info.plan)}

    def order(cell: CellResult | FailedCell) -> tuple[int, str]:
        return place.get(cell.key, len(place)), cell.key

    return Run(path, info, tuple(sorted(cells, key=order)), tuple(sorted(failed, key=order)), read_record(path))


def find_run(path: Path | None, folder: Path = Path("runs")) -> Path:
    """`path` itself, or the newest run inside `folder` where it is None.

    Raises UsageError where there is none.
    """
    if path is not None:
        return path
    runs = [p.parent for p in folder.glob(f"*/{RUN_FILE}")]
    if not runs:
        raise UsageError(f"there is no run in ./{folder}", "name one, for example `spectune recommend runs/NAME`")
    return max(runs, key=lambda run: ((run / RUN_FILE).stat().st_mtime, run.name))


@contextmanager
def _collector_paused() -> Iterator[None]:
    # A large run is some 100 000 small records that all stay alive: collections triggered by their number
    # find nothing and take two thirds of the time to load.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read(path: Path, kind: type[_Record]) -> _Record:
    try:
        return kind.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: ValidationError) -> UsageError:
    errors = error.errors(include_url=False)
    version = next((e["input"] for e in errors if e["loc"] == ("schema_version",)), None)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        return UsageError(
            f"{path} has schema version {version}, this spectune reads up to {SCHEMA_VERSION}",
            "use the spectune that measured it, or a newer one",
        )
    place = ".".join(map(str, errors[0]["loc"]))
    return UsageError(
        f"{path} cannot be read: {place + ': ' if place else ''}{errors[0]['msg']}",
        "it was cut short or changed by hand; remove it and sweep again with --resume",
    )


_Cell = TypeVar("_Cell", CellResult, FailedCell)


def _keyed(path: Path, cell: _Cell, suffix: str) -> _Cell:
    if path.name != cell.key + suffix:
        raise UsageError(f"{path} holds the cell {cell.key}", "a file was renamed or copied; remove it")
    return cell


def _check_comparable(specs: Iterable[CellSpec]) -> None:
    specs = list(specs)
    if not one_setting(spec.synthetic for spec in specs if spec.k):
        raise UsageError("the cells differ in synthetic acceptance", "keep one setting to a run")
    for name in CellSpec.model_fields:
        values = list(dict.fromkeys(str(getattr(spec, name)) for spec in specs))
        if name not in _AXES and len(values) > 1:
            raise UsageError(f"the cells differ in {name}: {', '.join(values)}", "keep one setting to a run")
    places: set[tuple[object, ...]] = set()
    for spec in specs:
        place = (spec.suite, spec.batch, spec.drafter, spec.rule, spec.k)
        if place in places:
            raise UsageError(
                f"two cells are both {spec.suite}, batch {spec.batch}, {spec.drafter}, K {spec.k}",
                "prompts or weights changed between them; remove the older one",
            )
        places.add(place)
