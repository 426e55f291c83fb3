"""imported.json: what other tools measured, in spectune's words. What they do not say is null, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from spectune.errors import UsageError
from spectune.sweeping.cell import Count, NonNegative, Positive, Rate, Record

IMPORT_FILE = "imported.json"
FormatName = Literal["vllm-bench", "aiperf", "specdec-bench", "llama.cpp", "csv"]

Length = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class Point(Record):
    """One measurement of another tool.

    `k` is 0 for plain decoding and null where nobody said. `kept` holds (accepted tokens, rounds) pairs where the
    tool kept counts by round. `joint[i-1]` is the share of rounds that accepted i tokens or more,
    `conditional[i-1]` that share of the rounds that accepted i - 1 or more and drafted i or more.
    `tokens_per_second` is of the whole server, prefill included. `missing` says why a value is null or empty.
    """

    file: str
    format: FormatName
    suite: str | None = None
    drafter: str | None = None
    k: Count | None = None
    batch: Annotated[int, Field(ge=1)] | None = None
    repeat: Count = 0
    rounds: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None
    kept: tuple[tuple[Count, Count], ...] = ()
    acceptance_length: Length | None = None  # pooled over rounds, the target's own token counted
    acceptance_rate: Rate | None = None  # accepted / drafted, at this K only
    mean_request_acceptance_length: Length | None = None  # another number: the mean of each request's own
    joint: tuple[Rate, ...] = ()
    conditional: tuple[Rate | None, ...] = ()
    output_tokens: Count | None = None
    tokens_per_second: Positive | None = None
    ttft_seconds: NonNegative | None = None
    tpot_seconds: Positive | None = None
    missing: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Imported(Record):
    """The whole file."""

    schema_version: Literal[1] = 1
    created_at: str
    spectune_version: str
    command: tuple[str, ...]
    points: Annotated[tuple[Point, ...], Field(min_length=1)]


def is_imported(path: Path) -> bool:
    return (path / IMPORT_FILE).is_file()


def load_imported(path: Path) -> Imported:
    """Read the file in the folder `path`. Raises UsageError where it is not as `spectune import` wrote it."""
    file = path / IMPORT_FILE
    try:
        return Imported.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{file} cannot be read: {place}: {first['msg']}", "import the results again") from None
