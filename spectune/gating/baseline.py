"""The baseline file: what a gate needs of a run, small enough to be committed.

Exact figures come from the first repeat, since at fixed seeds every repeat gives them again; whether they did is kept
as `repeatable`. Times are kept for every request and repeat, so that a later run can be judged with the scatter of
both. One line per cell, so that a change of the file can be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from spectune.errors import UsageError
from spectune.gating.selector import Place, place_of
from spectune.sweeping.cell import CellSpec, Count, NonNegative, PositiveCount, Record, RoundCount

BASELINE_VERSION = 1


class RequestCounts(Record):
    """One request of the first speculative pass. `counts` holds (drafted, accepted, rounds) triples."""

    id: str
    prompt: str
    output_digest: str
    output_tokens: PositiveCount
    counts: tuple[tuple[Count, Count, PositiveCount], ...]

    @model_validator(mode="after")
    def _prefix_of_draft(self) -> RequestCounts:
        if any(accepted > drafted for drafted, accepted, _ in self.counts):
            raise ValueError("a round accepted more than was drafted")
        return self

    @property
    def rounds(self) -> tuple[RoundCount, ...]:
        return tuple(RoundCount(drafted=d, accepted=a, count=n) for d, a, n in self.counts)


class PassTimes(Record):
    """One pass, in the order of the cell's requests. `tokens` in `seconds` are those that count for the speed."""

    tokens: tuple[Count, ...]
    seconds: tuple[NonNegative, ...]
    ttft_seconds: tuple[NonNegative, ...]
    tpot_seconds: tuple[NonNegative | None, ...]


class Times(Record):
    """The passes of each repeat, plain and speculative ones paired."""

    plain: tuple[PassTimes, ...]
    speculative: tuple[PassTimes, ...]

    @model_validator(mode="after")
    def _paired(self) -> Times:
        if len(self.plain) != len(self.speculative):
            raise ValueError("plain and speculative passes are not paired")
        return self


class Cell(Record):
    """`no_speed` says why the times mean nothing. `times` is None in a baseline of exact figures."""

    spec: CellSpec
    output_check: Literal["identical", "numeric ties", "different"] | None
    repeatable: bool
    no_speed: str | None
    target_forwards: Count
    requests: Annotated[tuple[RequestCounts, ...], Field(min_length=1)]
    times: Times | None

    @model_validator(mode="after")
    def _times_of_every_request(self) -> Cell:
        passes = () if self.times is None else (*self.times.plain, *self.times.speculative)
        fields = [f for p in passes for f in (p.tokens, p.seconds, p.ttft_seconds, p.tpot_seconds)]
        if any(len(field) != len(self.requests) for field in fields):
            raise ValueError("a pass has not one time for each request")
        return self

    @property
    def place(self) -> Place:
        return place_of(self.spec)


class Failure(Record):
    spec: CellSpec
    reason: str
    message: str


class Baseline(Record):
    """`hardware` must be equal where times are compared, `software` is only named where it differs.

    `unfinished` are planned cells without a result; a file to commit has neither these nor failures.
    """

    schema_version: Literal[1] = 1
    kind: Literal["spectune-baseline"] = "spectune-baseline"
    run: str
    created_at: str
    spectune_version: str
    hardware: dict[str, object]
    software: dict[str, object]
    cells: tuple[Cell, ...]
    failures: tuple[Failure, ...] = ()
    unfinished: tuple[CellSpec, ...] = ()

    @model_validator(mode="after")
    def _one_cell_per_place(self) -> Baseline:
        if len({c.place for c in self.cells}) < len(self.cells):
            raise ValueError("two cells are the same")
        return self


def read_baseline(path: Path) -> Baseline:
    """Raises UsageError where there is no such file, or where it cannot be understood."""
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise UsageError(
            f"{path} is a directory, not a baseline file", f"write one: spectune baseline {path} -o baseline.json"
        ) from None
    except FileNotFoundError:
        raise UsageError(
            f"there is no baseline {path}", f"write one from a run that is right: spectune baseline RUN -o {path}"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    try:
        baseline = Baseline.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise _unreadable(path, error) from None
    if not baseline.cells:
        raise UsageError(f"the baseline {path} holds no cell", f"spectune baseline RUN -o {path}")
    return baseline


def _unreadable(path: Path, error: ValidationError) -> UsageError:
    first = error.errors(include_url=False)[0]
    version = next((e["input"] for e in error.errors() if e["loc"] == ("schema_version",)), None)
    if isinstance(version, int) and version > BASELINE_VERSION:
        return UsageError(
            f"{path} has schema version {version}, this spectune reads up to {BASELINE_VERSION}", "use a newer spectune"
        )
    place = ".".join(map(str, first["loc"]))
    return UsageError(
        f"{path} is not a baseline: {place + ': ' if place else ''}{first['msg']}",
        f"it was cut short or changed by hand; write it again: spectune baseline RUN -o {path}",
    )


def baseline_text(baseline: Baseline) -> str:
    """The content of the file: strict JSON, one cell per line."""
    document = baseline.model_dump(mode="json")
    cells = [_compact(cell) for cell in document.pop("cells")]
    for name in ("failures", "unfinished"):
        del document[name]
    head = [f" {json.dumps(key)}: {_compact(value)}" for key, value in document.items()]
    body = ",\n".join(f"  {cell}" for cell in cells)
    return "{\n" + ",\n".join([*head, f' "cells": [\n{body}\n ]']) + "\n}\n"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
