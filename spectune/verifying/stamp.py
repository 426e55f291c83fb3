"""What a run knows about the losslessness of its configurations. Pure; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spectune.sweeping.cell import CellSpec
from spectune.verifying.command import verify_command
from spectune.verifying.record import Audit, Verdict

_WORST_FIRST: tuple[Verdict, ...] = ("FAIL", "lossy", "cannot judge", "numeric ties", "consistent", "identical")


@dataclass(frozen=True, slots=True)
class Stamp:
    """One drafter and rule of a run: the audits of exactly its weights and settings, or the command that makes one.

    `ks` and `batches` were audited; `command` covers those of the run that were not, and is None where none is left.
    """

    drafter: str
    rule: str
    verdict: Verdict | None  # the worst of the audits; None: not audited
    audits: tuple[Audit, ...]
    ks: tuple[int, ...]
    batches: tuple[int, ...]
    date: str | None  # of the newest audit
    detectable: float | None  # the largest bias per token that one of the audits might have missed
    command: str | None

    @property
    def line(self) -> str:
        """The stamp in one sentence."""
        if self.verdict == "lossy" and not self.audits:
            return "acceptance is synthetic, so the output is not the target's: there is nothing to audit"
        if self.verdict is None:
            return f"not audited; run: {self.command}"
        suites = ", ".join(dict.fromkeys(a.cell.suite for a in self.audits))
        at = f"{suites}: K {_numbers(self.ks)} at batch {_numbers(self.batches)}"
        power = f"; finds a bias of {self.detectable:.3f} per token" if self.detectable is not None else ""
        rest = f"; the rest: {self.command}" if self.command else ""
        return f"audited {self.verdict} on {self.date[:10] if self.date else None} ({at}{power}){rest}"


def stamps(plan: Sequence[CellSpec], audits: Sequence[Audit], output: Path) -> tuple[Stamp, ...]:
    """A stamp for each drafter and rule of the plan, in its order."""
    by_name: dict[tuple[str, str], list[CellSpec]] = {}
    for spec in plan:
        by_name.setdefault((spec.drafter, spec.rule), []).append(spec)
    return tuple(stamp(specs, audits, output) for specs in by_name.values())


def stamp(specs: Sequence[CellSpec], audits: Sequence[Audit], output: Path) -> Stamp:
    """The stamp of cells that share drafter, rule and settings and differ in suite, K and batch."""
    first = specs[0]
    if first.synthetic is not None:
        return Stamp(first.drafter, first.rule, "lossy", (), (), (), None, None, None)
    wanted = {(spec.k, spec.batch) for spec in specs}
    found = tuple(a for a in audits if _settings(a.cell) == _settings(first) and (a.cell.k, a.cell.batch) in wanted)
    missing = sorted(wanted - {(a.cell.k, a.cell.batch) for a in found})
    verdict = next((v for v in _WORST_FIRST if any(a.verdict == v for a in found)), None)
    powers = [a.detectable for a in found if a.detectable is not None]
    return Stamp(
        drafter=first.drafter,
        rule=first.rule,
        verdict=verdict,
        audits=found,
        ks=tuple(sorted({a.cell.k for a in found})),
        batches=tuple(sorted({a.cell.batch for a in found})),
        date=max((a.audited_at for a in found), default=None),
        detectable=max(powers, default=None),
        command=verify_command(first, ks=[k for k, _ in missing], batches=[b for _, b in missing], output=output)
        if missing
        else None,
    )


def _settings(spec: CellSpec) -> tuple[object, ...]:
    """What an audit and a cell must share for the one to speak of the other."""
    return (
        spec.target_digest,
        spec.drafter,
        spec.drafter_digest,
        spec.rule,
        spec.sampling,
        spec.dtype,
        spec.device,
        spec.draft_device,
    )


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
