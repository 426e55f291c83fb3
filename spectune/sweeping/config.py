"""Settings from the command line and a TOML file: command line over file over default.

Keys of the file's [sweep] table are the long options, with - or _.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from spectune.errors import UsageError
from spectune.sweeping.counts import parse_counts
from spectune.sweeping.drafter_names import KINDS
from spectune.sweeping.options import SweepOptions, option_names
from spectune.sweeping.toml_table import read_table


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that `spectune sweep` can be told."""

    options: SweepOptions
    grown_pair: str | None = None
    output: str | None = None
    resume: bool = False
    allow_env_mismatch: bool = False
    dry_run: bool = False
    quiet: bool = False
    json: bool = False


def settings(command_line: Mapping[str, Any], config: Path | None) -> Settings:
    """Merge the options given on the command line (None or empty: not given) with those of a config file.

    Raises UsageError for an unreadable file, an unknown key, and a value of the wrong type.
    """
    kinds = _kinds()
    merged: dict[str, Any] = {}
    for key, value in (read_config(config) if config else {}).items():
        merged[key] = _convert(value, kinds[key], f"{config}: {key}")
    for key, value in command_line.items():
        if value not in (None, [], ()):
            merged[key] = _convert(value, kinds[key], "--" + key.replace("_", "-"))
    names = option_names()
    if "grown_pair" in merged:
        merged["target"] = _grown_target(merged)
    options = SweepOptions(**{name: merged[key] for name, key in names.items() if key in merged})
    rest = {key: value for key, value in merged.items() if key not in names.values()}
    return Settings(options, **rest)


def _grown_target(merged: Mapping[str, Any]) -> str:
    """The target that `grown_pair` asks for: the first draft with further layers."""
    if "target" in merged:
        raise UsageError("--grown-pair makes the target", "leave --target out")
    if not merged.get("draft"):
        raise UsageError("--grown-pair grows the target from the first --draft", "name a draft model with --draft")
    first = merged["draft"][0]
    if first.partition(":")[0] in KINDS:
        raise UsageError(f"--grown-pair cannot grow {first!r}: it is no model", "name a draft model first")
    return f"grown:{first}:{merged['grown_pair']}"


def read_config(path: Path) -> dict[str, Any]:
    """The [sweep] table, keys with _. Tables of other commands are left alone."""
    table = read_table(path, "sweep", "put the options under a line [sweep]")
    kinds = _kinds()
    chosen: dict[str, Any] = {}
    for spelling, value in table.items():
        key = spelling.replace("-", "_")
        if key not in kinds:
            close = get_close_matches(key, kinds, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"{path}: no option {spelling!r}", f"{meant}known are {', '.join(sorted(kinds))}")
        if key in chosen:
            raise UsageError(f"{path}: {key} stands there twice, with - and with _")
        chosen[key] = value
    return chosen


def _kinds() -> dict[str, Any]:
    hints = get_type_hints(SweepOptions)
    kinds = {key: hints[name] for name, key in option_names().items()}
    rest = get_type_hints(Settings)
    return kinds | {f.name: rest[f.name] for f in fields(Settings) if f.name != "options"}


def _convert(value: Any, kind: Any, where: str) -> Any:
    if kind == tuple[int, ...]:
        if not isinstance(value, str | int | list):
            raise UsageError(f'{where} must be counts such as "1,2,4" or "1-8", not {value!r}')
        return parse_counts(value, where, least=0)  # SweepOptions knows which counts may be 0
    if kind == tuple[str, ...]:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{where} must be a text or a list of texts, not {value!r}")
        return tuple(names)
    plain = next((t for t in get_args(kind) if t is not type(None)), kind)
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not plain:
        raise UsageError(f"{where} must be {_WORDS[plain]}, not {value!r}")
    return value


_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
