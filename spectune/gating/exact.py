"""Exact checks: counts and outputs at fixed seeds, cell by cell, against the baseline.

Which way is better comes from the table of metrics. Fewer rounds for the same tokens is an improvement and passes;
that it is not a miscount is what `counts_add_up` sees: a round gives its accepted tokens and one more, and only a
request's last round may lose that one, to a stop token or a limit. So counting a bonus token as accepted fails there.
"""

from __future__ import annotations

from collections.abc import Iterator

from spectune.gating.baseline import Cell, RequestCounts
from spectune.gating.check import Check, Verdict
from spectune.gating.metric import METRICS, Level, Metric, exceeds, worse_by
from spectune.gating.policy import Limit, Policy
from spectune.speedup.acceptance import Acceptance, acceptance, rounds_and_accepted

COMPARED = (
    "rounds",
    "target_forwards",
    "drafted",
    "accepted",
    "acceptance_length",
    "acceptance_rate",
    "tokens_per_target_forward",
)


def absolute_checks(cell: Cell, policy: Policy) -> Iterator[Check]:
    """What must hold of a run by itself."""
    m = METRICS["lossless"]
    if cell.output_check is not None:  # None: the rule keeps the distribution, not the tokens
        wrong = cell.output_check == "different"
        message = "outputs differ from plain decoding; see the cell's differences, and run `spectune verify`"
        text = message if wrong else f"{cell.output_check} to plain decoding"
        yield Check(m.name, "exact", cell.place, "REGRESSION" if wrong else "PASS", text, _level(m, cell, policy))
    m = METRICS["counts_add_up"]
    level = _level(m, cell, policy)
    wrong_ids = [r.id for r in cell.requests if not 0 <= _slack(r) <= 1]
    if wrong_ids:
        message = (
            f"{len(wrong_ids)} of {len(cell.requests)} requests, {wrong_ids[0]} for one, have tokens that are not "
            "their accepted ones and one per round: acceptance is miscounted"
        )
        yield Check(m.name, "exact", cell.place, "REGRESSION", message, level)
    else:
        yield Check(m.name, "exact", cell.place, "PASS", "tokens, rounds and accepted tokens agree", level)


def comparisons(base: Cell, now: Cell, policy: Policy, *, other_hardware: str | None) -> Iterator[Check]:
    """Every exact metric of a cell against the same cell's in the baseline.

    `other_hardware` says how the machines differ: a near-tie may then fall the other way and change everything after
    it, so only a stated tolerance is judged.
    """
    before, after = exact_values(base), exact_values(now)
    changed = _changed_outputs(base, now)
    yield _compare(METRICS["outputs"], base, now, 0.0, changed, policy, other_hardware)
    for name in COMPARED:
        # Null in both where nothing was drafted: no number, so no check.
        if before[name] is not None or after[name] is not None:
            yield _compare(METRICS[name], base, now, before[name], after[name], policy, other_hardware)
    yield from _by_position(base, now, policy, other_hardware)


def exact_values(cell: Cell) -> dict[str, float | None]:
    """The exact metrics that have one value per cell."""
    found = _acceptance(cell)
    values: dict[str, float | None] = {"target_forwards": cell.target_forwards}
    for name in COMPARED:
        if name not in values:
            values[name] = getattr(found, name)
    return values


def _compare(
    m: Metric,
    base: Cell,
    now: Cell,
    before: float | None,
    after: float | None,
    policy: Policy,
    other_hardware: str | None,
    *,
    what: str = "",
) -> Check:
    limit = policy.limit(m, now.place)
    unsure = _cannot_compare(base, now, limit, other_hardware)
    if before is None or after is None:
        side = "the baseline" if before is None else "the run"
        message = f"{m.name} is null in {side}, where nothing was drafted; write a new baseline if that is right"
        return Check(m.name, "exact", now.place, "CANNOT JUDGE", message, limit.level, before, after)
    worse = worse_by(m, before, after)
    change = after - before if m.absolute or before == 0 else after / before - 1
    failed = exceeds(worse, limit.tolerance)
    message = what or f"{number(before)} -> {number(after)}"
    verdict: Verdict = "PASS"
    if unsure:
        verdict, message = "CANNOT JUDGE", unsure
    elif failed:
        verdict = "REGRESSION"
        message += f", worse by {share(worse)} (tolerance {share(limit.tolerance)})"
    elif before == after:
        message = "unchanged"
    return Check(
        m.name,
        "exact",
        now.place,
        verdict,
        message,
        limit.level,
        before,
        after,
        change,
        limit=limit.tolerance,
    )


def _by_position(base: Cell, now: Cell, policy: Policy, other_hardware: str | None) -> Iterator[Check]:
    """The position that lost most decides."""
    m = METRICS["joint_acceptance"]
    before, after = _acceptance(base).joint_acceptance, _acceptance(now).joint_acceptance
    # Shares of the rounds: without a round all of them are null.
    pairs = list(zip(before, after, strict=True))
    known = [(b, a, i) for i, (b, a) in enumerate(pairs, 1) if b is not None and a is not None]
    if not known:
        if one := next((pair for pair in pairs if pair != (None, None)), None):
            yield _compare(m, base, now, *one, policy, other_hardware)
        return
    b, a, i = max(known, key=lambda each: each[0] - each[1])
    yield _compare(m, base, now, b, a, policy, other_hardware, what=f"position {i}: {b:.3f} -> {a:.3f} of the rounds")


def _cannot_compare(base: Cell, now: Cell, limit: Limit, other_hardware: str | None) -> str | None:
    if other_hardware is not None and not limit.stated:
        return (
            f"measured on other hardware ({other_hardware}), where rounding can tip a near-tie; state what may differ: "
            "--tolerance 1%, or --tolerance 0 for nothing"
        )
    for side, cell in (("baseline", base), ("run", now)):
        if not cell.repeatable and not limit.stated:
            return f"the repeats of the {side} differ among themselves; state what may differ: --tolerance 1%"
    return None


def _changed_outputs(base: Cell, now: Cell) -> float:
    """Share of the requests, which are the same ones, with other tokens."""
    pairs = zip(base.requests, now.requests, strict=True)
    return sum(was.output_digest != is_.output_digest for was, is_ in pairs) / len(now.requests)


def _acceptance(cell: Cell) -> Acceptance:
    return acceptance(cell.spec.k, cell.requests)


def _slack(request: RequestCounts) -> int:
    """Rounds whose closing token was not delivered."""
    rounds, accepted = rounds_and_accepted(request)
    return accepted + rounds - (request.output_tokens - 1)


def _level(m: Metric, cell: Cell, policy: Policy) -> Level:
    return policy.limit(m, cell.place).level


def number(value: float) -> str:
    """A count whole, everything else with four digits."""
    return str(int(value)) if value == int(value) else f"{value:.4g}"


def share(value: float) -> str:
    return "more than everything" if value == float("inf") else f"{100 * value:.3g} %"
