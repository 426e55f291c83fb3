"""Starting, resuming and extending a run: what may share a run directory, and what may not."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from spectune.errors import UsageError
from spectune.measuring.fingerprint import fingerprint_id
from spectune.sweeping.cell import CellSpec, RunInfo
from spectune.sweeping.rundir import RunDirectory
from spectune.sweeping.synthetic import one_setting

# What a run may have many of. All else is one for the whole run, or its cells could not be compared.
_AXES = {"suite", "suite_digest", "drafter", "drafter_digest", "draft_device", "k", "batch", "synthetic"}


def default_path(target: str, now: datetime | None = None) -> Path:
    """runs/<UTC time>-<short name of the target>, with a number behind it if that is taken."""
    last = target.rstrip("/").rsplit("/", 1)[-1] or "run"
    short = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in last)
    stem = f"{now or datetime.now(UTC):%Y%m%dT%H%M%SZ}-{short}"
    path, n = Path("runs", stem), 1
    while path.exists():
        n += 1
        path = Path("runs", f"{stem}-{n}")
    return path


def check_free(directory: RunDirectory, *, resume: bool, again: str) -> None:
    """Raises UsageError if a new run cannot start in the folder. `again` is the command that resumes it."""
    foreign = directory.foreign_files()
    if foreign:
        raise UsageError(f"{directory.path} is no run and not empty (it holds {foreign[0]})", "choose another --output")
    if directory.exists() and not resume:
        raise UsageError(f"{directory.path} holds a run already", again)


def open_run(
    directory: RunDirectory, info: RunInfo, *, resume: bool, again: str, allow_env_mismatch: bool
) -> tuple[str, ...]:
    """Write run.json, or add the plan of `info` to the one that is there.

    Returns notes: how the environment differs from that of the run, where that is allowed. Raises
    UsageError as `check_free`, and where the run has other settings, digests or another environment.
    """
    check_free(directory, resume=resume, again=again)
    with directory.locked():
        check_free(directory, resume=resume, again=again)
        if not directory.exists():
            directory.write_info(info)
            return ()
        there = directory.info()
        changed = plan_differences(there.plan, info.plan)
        if changed:
            raise UsageError(
                f"{directory.path} was measured with other settings: {'; '.join(changed)}",
                "use the same settings, or another --output",
            )
        notes = tuple(environment_differences(there.environment, info.environment))
        if notes and not allow_env_mismatch:
            raise UsageError(
                f"{directory.path} was measured in another environment: {'; '.join(notes)}",
                "use another --output, or --allow-env-mismatch",
            )
        known = {spec.key for spec in there.plan}
        added = tuple(spec for spec in info.plan if spec.key not in known)
        if added:
            drafters = {**there.drafters, **info.drafters}
            directory.write_info(there.model_copy(update={"plan": (*there.plan, *added), "drafters": drafters}))
        return notes


def plan_differences(there: tuple[CellSpec, ...], asked: tuple[CellSpec, ...]) -> list[str]:
    """Why two plans cannot share a run: one text for each difference."""
    old, new = there[0].model_dump(), asked[0].model_dump()
    changed = [
        f"{name} is {_short(old[name])} there and {_short(new[name])} here"
        for name in old
        if name not in _AXES and old[name] != new[name]
    ]
    changed += _synthetic_differences(there, asked)
    for what, digests in (
        ("suite {} has other prompts", lambda s: (s.suite, s.suite_digest)),
        ("draft {} has other weights", lambda s: (s.drafter, s.drafter_digest)),
        ("draft {} is on another device", lambda s: (s.drafter, s.draft_device)),
    ):
        before = dict(map(digests, there))
        now = dict(map(digests, asked))
        changed += [what.format(n) for n in now if n in before and now[n] != before[n]]
    return changed


def _synthetic_differences(there: tuple[CellSpec, ...], asked: tuple[CellSpec, ...]) -> list[str]:
    if one_setting(spec.synthetic for spec in (*there, *asked) if spec.k):
        return []
    rates = [max((spec.synthetic or () for spec in plan), key=len) for plan in (there, asked)]
    words = [", ".join(f"{rate:.4g}" for rate in own) or "off" for own in rates]
    return [f"synthetic acceptance is {words[0]} there and {words[1]} here"]


def environment_differences(there: dict[str, object], here: dict[str, object]) -> list[str]:
    """How two environments differ, if timings or decoders of the two are not comparable."""
    if fingerprint_id(there) == fingerprint_id(here) and there.get("spectune") == here.get("spectune"):
        return []
    return [
        f"{name} was {_short(there.get(name))}, is {_short(here.get(name))}"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]


def _short(value: object) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{k} {v}" for k, v in value.items())
    text = str(value)
    return text if len(text) <= 60 else text[:59] + "…"
