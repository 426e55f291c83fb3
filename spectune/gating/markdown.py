"""The outcome as Markdown, for a step summary on GitHub or a comment."""

from __future__ import annotations

from pathlib import Path

from spectune.errors import SpectuneError
from spectune.gating.check import Outcome
from spectune.gating.selector import label
from spectune.gating.table import headline, numbers, rows, troubles
from spectune.reporting.format import visible

STEP_SUMMARY_BYTES = 1024 * 1024  # GitHub drops the summary of a step that has more
_CUT = "\n\n**Cut here: the summary would exceed 1 MiB. `spectune gate --json` has all of it.**\n"
_SIGNS = {"PASS": "✅", "REGRESSION": "❌", "RUN FAILED": "💥", "CANNOT JUDGE": "❔"}


def markdown(outcome: Outcome) -> str:
    """The verdict, what did not pass, and a table of all cells."""
    lines = [f"### {_SIGNS[outcome.verdict]} spectune gate: {_escape(headline(outcome))}", ""]
    for trouble in troubles(outcome):
        level = "" if trouble.level == "error" else " (warning)"
        lines.append(f"- **{trouble.verdict}**{level} {_escape(trouble.text)}")
    lines += ["", "| cell | acceptance length | speedup | verdict |", "|---|---|---|---|"]
    for row in rows(outcome):
        acceptance, speedup = _escape(numbers(row.acceptance, row.length)), _escape(numbers(row.speedup))
        verdict = f"{_SIGNS[row.verdict]} {row.verdict}"
        lines.append(f"| {_escape(label(row.place))} | {acceptance} | {speedup} | {verdict} |")
    lines += ["", *(f"- {_escape(note)}" for note in outcome.notes)]
    return "\n".join(lines).rstrip() + "\n"


def append_step_summary(path: Path, text: str) -> bool:
    """Add to GitHub's summary of this step, within what is left of its limit. Whether all of it had room."""
    try:
        used = path.stat().st_size if path.exists() else 0
        kept = cut(text, STEP_SUMMARY_BYTES - used)
        with open(path, "ab") as file:
            file.write(kept)
    except OSError as error:
        raise SpectuneError(f"cannot write the step summary {path}: {error.strerror or error}") from error
    return kept == text.encode()


def cut(text: str, limit: int) -> bytes:
    """At most `limit` bytes of UTF-8, cut at a line, with a notice where something was left out."""
    data, notice = text.encode(), _CUT.encode()
    if len(data) <= limit:
        return data
    if limit < len(notice):
        return b""
    return data[: limit - len(notice)].rpartition(b"\n")[0] + notice


def _escape(text: str) -> str:
    """One line, in which nothing is a table, a link or HTML."""
    text = visible(" ".join(text.split()))
    for sign in "\\`*_[]|":
        text = text.replace(sign, "\\" + sign)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
