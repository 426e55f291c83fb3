"""`spectune gate`: a run against a baseline and requirements, as an exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from spectune.errors import UsageError

_CHECKS = "Checks"
_OUTPUT = "Output"


def gate(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", help="File written by `spectune baseline`.", rich_help_panel=_CHECKS),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            help="What every selected cell must reach, as 'speedup>=1.3' or 'tpot_ms.p95\\[code]<30'; repeatable.",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            "--tolerance",
            help="Largest change for the worse that passes: 1% for all exact metrics, or 'speedup\\[code]=8%'; "
            "repeatable.",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
    thresholds: Annotated[
        Path | None,
        typer.Option(
            "--thresholds",
            help="TOML file with a table \\[gate]: tolerances and requirements.",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", help="Compare exact or timed metrics alone.", rich_help_panel=_CHECKS),
    ] = None,
    update_baseline: Annotated[
        bool,
        typer.Option("--update-baseline", help="Make this run the baseline if it passes.", rich_help_panel=_CHECKS),
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="With --update-baseline: also if it does not pass; the exit code is then 0.",
            rich_help_panel=_CHECKS,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON and nothing else on stdout.", rich_help_panel=_OUTPUT)
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Write JUnit XML here.", rich_help_panel=_OUTPUT)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write Markdown here.", rich_help_panel=_OUTPUT)
    ] = None,
    step_summary: Annotated[
        bool,
        typer.Option("--step-summary", help="Append the Markdown to $GITHUB_STEP_SUMMARY.", rich_help_panel=_OUTPUT),
    ] = False,
    annotations: Annotated[
        bool,
        typer.Option("--annotations", help="Print ::error and ::warning lines for GitHub.", rich_help_panel=_OUTPUT),
    ] = False,
    openmetrics: Annotated[
        Path | None,
        typer.Option("--openmetrics", help="Write the numbers for GitLab's metrics report.", rich_help_panel=_OUTPUT),
    ] = None,
) -> None:
    """Hold a run against a baseline, against requirements, or both.

    Outputs and counts are compared exactly, times with their scatter. Exit codes: 0 pass, 1 regression, 2 wrong
    use, 3 cannot judge, 4 the run failed.

    Example: spectune gate runs/pr --baseline baseline.json --require "acceptance_length[code]>=2.0"
    """
    from spectune.gating.baseline import read_baseline
    from spectune.gating.gate import gate as judge
    from spectune.gating.policy import make_policy
    from spectune.gating.snapshot import read_snapshot

    if update_baseline and baseline is None:
        raise UsageError("--update-baseline needs the file to update", "give --baseline FILE")
    if accept_changes and not update_baseline:
        raise UsageError("--accept-changes is for --update-baseline", "give both")
    summary_file = os.environ.get("GITHUB_STEP_SUMMARY")
    if step_summary and not summary_file:
        raise UsageError("GITHUB_STEP_SUMMARY is not set", "use --markdown FILE outside of GitHub Actions")
    policy = make_policy(tolerance or (), require or (), thresholds, only)
    committed = None if baseline is None else read_baseline(baseline)
    measured = read_snapshot(run)
    outcome = judge(measured, committed, policy)

    from spectune.gating import document
    from spectune.gating.annotations import annotation_lines
    from spectune.gating.junit import junit as to_junit
    from spectune.gating.markdown import append_step_summary
    from spectune.gating.markdown import markdown as to_markdown
    from spectune.gating.openmetrics import openmetrics as to_openmetrics
    from spectune.reporting.format import one_line
    from spectune.reporting.store import write
    from spectune.reporting.summary import as_json as to_json

    for path, render in ((junit, to_junit), (markdown, to_markdown), (openmetrics, to_openmetrics)):
        if path is not None:
            write(path, render(outcome))
    if step_summary and summary_file and not append_step_summary(Path(summary_file), to_markdown(outcome)):
        print("note: the step summary is full; --markdown FILE has all of the outcome", file=sys.stderr)
    if as_json:
        print(to_json(document.outcome_document(outcome)))
    else:
        from rich.console import Console

        from spectune.gating.terminal import print_outcome

        print_outcome(outcome, Console(highlight=False, markup=False, emoji=False))
    if annotations:
        # GitHub reads both streams; with --json stdout holds JSON alone.
        print(*annotation_lines(outcome), sep="\n", file=sys.stderr if as_json else sys.stdout)
    code = outcome.exit_code
    if update_baseline and baseline is not None and committed is not None:
        from spectune.gating.update import incomplete, update

        lines = update(baseline, committed, measured, outcome, accept=accept_changes)
        print(*map(one_line, lines), sep="\n", file=sys.stderr)
        code = 0 if accept_changes and not incomplete(measured) else code
    raise typer.Exit(code)
