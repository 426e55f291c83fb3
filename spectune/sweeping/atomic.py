"""Writing a file so that a reader, a kill or a full disk never meets half of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from spectune.errors import SpectuneError

TEMPORARY = ".tmp"


def write_atomically(path: Path, text: str) -> None:
    """Write to a temporary name beside `path`, sync, rename, sync the folder.

    The caller holds the lock that belongs to `path`: then a temporary file of that name has no living writer.
    Raises SpectuneError where the disk is full or the folder cannot be written; `path` is then as it was.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> SpectuneError:
    """The one-line error for a write that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpectuneError(
            f"the disk is full: {path.name} was not written",
            "everything finished before is kept; free some space",
        )
    return SpectuneError(f"{path}: {error.strerror or error}", "everything finished before is kept")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; the file itself is synced.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
