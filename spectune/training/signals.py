"""Ctrl-C and SIGTERM while something is trained."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Both signals interrupt at once; while deferred, they only set `asked`, and a second one interrupts."""

    def __init__(self) -> None:
        self.asked = False
        self._defers = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Only the main thread may say what a signal does; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """For work that asks `asked` between its steps, and must not be cut in the middle of one."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._defers or self.asked:
            raise KeyboardInterrupt
        self.asked = True
