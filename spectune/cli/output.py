"""stdout as a command needs it: no reader and no encoding may change the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import IO, Any, cast


class _Output:
    """A stream whose reader may leave (`spectune gate … | head`): what it does not read is thrown away."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def safe_stdout() -> Iterator[None]:
    """Print what the encoding of stdout lacks as `?`, and go on where its reader has gone."""
    if sys.stdout is None:  # closed by the caller: nothing is printed
        yield
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    output = _Output(sys.stdout)
    with redirect_stdout(cast("IO[str]", output)):
        try:
            yield
        finally:
            output.flush()
