"""Progress of a training on stderr: a bar on a terminal, a line every now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

from spectune.sweeping.progress import duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_SECONDS = 15.0


class Listener(Protocol):
    """Told how a training goes: notes at any time, and phases that advance from 0 to 1."""

    def note(self, text: str) -> None: ...

    def advance(self, phase: str, done: float, detail: str, seconds_left: float | None) -> None: ...

    def end(self) -> None: ...


def make_listener(*, quiet: bool, stream: TextIO | None = None) -> Listener:
    """The listener for a stream (default: stderr)."""
    stream = stream or sys.stderr
    if quiet:
        return Silent()
    return Bar(stream) if stream.isatty() else Lines(stream)


class Silent:
    def note(self, text: str) -> None:
        pass

    def advance(self, phase: str, done: float, detail: str, seconds_left: float | None) -> None:
        pass

    def end(self) -> None:
        pass


class Lines:
    """Plain lines for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._printed = 0.0

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def advance(self, phase: str, done: float, detail: str, seconds_left: float | None) -> None:
        now = time.monotonic()
        if phase != self._phase or done >= 1 or now - self._printed > _LINE_SECONDS:
            self._phase, self._printed = phase, now
            self.note(f"{phase}: {100 * done:.0f} %, {detail}{_left(seconds_left)}")

    def end(self) -> None:
        pass


class Bar:
    """A live bar per phase."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            console=Console(file=stream),
        )
        self._tasks: dict[str, TaskID] = {}
        self._progress.start()

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, phase: str, done: float, detail: str, seconds_left: float | None) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=1.0, detail="")
        self._progress.update(self._tasks[phase], completed=done, detail=detail + _left(seconds_left))

    def end(self) -> None:
        self._progress.stop()


def _left(seconds: float | None) -> str:
    return f" (about {duration(seconds)} left)" if seconds is not None and seconds >= 1 else ""
