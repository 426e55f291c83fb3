"""Loading a suite by its name or by the path of a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from spectune.errors import UsageError
from spectune.suites.bundled import HUMAN_EVAL, bundled_names, bundled_path, require_human_eval
from spectune.suites.files import Reading, read_prompts, stem
from spectune.suites.prompt import Suite
from spectune.suites.select import select


def load_suite(
    name_or_path: str | Path,
    *,
    column: str | None = None,
    categories: Sequence[str] = (),
    limit: int | None = None,
    sample_seed: int | None = None,
) -> Suite:
    """A bundled suite, `human-eval`, or the prompts of a file; a name wins over a file of that name.

    `column` names the field that holds the prompt, `categories` keep only some prompts, `limit` keeps the
    first ones or, with `sample_seed`, a random sample of that size.

    Raises UsageError for an unknown name, a file that cannot be read or understood (naming the line), an
    unknown category, a limit below 1, and when no prompt is left.
    """
    suite, _ = inspect_suite(name_or_path, column=column)
    chosen = select(suite.prompts, categories=categories, limit=limit, sample_seed=sample_seed)
    short = limit is not None and len(chosen) < limit
    notes = (*suite.notes, f"{limit} prompts were asked for, there are {len(chosen)}") if short else suite.notes
    return Suite(suite.name, suite.source, chosen, notes)


def inspect_suite(name_or_path: str | Path, *, column: str | None = None) -> tuple[Suite, Reading]:
    """The whole suite, and how its file was understood. Raises UsageError like `load_suite`."""
    place = _find(str(name_or_path))
    reading = read_prompts(place.path, column=column, label=place.label)
    if not reading.prompts:
        raise UsageError(f"{place.label}: no usable prompt", "; ".join(reading.notes) or "the file has no rows")
    return Suite(place.name, place.source, reading.prompts, reading.notes), reading


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    source: str
    path: Path
    label: str


def _find(name: str) -> _Place:
    known = (*bundled_names(), HUMAN_EVAL)
    if name == HUMAN_EVAL:
        path = require_human_eval()
        return _Place(name, "package human-eval", path, path.name)
    if name in known:
        path = bundled_path(name)
        return _Place(name, "bundled", path, path.name)
    path = Path(name)
    if os.path.exists(name) or path.suffix or os.sep in name:
        return _Place(stem(path), name, path, name)
    close = get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise UsageError(f"no suite {name!r}", f"{meant}the suites are {', '.join(known)}; or give the path of a file")
