"""Writing results so that a reader never meets half a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from spectune.errors import SpectuneError


def write(path: Path, content: str | bytes) -> None:
    """Write beside `path`, sync and rename. Where that fails: SpectuneError, and `path` is as it was."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SpectuneError(f"cannot write {path}: {error.strerror or error}", "name another file with -o") from error


def write_beside_run(path: Path, content: str) -> None:
    """Keep a derived file in the run directory; only warn where it cannot be written (a read-only run)."""
    try:
        write(path, content)
    except SpectuneError as error:
        print(f"spectune: warning: {error.message}", file=sys.stderr)
