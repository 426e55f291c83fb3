"""Who is told how a sweep goes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from spectune.sweeping.cell import CellResult, CellSpec, FailedCell


class Listener(Protocol):
    """Called in this order: notes and card, begin, for each cell start, tokens, finished or failed, then end.

    `seconds_left` is None as long as nothing has been measured.
    """

    def note(self, text: str) -> None: ...

    def card(self, text: str) -> None:
        """What theory expects of this target, before anything is measured."""

    def begin(self, directory: Path, cells: int, done: int) -> None: ...

    def start(self, spec: CellSpec) -> None: ...

    def tokens(self, count: int) -> None:
        """`count` more tokens were emitted by the running pass."""

    def finished(self, result: CellResult, seconds_left: float | None) -> None: ...

    def failed(self, cell: FailedCell, seconds_left: float | None) -> None: ...

    def end(self) -> None: ...


class Silent:
    """A listener that does nothing."""

    def note(self, text: str) -> None:
        pass

    def card(self, text: str) -> None:
        pass

    def begin(self, directory: Path, cells: int, done: int) -> None:
        pass

    def start(self, spec: CellSpec) -> None:
        pass

    def tokens(self, count: int) -> None:
        pass

    def finished(self, result: CellResult, seconds_left: float | None) -> None:
        pass

    def failed(self, cell: FailedCell, seconds_left: float | None) -> None:
        pass

    def end(self) -> None:
        pass
