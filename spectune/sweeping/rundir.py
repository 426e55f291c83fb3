"""The run directory: run.json and one file per cell, filled by one or several processes.

    NAME/run.json               the plan and where it ran
    NAME/cells/KEY.json         a finished cell
    NAME/cells/KEY.failed.json  why a cell has no result
    NAME/.locks/                one lock file per cell; a lock dies with its process, the file stays

Every file is written under its lock, so whoever holds a lock may clear what a dead writer left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout
from pydantic import ValidationError

from spectune.errors import UsageError
from spectune.sweeping.atomic import TEMPORARY, cannot_write, write_atomically
from spectune.sweeping.cell import CellResult, FailedCell, Record, RunInfo

RUN_FILE = "run.json"
CELLS = "cells"
_LOCKS = ".locks"
FAILED = ".failed.json"
_Record = TypeVar("_Record", bound=Record)


class RunDirectory:
    """One run on disk. Nothing is created before something is written or locked."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def exists(self) -> bool:
        """Whether there is a run here."""
        return (self.path / RUN_FILE).is_file()

    def foreign_files(self) -> list[str]:
        """Names in the folder that no run has left, if it holds no run: a reason not to write there."""
        if self.exists() or not self.path.is_dir():
            return []
        return sorted({p.name for p in self.path.iterdir()} - {CELLS, _LOCKS, RUN_FILE + TEMPORARY})

    def info(self) -> RunInfo:
        """run.json. Raises UsageError where there is none, or where it cannot be understood."""
        if not self.exists():
            raise UsageError(f"{self.path} is not a run", "give the folder that holds run.json")
        return _read(self.path / RUN_FILE, RunInfo)

    def write_info(self, info: RunInfo) -> None:
        """Call inside `locked()`."""
        self._make_folders()
        write_atomically(self.path / RUN_FILE, _text(info))

    def is_finished(self, key: str) -> bool:
        return self._cell(key).is_file()

    def results(self) -> tuple[CellResult, ...]:
        """All finished cells, in the order of the plan; cells outside of it follow by key."""
        return self._ordered([_read(p, CellResult) for p in self._files() if not p.name.endswith(FAILED)])

    def failures(self) -> tuple[FailedCell, ...]:
        """All failed cells that no later success has replaced, in the order of the plan."""
        failures = [_read(p, FailedCell) for p in self._files() if p.name.endswith(FAILED)]
        return self._ordered([f for f in failures if not self.is_finished(f.key)])

    def failure(self, key: str) -> FailedCell | None:
        path = self._failed(key)
        return _read(path, FailedCell) if path.is_file() else None

    def write_result(self, result: CellResult) -> None:
        """Call inside `claim`. A success removes the failure of an earlier try."""
        write_atomically(self._cell(result.key), _text(result))
        self._failed(result.key).unlink(missing_ok=True)

    def write_failure(self, failed: FailedCell) -> None:
        """Call inside `claim`."""
        write_atomically(self._failed(failed.key), _text(failed))

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether this process may measure the cell now; False while another one does."""
        lock = self._lock(key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        except OSError as error:
            raise cannot_write(self.path, error) from error
        try:
            for path in (self._cell(key), self._failed(key)):
                path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)
            yield True
        finally:
            lock.release()

    @contextmanager
    def locked(self, name: str = "run") -> Iterator[None]:
        """Hold run.json, to read and change it in one step, or something else of that name. Waits for its turn."""
        lock = self._lock(name)
        try:
            lock.acquire()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        try:
            yield
        finally:
            lock.release()

    def _cell(self, key: str) -> Path:
        return self.path / CELLS / f"{key}.json"

    def _failed(self, key: str) -> Path:
        return self.path / CELLS / f"{key}{FAILED}"

    def _files(self) -> list[Path]:
        return sorted((self.path / CELLS).glob("*.json"))

    def _ordered(self, cells: list[_Cell]) -> tuple[_Cell, ...]:
        place = {spec.key: n for n, spec in enumerate(self.info().plan)}
        return tuple(sorted(cells, key=lambda cell: (place.get(cell.key, len(place)), cell.key)))

    def _lock(self, name: str) -> FileLock:
        self._make_folders()
        return FileLock(self.path / _LOCKS / f"{name}.lock")

    def _make_folders(self) -> None:
        try:
            for folder in (CELLS, _LOCKS):
                os.makedirs(self.path / folder, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.path, error) from error


_Cell = TypeVar("_Cell", CellResult, FailedCell)


def _text(record: Record) -> str:
    return record.model_dump_json(indent=1) + "\n"


def _read(path: Path, kind: type[_Record]) -> _Record:
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{path} cannot be read: {place}: {first['msg']}" if place else f"{path} cannot be read: {first['msg']}",
            "it was written by another version or changed by hand; remove it to measure it again",
        ) from None
