"""The audit's record: one file per (target, drafter, rule, settings), in the `verify` folder of a run.

Reading it needs no torch. Words: a *parting* is a place where two outputs of one request differ; a *numeric tie* is a
parting that rounding explains.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from spectune.errors import UsageError
from spectune.sweeping.atomic import write_atomically
from spectune.sweeping.cell import CellSpec, Count, Finite, NonNegative, Record
from spectune.sweeping.rundir import RunDirectory

FOLDER = "verify"
SCHEMA_VERSION = 1

Verdict = Literal["identical", "numeric ties", "consistent", "lossy", "cannot judge", "FAIL"]
SetName = Literal["likely", "favoured", "impossible"]
Chance = Annotated[float, Field(ge=0, le=1)]


class Parting(Record):
    """Where an output leaves the expected one, and whether rounding explains it.

    `expected` or `found` is None where that output has ended. `margin` is the distance between the target's two best
    logits there, `gap` how far the less likely of the two tokens lies below the best logit (for a sampled choice: how
    far the coin lies outside its interval), `noise` what rounding moves there.
    """

    id: str
    position: Count
    expected: int | None
    found: int | None
    margin: NonNegative | None
    gap: NonNegative
    noise: NonNegative
    is_tie: bool


class IdentityCheck(Record):
    """Speculative tokens against those of plain decoding: greedy, or sampled with the same seeds."""

    kind: Literal["greedy", "seeded"]
    requests: Count
    identical: Count
    tokens: Count  # compared
    drafted: Count
    accepted: Count
    partings: tuple[Parting, ...] = ()

    @property
    def failures(self) -> tuple[Parting, ...]:
        return tuple(p for p in self.partings if not p.is_tie)


class SetTest(Record):
    """How often the tokens of a set occurred, where the target's own probabilities say how often they should.

    likely: the tokens that a lower temperature would favour; favoured: those that the draft prefers to the target;
    impossible: those that top-k, top-p or min-p rule out.
    """

    name: SetName
    tokens: Count  # draws that had such a set
    seen: Count
    expected: NonNegative
    p_value: Chance
    detectable: NonNegative  # excess per token of the whole sample that would have been found


class DistributionCheck(Record):
    """Emitted tokens against the target's exact probabilities."""

    tokens: Count
    continuations: Count
    prompts: Count
    drafted: Count
    accepted: Count
    rounding: NonNegative  # mean total-variation distance between two exact ways to compute the target
    tolerance: NonNegative  # the bias that is allowed for it
    alpha: Chance  # of each single test
    distance: NonNegative  # Kolmogorov's
    uniformity_p: Chance
    independence_p: Chance | None
    sets: tuple[SetTest, ...]

    @property
    def rejected(self) -> tuple[str, ...]:
        """The tests that found a bias."""
        found = [name for name, p in self.chances.items() if p < self.alpha]
        return tuple(found)

    @property
    def chances(self) -> dict[str, float]:
        """p-value of every test that was made."""
        pairs = {} if self.independence_p is None else {"independence": self.independence_p}
        return {"uniformity": self.uniformity_p, **pairs, **{f"{s.name} tokens": s.p_value for s in self.sets}}

    @property
    def detectable(self) -> float | None:
        """The total-variation bias per token that would have been found with 90 % probability."""
        found = [s.detectable for s in self.sets if s.name != "impossible"]
        return max(found) if found else None

    @property
    def measured(self) -> float:
        """A lower estimate of the bias per token: the largest excess of a set, or Kolmogorov's distance."""
        excess = [abs(s.seen - s.expected) / self.tokens for s in self.sets if self.tokens]
        return max(self.distance, *excess) if excess else self.distance


class AuditSpec(Record):
    """What is audited. `key` is its hash."""

    cell: CellSpec
    samples: Count  # tokens wanted for the distribution test; 0 for greedy decoding

    @property
    def key(self) -> str:
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:20]


class Audit(Record):
    """A finished audit file."""

    schema_version: Literal[1] = 1
    key: str
    spec: AuditSpec
    audited_at: str  # ISO 8601, UTC
    spectune_version: str
    seconds: NonNegative
    verdict: Verdict
    reason: str  # one sentence
    detectable: Finite | None  # total-variation bias per token found with 90 % probability; None without that test
    identity: IdentityCheck
    distribution: DistributionCheck | None

    @model_validator(mode="after")
    def _key_of_spec(self) -> Audit:
        if self.key != self.spec.key:
            raise ValueError("key does not match the spec")
        return self

    @property
    def cell(self) -> CellSpec:
        return self.spec.cell


def write_audit(directory: RunDirectory, audit: Audit) -> Path:
    """Keep an audit in a run directory, in place of an older one of the same spec."""
    path = directory.path / FOLDER / f"{audit.key}.json"
    with directory.locked():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, audit.model_dump_json(indent=1) + "\n")
    return path


def read_audit(directory: RunDirectory, key: str) -> Audit | None:
    """One audit of a run directory; None if it has none of that key.

    Raises:
        UsageError: as `read_audits`.
    """
    path = directory.path / FOLDER / f"{key}.json"
    return _read(path) if path.exists() else None


def read_audits(run: Path) -> tuple[Audit, ...]:
    """All audits of a run directory, oldest first.

    Raises:
        UsageError: a file that is truncated, invalid, renamed, or newer than this version of spectune.
    """
    audits = [_read(path) for path in sorted((run / FOLDER).glob("*.json"))]
    return tuple(sorted(audits, key=lambda audit: audit.audited_at))


def _read(path: Path) -> Audit:
    try:
        audit = Audit.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        errors = error.errors(include_url=False)
        version = next((e["input"] for e in errors if e["loc"] == ("schema_version",)), None)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise UsageError(
                f"{path} has schema version {version}, this spectune reads up to {SCHEMA_VERSION}",
                "use the spectune that wrote it, or a newer one",
            ) from None
        place = ".".join(map(str, errors[0]["loc"]))
        raise UsageError(
            f"{path} cannot be read: {place + ': ' if place else ''}{errors[0]['msg']}",
            "it was cut short or changed by hand; remove it and verify again",
        ) from None
    if path.name != f"{audit.key}.json":
        raise UsageError(f"{path} holds the audit {audit.key}", "a file was renamed or copied; remove it")
    return audit
