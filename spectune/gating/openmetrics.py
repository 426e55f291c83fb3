"""The numbers of a gate as OpenMetrics text, for GitLab's metrics report, which shows how they change in a merge
request."""

from __future__ import annotations

import math

from spectune.gating.check import Outcome
from spectune.gating.metric import METRICS
from spectune.reporting.format import visible


def openmetrics(outcome: Outcome) -> str:
    """One gauge per metric, one sample per cell: the run's own numbers. Ends with # EOF."""
    samples: dict[str, dict[str, float]] = {}
    for check in outcome.checks:
        name = check.what
        if check.required or name not in METRICS or METRICS[name].absolute or check.place is None:
            continue
        if check.now is not None and math.isfinite(check.now):
            labels = zip(("suite", "drafter", "rule", "k", "batch"), check.place, strict=True)
            text = ",".join(f'{key}="{_escape(str(value))}"' for key, value in labels)
            samples.setdefault(name, {})[text] = check.now
    lines = []
    for name, own in samples.items():
        lines.append(f"# TYPE spectune_{name} gauge")
        lines.append(f"# HELP spectune_{name} {_escape(METRICS[name].meaning)}")
        lines += [f"spectune_{name}{{{text}}} {value:.10g}" for text, value in own.items()]
    lines += [
        "# TYPE spectune_gate_exit_code gauge",
        "# HELP spectune_gate_exit_code 0 pass, 1 regression, 3 cannot judge, 4 run failed",
        f"spectune_gate_exit_code {outcome.exit_code}",
        "# EOF",
    ]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return visible(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
