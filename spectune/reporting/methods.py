"""The table of methods: every drafter of a run side by side, as Markdown.

    python -m spectune.reporting.methods RUN -o FILE

One row per drafter and suite, batches side by side; below it what is known of each trained head's making.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from spectune.errors import SpectuneError
from spectune.speedup.profile import Profile, profiles
from spectune.speedup.run import load_run
from spectune.sweeping.atomic import write_atomically

_POSITIONS = 4


def table(found: Sequence[Profile]) -> str:
    """The measured cells: acceptance from counts, speedups paired with plain decoding."""
    batches = sorted({p.spec.batch for p in found})
    head = ["drafter", "K", "suite", "acceptance length", "accepted at position 1, 2, …", "draft / target step"]
    head += [f"speedup, batch {b} (95 %)" for b in batches]
    rows = []
    for group in _groups(found):
        first = group[min(group)]
        counted = first.acceptance
        cost = first.timing.cost_ratio
        rows.append(
            [
                f"`{first.spec.drafter}`",
                str(first.spec.k),
                first.spec.suite,
                _number(counted.acceptance_length) + (" (synthetic)" if first.spec.synthetic else ""),
                ", ".join(_number(a) for a in counted.joint_acceptance[:_POSITIONS] if a is not None),
                _number(cost),
                *(_speedup(group.get(b)) for b in batches),
            ]
        )
    return markdown(head, rows)


def training_table(folders: Iterable[Path]) -> str:
    """What made each shipped head, from its training.json."""
    rows = []
    for folder in sorted(folders):
        trainings = _trainings(folder)
        held_out = trainings[-1].get("held_out") or {}
        size = sum(f.stat().st_size for f in folder.iterdir())
        rows.append(
            [
                f"`{folder.name}`",
                f"{size / 1e6:.1f}",
                " + ".join(f"{made.get('tokens_seen', 0):,}" for made in trainings),
                _list(held_out.get("acceptance")),
                _list(held_out.get("overlap")),
                ", then ".join(f"`{shlex.join(made['command'])}`" for made in trainings),
            ]
        )
    head = ["head", "MB", "tokens seen", "held-out acceptance by position", "overlap 1 − TV", "made by"]
    return markdown(head, rows)


def _trainings(folder: Path) -> list[dict[str, Any]]:
    """The records of a head and of those that it went on from, the first training first."""
    record = json.loads((folder / "training.json").read_text("utf-8"))
    found = [record]
    while record := record.get("start") or {}:
        found.insert(0, record)
    return found


def staged_table(found: Sequence[Profile]) -> str:
    """Each staged drafter beside its second stage alone, whose tokens it drafts: what the first stage gains or costs.

    Empty where the run has no such pair.
    """
    by_place = {(p.spec.drafter, p.spec.k, p.spec.suite, p.spec.batch): p for p in found}
    rows = []
    for (drafter, *place), staged in by_place.items():
        alone = by_place.get((drafter.rpartition(">")[2], *place))  # type: ignore[arg-type]
        if not drafter.startswith("staged:") or alone is None:
            continue
        rows.append(
            [
                f"`{drafter}`",
                staged.spec.suite,
                str(staged.spec.batch),
                *(f"{_number(p.acceptance.acceptance_length)}" for p in (staged, alone)),
                *(_number(p.timing.draft_steps) for p in (staged, alone)),
                *(_milliseconds(p.timing.draft_seconds) for p in (staged, alone)),
                *(_speedup(p) for p in (staged, alone)),
                _why(staged, alone),
            ]
        )
    if not rows:
        return ""
    head = [
        "drafter",
        "suite",
        "batch",
        "acceptance length",
        "second stage alone",
        "drafting forwards a round",
        "alone",
    ]
    head += ["drafting, ms a round", "alone", "speedup (95 %)", "alone", "what decides"]
    return markdown(head, rows)


def _why(staged: Profile, alone: Profile) -> str:
    """The larger of the two differences that can decide: tokens of a round, or time of its drafting."""
    ours, theirs = staged.timing, alone.timing
    if ours.draft_seconds is None or theirs.draft_seconds is None or not theirs.round_seconds:
        return "—"
    lengths = staged.acceptance.acceptance_length, alone.acceptance.acceptance_length
    if lengths[0] is None or lengths[1] is None:
        return "—"
    tokens = lengths[0] / lengths[1] - 1
    time = (ours.draft_seconds - theirs.draft_seconds) / theirs.round_seconds
    if abs(tokens) < 0.03 and abs(time) < 0.03:
        return "neither: within 3 % in tokens and drafting time of a round"
    if abs(tokens) >= abs(time):
        return f"{tokens:+.0%} tokens a round"
    cause = "the first stage's guesses are seldom kept" if time > 0 else "the first stage spares the second forwards"
    return f"drafting takes {time:+.0%} of a round's time: {cause}"


def curve_table(folders: Iterable[Path]) -> str:
    """How each shipped head's acceptance at the first position grew with the tokens seen."""
    rows = []
    for folder in sorted(folders):
        curves = [made.get("curve") or [] for made in _trainings(folder)]
        grown = [", ".join(f"{p['tokens']:,}: {_number(p['acceptance'][0])}" for p in points) for points in curves]
        if any(grown):
            rows.append([f"`{folder.name}`", "; then, on its own text, ".join(filter(None, grown))])
    return markdown(["head", "tokens seen: held-out acceptance at position 1"], rows)


def _milliseconds(seconds: float | None) -> str:
    return "—" if seconds is None else f"{1e3 * seconds:.1f}"


def _groups(found: Sequence[Profile]) -> list[dict[int, Profile]]:
    """Profiles of one drafter, K and suite by batch, in the order of the run."""
    groups: dict[tuple[str, int, str], dict[int, Profile]] = {}
    for p in found:
        groups.setdefault((p.spec.drafter, p.spec.k, p.spec.suite), {})[p.spec.batch] = p
    return list(groups.values())


def _speedup(p: Profile | None) -> str:
    if p is None or p.speedup.value is None:
        return "—"
    interval = "" if p.speedup.low is None else f" ({p.speedup.low:.2f}–{p.speedup.high:.2f})"
    return f"{p.speedup.value:.2f}{interval}"


def _number(x: float | None) -> str:
    return "—" if x is None else f"{x:.2f}"


def _list(values: Sequence[float | None] | None) -> str:
    return ", ".join(map(_number, values)) if values else "—"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars inside cells are escaped."""
    cells: list[Sequence[Any]] = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def page(run: Path, drafts: Path) -> str:
    """The whole file."""
    loaded = load_run(run)
    found = profiles(loaded)
    spec = found[0].spec
    heads = [f.parent for f in drafts.glob("*/training.json")] if drafts.is_dir() else []
    parts = [
        "# Methods side by side",
        f"Target `{loaded.info.target.name}`, {spec.dtype} on {spec.device}; "
        f"temperature {spec.sampling.temperature:g}; "
        f"{found[0].rates.prompts} prompts a suite, {spec.max_new_tokens} tokens each, {spec.repeats} paired "
        f"repeats; spectune {loaded.info.spectune_version}, {loaded.info.created_at[:10]}. Acceptance is that of the "
        "smallest batch. For trees K counts nodes. `make methods` measures this table again.",
        table(found),
    ]
    if staged := staged_table(found):
        parts += ["## Staged drafting against its second stage alone", staged]
    if heads:
        parts += ["## The trained heads", training_table(heads), curve_table(heads)]
    return "\n\n".join(parts) + "\n"


def main(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    drafts: Annotated[Path, typer.Option(help="Folder of trained heads.")] = Path("spectune/drafts/smollm2"),
) -> None:
    """Write the table of methods of a run."""
    try:
        write_atomically(output, page(run, drafts))
    except SpectuneError as error:
        typer.echo(str(error), err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    typer.run(main)
