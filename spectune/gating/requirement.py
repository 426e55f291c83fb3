"""Requirements: `metric[.statistic]["["selector"]"] op number`, such as `tpot_ms.p95[code]<30`.

>= and <= hold at the number itself, > and < do not. The operator must agree with the metric's direction: asking
that a speedup be low is a slip, not a requirement.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from spectune.errors import UsageError
from spectune.gating.metric import STATISTICS, Metric, metric
from spectune.gating.selector import ANY, Selector, parse_selector

Operator = Literal[">=", ">", "<=", "<"]
GRAMMAR = "metric[.statistic][selector] op number, as tpot_ms.p95[code]<30"
# The selector is greedy: a drafter's name may hold any sign, a bracket too.
_FORM = re.compile(
    r"\s*(?P<metric>\w+)\s*(?:\.\s*(?P<statistic>\w+))?\s*(?:\[(?P<selector>.*)\])?\s*(?P<op>>=|<=|>|<)\s*"
    r"(?P<number>[-+.\w%]+)\s*"
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """`statistic` is None for metrics that have one value per cell."""

    metric: Metric
    statistic: str | None
    selector: Selector
    op: Operator
    number: float

    def __str__(self) -> str:
        statistic = f".{self.statistic}" if self.statistic else ""
        selector = f"[{self.selector}]" if self.selector != ANY else ""
        return f"{self.metric.name}{statistic}{selector}{self.op}{self.number:.15g}"

    def holds(self, value: float) -> bool:
        """Whether a value is on the right side. NaN never is."""
        match self.op:
            case ">=":
                return value >= self.number
            case ">":
                return value > self.number
            case "<=":
                return value <= self.number
            case "<":
                return value < self.number


def parse_requirement(text: str, where: str = "--require") -> Requirement:
    """Raises UsageError with the grammar, or with the names that exist."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(f"{where}: cannot read {text!r}", f"write {GRAMMAR}")
    m = metric(found["metric"], where)
    if not m.required:
        raise UsageError(f"{where}: {m.name} is compared with a baseline only", "give --baseline FILE")
    statistic = found["statistic"]
    if statistic is not None and not m.by_request:
        raise UsageError(f"{where}: {m.name} has one value per cell and no {statistic}", f"leave .{statistic} out")
    if statistic is not None and statistic not in STATISTICS:
        raise UsageError(f"{where}: no statistic {statistic!r}", f"known are {', '.join(STATISTICS)}")
    selector = ANY if found["selector"] is None else parse_selector(found["selector"], where)
    op: Operator = found["op"]  # type: ignore[assignment]
    right = ">" if m.better == "higher" else "<"
    if op[0] != right:
        raise UsageError(f"{where}: {m.name} is better when it is {m.better}", f"write {right} or {right}=")
    if m.by_request and statistic is None:
        statistic = "median"
    return Requirement(m, statistic, selector, op, _number(found["number"], where))


def _number(text: str, where: str) -> float:
    try:
        value = float(text.replace("_", "?"))  # Python would read 1_3 as 13
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{where}: {text!r} is not a number", f"write {GRAMMAR}")
    return value
