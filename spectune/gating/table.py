"""What every output shows: a headline, and a row per cell with the change of acceptance beside that of speed."""

from __future__ import annotations

from dataclasses import dataclass

from spectune.gating.check import Check, Outcome, Verdict
from spectune.gating.metric import Level
from spectune.gating.selector import Place

_ORDER: tuple[Verdict, ...] = ("REGRESSION", "RUN FAILED", "CANNOT JUDGE", "PASS")


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: the worst verdict of its checks, of those that only warn if there are no others.

    `length` is its acceptance length, for where nothing was asked of that.
    """

    place: Place
    verdict: Verdict
    acceptance: Check | None
    speedup: Check | None
    length: float | None = None


def rows(outcome: Outcome) -> list[Row]:
    """In the order of the checks."""
    found: dict[Place, list[Check]] = {}
    for check in outcome.checks:
        if check.place is not None:
            found.setdefault(check.place, []).append(check)
    return [
        Row(
            place,
            _worst([c for c in own if c.level == "error"] or own),
            _first(own, "acceptance_length"),
            _first(own, "speedup"),
            outcome.lengths.get(place),
        )
        for place, own in found.items()
    ]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Checks that did not pass for the same reason, as one line."""

    verdict: Verdict
    level: Level
    text: str


def troubles(outcome: Outcome) -> list[Trouble]:
    """Errors first, the worst verdict first."""
    groups: dict[tuple[Level, Verdict, str], list[Check]] = {}
    for check in outcome.troubles:
        groups.setdefault((check.level, check.verdict, check.message), []).append(check)
    return [Trouble(own[0].verdict, own[0].level, _text(own)) for own in groups.values()]


def _text(own: list[Check]) -> str:
    first = f"{own[0].where}: {own[0].what}"
    return f"{first}: {own[0].message}" if len(own) == 1 else f"{len(own)} checks ({first}; …): {own[0].message}"


def _worst(checks: list[Check]) -> Verdict:
    return next(v for v in _ORDER if any(c.verdict == v for c in checks))


def _first(checks: list[Check], name: str) -> Check | None:
    """The comparison, or else a requirement on the same metric."""
    named = [c for c in checks if c.what == name or (c.required and c.what.startswith(name))]
    return next((c for c in named if not c.required), next(iter(named), None))


def numbers(check: Check | None, otherwise: float | None = None) -> str:
    """`2.31 -> 2.28 (-1.3 %)`, as far as it is known; without a check the number alone."""
    if check is None or check.now is None:
        return "n/a" if otherwise is None else f"{otherwise:.2f}"
    if check.before is None:
        return f"{check.now:.2f}"
    change = f" ({100 * check.change:+.1f} %)" if check.change else ""
    return f"{check.before:.2f} -> {check.now:.2f}{change}"


def short_numbers(check: Check | None, otherwise: float | None = None) -> str:
    """`2.28 (-1.3 %)`, where room is scarce."""
    if check is None or check.now is None:
        return "n/a" if otherwise is None else f"{otherwise:.2f}"
    return f"{check.now:.2f}" + (f" ({100 * check.change:+.1f} %)" if check.change else "")


def headline(outcome: Outcome) -> str:
    """The verdict with its counts."""
    counts = [f"{n} {v}" for v in _ORDER if (n := outcome.count(v))]
    warnings = sum(c.level == "warn" and c.verdict != "PASS" for c in outcome.checks)
    if warnings:
        counts.append(f"{warnings} warning{'s' * (warnings > 1)}")
    against = f" against the baseline of {outcome.baseline}" if outcome.baseline else ""
    return f"{outcome.verdict}: {outcome.run}{against}; {', '.join(counts) or 'no check'}"
