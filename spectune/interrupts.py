"""Ctrl-C and SIGTERM that no library can lose."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Whether the user has asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def check(self) -> None:
        """Raises KeyboardInterrupt if one was asked for."""
        if self.asked:
            raise KeyboardInterrupt

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Both signals raise KeyboardInterrupt wherever the main thread is, and the block ends with one for certain.

    An extension that calls Python code may turn KeyboardInterrupt into an error of its own (pydantic does), and a
    destructor drops it; code that survives errors asks `check`. A block inside another shares what was asked of that
    one. Only the main thread may say what a signal does: elsewhere nothing changes.
    """
    outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    asked = outer if isinstance(outer, Interrupts) else Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    # A job in the background of a shell ignores Ctrl-C, and goes on doing so; a handler outside Python is None.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    former = {number: signal.signal(number, asked.on_signal) for number in numbers}
    try:
        yield asked
    except Exception as error:
        if asked.asked:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    asked.check()
