"""Progress on stderr: a bar on a terminal, one line per cell elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from spectune.sweeping.cell import CellResult, CellSpec, FailedCell
from spectune.sweeping.figures import figures
from spectune.sweeping.listener import Listener, Silent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def make_listener(*, quiet: bool, stream: TextIO | None = None) -> Listener:
    """The listener for a stream (default: stderr)."""
    stream = stream or sys.stderr
    if quiet:
        return Silent()
    return Bar(stream) if stream.isatty() else Lines(stream)


class Lines:
    """One plain line per event, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._cells = 0
        self._done = 0

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def card(self, text: str) -> None:
        self._print(text)

    def begin(self, directory: Path, cells: int, done: int) -> None:
        self._cells, self._done = cells, done
        self._print(f"{directory}: {cells} cells, {done} of them done")

    def start(self, spec: CellSpec) -> None:
        pass

    def tokens(self, count: int) -> None:
        pass

    def finished(self, result: CellResult, seconds_left: float | None) -> None:
        self._count(f"{describe(result.spec)}: {headline(result)}", seconds_left)
        for warning in result.warnings:
            self._print(f"  {warning}")

    def failed(self, cell: FailedCell, seconds_left: float | None) -> None:
        self._count(f"{describe(cell.spec)}: failed ({cell.reason}): {cell.message}", seconds_left)

    def end(self) -> None:
        pass

    def _count(self, text: str, seconds_left: float | None) -> None:
        self._done += 1
        self._print(f"[{self._done}/{self._cells}] {text}{_left(seconds_left)}")

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Bar(Lines):
    """A live bar with the current cell and the pace of its tokens, below the same lines."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._tokens = 0

    def begin(self, directory: Path, cells: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        super().begin(directory, cells, done)
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[count]} tokens", markup=False),
            console=Console(file=self._stream),
            transient=True,
        )
        self._task = self._progress.add_task("", total=cells, completed=done, left="", count=0)
        self._progress.start()

    def start(self, spec: CellSpec) -> None:
        self._tokens = 0
        self._update(description=describe(spec), count=0)

    def tokens(self, count: int) -> None:
        self._tokens += count
        self._update(count=self._tokens)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _count(self, text: str, seconds_left: float | None) -> None:
        super()._count(text, None)
        self._update(completed=self._done, left=_left(seconds_left))

    def _update(self, **values: object) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, **values)  # type: ignore[arg-type]

    def _print(self, text: str) -> None:
        if self._progress is None:
            super()._print(text)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe(spec: CellSpec) -> str:
    """A cell's place in the grid, in words."""
    return f"{spec.suite}, batch {spec.batch}, {spec.drafter}, K {spec.k}"


def headline(result: CellResult) -> str:
    """A cell's outcome in a few words."""
    found = figures(result)
    if found.speedup is None:
        return "no speedup (no round with every slot busy)"
    return (
        f"{found.speedup:.2f}x, {found.speculative_tokens_per_second:.1f} tokens/s, "
        f"{'' if result.spec.synthetic is None else 'synthetic '}acceptance length {found.acceptance_length:.2f}"
    )


def duration(seconds: float) -> str:
    """About how long, for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _left(seconds: float | None) -> str:
    return f" (about {duration(seconds)} left)" if seconds else ""
