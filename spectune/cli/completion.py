"""What the shell offers for an argument: runs, suites, drafters and engines that begin like what was typed.

Where nothing does, the shell completes files. Nothing here reads a run or loads a model.
"""

from __future__ import annotations

from glob import escape, glob
from pathlib import Path

_RUN_FILES = ("run.json", "imported.json")
_SHIPPED = ("smollm2-1l", "smollm2-4l")


def runs(incomplete: str) -> list[str]:
    """Run directories here or one folder down."""
    start = escape(incomplete)
    found = [p for pattern in (f"{start}*", f"{start}*/*") for p in glob(pattern)]
    return sorted(p for p in found if any((Path(p) / name).is_file() for name in _RUN_FILES))


def suites(incomplete: str) -> list[str]:
    """Suites that come with spectune."""
    from spectune.suites.bundled import HUMAN_EVAL, bundled_names

    return [name for name in (*bundled_names(), HUMAN_EVAL) if name.startswith(incomplete)]


def drafters(incomplete: str) -> list[str]:
    """Kinds of drafters, with the colon where something must follow, and the drafts that ship."""
    from spectune.sweeping.drafter_names import KINDS

    names = (*(kind if kind == "ngram" else f"{kind}:" for kind in KINDS), *_SHIPPED)
    return [name for name in names if name.startswith(incomplete)]


def engines(incomplete: str) -> list[str]:
    """Engines that `recommend --for` writes settings for."""
    from spectune.recommending.exports.export import ENGINES

    return [name for name in ENGINES if name.startswith(incomplete)]
