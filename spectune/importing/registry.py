"""Which format a file has: by its keys, or as the user says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import get_args

from spectune.errors import UsageError
from spectune.importing import aiperf, llama_cpp, plain_csv, specdec_bench, vllm_bench
from spectune.importing.definitions import Answers
from spectune.importing.record import FormatName, Point
from spectune.importing.source import Table, read_tables

FORMATS: tuple[FormatName, ...] = get_args(FormatName)
_MODULES: dict[FormatName, ModuleType] = {
    "vllm-bench": vllm_bench,
    "aiperf": aiperf,
    "specdec-bench": specdec_bench,
    "llama.cpp": llama_cpp,
    "csv": plain_csv,
}


def import_points(paths: Sequence[Path], answers: Answers, *, format: FormatName | None = None) -> list[Point]:
    """The points of all files; folders are results of vLLM sweeps.

    Raises:
        UsageError: a file that cannot be read, is of no known format, or leaves a definition open.
    """
    found: list[Point] = []
    for path in (file for given in paths for file in _files(given)):
        tables = read_tables(path)
        name = format or _sniff(path, tables)
        if not _MODULES[name].is_format(tables) and name != "csv":
            raise UsageError(f"{path} does not look like {name}", f"formats are {', '.join(FORMATS)}")
        found.extend(_MODULES[name].points(tables, answers))
    return found


def _sniff(path: Path, tables: Sequence[Table]) -> FormatName:
    for name, module in _MODULES.items():
        if module.is_format(tables):
            return name
    if path.suffix.lower() == ".csv":
        return "csv"  # whose own error names the column
    keys = ", ".join(sorted(map(str, tables[0].values))[:8])
    raise UsageError(f"{path} is of no known format; its keys are {keys}", f"name it: --format {'|'.join(FORMATS)}")


def _files(path: Path) -> list[Path]:
    """A sweep's summaries hold its runs, so its single runs are read only where there is no summary."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("**/summary.json")) or sorted(path.glob("**/run=*.json"))
    files = [f for f in files if not f.name.endswith(".failure.json")]
    if not files:
        raise UsageError(f"{path} holds no summary.json and no run=N.json", "name the files themselves")
    return files
