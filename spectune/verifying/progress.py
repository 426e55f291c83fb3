"""Progress of an audit on stderr: a live bar on a terminal, one line per audit elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from spectune.sweeping.cell import CellSpec
from spectune.sweeping.progress import describe, duration

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress:
    """Counts tokens against the planned ones. Prints nothing; the base of those that do."""

    def __init__(self) -> None:
        self.planned = self.done = 0
        self.audits = self.finished_audits = 0
        self.began = time.perf_counter()

    def note(self, text: str) -> None:
        """Something that a reader of the result should know."""

    def begin(self, audits: int, planned_tokens: int) -> None:
        self.audits, self.planned, self.began = audits, planned_tokens, time.perf_counter()

    def start(self, spec: CellSpec) -> None:
        """An audit begins."""

    def tokens(self, count: int) -> None:
        """`count` more tokens were decoded."""
        self.done += count

    def finished(self, spec: CellSpec, text: str, planned_so_far: int) -> None:
        """An audit is over. What it needed less, or more, than planned no longer counts."""
        self.finished_audits += 1
        self.done = planned_so_far

    def end(self) -> None:
        """Everything is over, well or badly."""

    def seconds_left(self) -> float | None:
        """None as long as nothing was decoded."""
        if not self.done:
            return None
        return (time.perf_counter() - self.began) * max(0, self.planned - self.done) / self.done

    def line(self, spec: CellSpec, text: str) -> str:
        left = self.seconds_left()
        tail = f" (about {duration(left)} left)" if left else ""
        return f"[{self.finished_audits}/{self.audits}] {describe(spec)}: {text}{tail}"


class Lines(Progress):
    """One plain line per audit, for logs."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def finished(self, spec: CellSpec, text: str, planned_so_far: int) -> None:
        super().finished(spec, text, planned_so_far)
        self._print(self.line(spec, text))

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Bar(Lines):
    """The same lines above a live bar of the tokens."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._progress: RichProgress | None = None
        self._task: TaskID | None = None

    def begin(self, audits: int, planned_tokens: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        super().begin(audits, planned_tokens)
        self._progress = RichProgress(
            TaskProgressColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.description}", markup=False),
            console=Console(file=self._stream),
            transient=True,
        )
        self._task = self._progress.add_task("", total=planned_tokens, left="")
        self._progress.start()

    def start(self, spec: CellSpec) -> None:
        self._update(description=describe(spec))

    def tokens(self, count: int) -> None:
        super().tokens(count)
        left = self.seconds_left()
        self._update(completed=self.done, left=f"about {duration(left)} left" if left else "")

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _update(self, **values: object) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, **values)  # type: ignore[arg-type]

    def _print(self, text: str) -> None:
        if self._progress is None:
            super()._print(text)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def make_progress(*, quiet: bool = False, stream: TextIO | None = None) -> Progress:
    """The progress for a stream (default: stderr)."""
    stream = stream or sys.stderr
    if quiet:
        return Progress()
    return Bar(stream) if stream.isatty() else Lines(stream)
