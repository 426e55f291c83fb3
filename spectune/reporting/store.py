"""Writing results so that a reader never meets half a file."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from spectune.errors import SpectuneError, UsageError
from spectune.sweeping.rundir import CELLS, RUN_FILE


def write(path: Path, content: str | bytes) -> None:
    """Write beside `path`, sync and rename. Where that fails: SpectuneError, and `path` is as it was.

    A link stays and the file it names is written; a device or pipe, as /dev/null, is written to and never replaced.
    What a sweep has measured is never written over: UsageError.
    """
    # A path that is no UTF-8 may be in the text.
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    asked, path = path, Path(os.path.realpath(path))
    in_cells = path.parent.name == CELLS and (path.parent.parent / RUN_FILE).is_file()
    if path.is_file() and (path.name == RUN_FILE or in_cells):
        raise UsageError(f"{asked} is part of a run", "name another file")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SpectuneError(f"cannot write {asked}: {error.strerror or error}", "name another file") from error


def write_beside_run(path: Path, content: str) -> None:
    """Keep a derived file in the run directory; only warn where it cannot be written (a read-only run)."""
    try:
        write(path, content)
    except SpectuneError as error:
        print(f"spectune: warning: {error.message}", file=sys.stderr)
