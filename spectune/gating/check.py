"""Checks and the outcome: what was compared, the verdict on it, and the exit code of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spectune.gating.metric import Kind, Level
from spectune.gating.selector import Place, label

Verdict = Literal["PASS", "REGRESSION", "CANNOT JUDGE", "RUN FAILED"]
# The worst first: one regression outweighs cells that failed, these outweigh what could not be judged.
_EXIT_CODES: dict[Verdict, int] = {"REGRESSION": 1, "RUN FAILED": 4, "CANNOT JUDGE": 3, "PASS": 0}


@dataclass(frozen=True, slots=True)
class Check:
    """One judged number. `change` is relative to `before` (for shares a difference) and has the sign of the number;
    `low` and `high` are its 95 % interval, for a requirement that of `now`. `detectable` is the smallest loss that
    would have been seen. `message` is one line and says what to do where the verdict is not PASS.
    """

    what: str  # the metric, or the whole requirement
    kind: Kind
    place: Place | None  # None: about the run as a whole
    verdict: Verdict
    message: str
    level: Level = "error"
    before: float | None = None
    now: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    limit: float | None = None
    required: bool = False

    @property
    def where(self) -> str:
        return "run" if self.place is None else label(self.place)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All checks of a gate. `notes` and the cells' acceptance `lengths` are facts that decide nothing."""

    run: str
    baseline: str | None
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    lengths: Mapping[Place, float] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks of level error; CANNOT JUDGE where there is none."""
        found = {c.verdict for c in self.checks if c.level == "error"}
        return next((v for v in _EXIT_CODES if v in found), "CANNOT JUDGE")

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self.verdict]

    def count(self, verdict: Verdict, level: Level = "error") -> int:
        return sum(c.verdict == verdict and c.level == level for c in self.checks)

    @property
    def troubles(self) -> tuple[Check, ...]:
        """What did not pass, errors first, the worst verdict first."""
        order = list(_EXIT_CODES)
        found = [c for c in self.checks if c.verdict != "PASS"]
        return tuple(sorted(found, key=lambda c: (c.level != "error", order.index(c.verdict))))
