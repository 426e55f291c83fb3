"""The outcome as GitHub's workflow commands, ::error and ::warning. GitHub shows ten of a kind in a step."""

from __future__ import annotations

from spectune.gating.check import Check, Outcome
from spectune.reporting.format import visible

MOST = 10


def annotation_lines(outcome: Outcome) -> list[str]:
    """At most ten errors and ten warnings; the last one tells how many there are where they are more."""
    found = []
    for kind in ("error", "warning"):
        own = [c for c in outcome.troubles if (c.level == "error") == (kind == "error")]
        shown = own if len(own) <= MOST else own[: MOST - 1]
        found += [_command(kind, _title(c), f"{c.where}: {c.message}") for c in shown]
        if len(own) > len(shown):
            found.append(_command(kind, "spectune gate", f"{len(own) - len(shown)} more; see the log"))
    return found


def _title(check: Check) -> str:
    return f"{check.verdict}: {check.what}"


def _command(kind: str, title: str, message: str) -> str:
    return visible(f"::{kind} title={_property(title)}::{_data(message)}")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
