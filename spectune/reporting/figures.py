"""What the page's figures show. Pure: `spectune.reporting.drawing` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectune.reporting import format as form
from spectune.reporting.chart import Figure, Numbers, Panel, Series, distinct, named_ticks
from spectune.reporting.summary import Summary
from spectune.speedup.profile import Profile
from spectune.speedup.waterfall import STEPS
from spectune.sweeping.counts import spread

_LINES = 8  # drafts drawn in a panel of lines: more cannot be told apart
_PANELS = 12
_BATCHES = 3  # of many, in figures with a panel per batch


def figures(summary: Summary, drafts: Sequence[dict[str, Any]]) -> tuple[Figure, ...]:
    """Every figure that the run has data for. `drafts` are the rows of `report --json`."""
    if not any(p.speedup.value is not None or p.acceptance.rounds for p in summary.profiles):
        return ()
    names = _fastest(summary.profiles)
    found = (
        _by_k(summary.profiles, names),
        _by_batch(summary, names),
        _drafts(drafts),
        _by_position(summary.profiles, names),
        _waterfall(summary),
        _predicted(summary),
    )
    return tuple(f for f in found if f is not None)


def line_name(p: Profile) -> str:
    return p.spec.drafter if p.spec.rule == "greedy" else f"{p.spec.drafter}, {p.spec.rule}"


def _fastest(profiles: Sequence[Profile]) -> tuple[list[str], str]:
    """The drafts to draw as lines, in the order of the run, and a note where others are left out."""
    best: dict[str, float] = {}
    for p in profiles:
        best[line_name(p)] = max(best.get(line_name(p), 0.0), p.speedup.value or 0.0)
    kept = sorted(best, key=lambda name: -best[name])[:_LINES]
    note = f" Drawn are the {_LINES} fastest of {len(best)} drafts; the tables have all." if len(best) > _LINES else ""
    return [name for name in best if name in kept], note


def _by_k(profiles: Sequence[Profile], drawn: tuple[list[str], str]) -> Figure | None:
    names, note = drawn
    if len({p.spec.k for p in profiles}) < 2:
        return None
    suites = distinct(p.spec.suite for p in profiles)
    batches = sorted({p.spec.batch for p in profiles})
    shown = spread(batches, max(1, min(_BATCHES, _PANELS // len(suites))) if len(batches) > 1 else 1)
    panels = []
    for suite, batch in [(s, b) for s in suites for b in shown][:_PANELS]:
        inside = [p for p in profiles if (p.spec.suite, p.spec.batch) == (suite, batch) and line_name(p) in names]
        series = []
        for style, name in enumerate(names):
            own = sorted((p for p in inside if line_name(p) == name), key=lambda p: p.spec.k)
            if own:
                series.append(_speeds(name, style, [float(p.spec.k) for p in own], own, "K"))
        if series:
            ticks = named_ticks(p.spec.k for p in inside)
            panels.append(Panel(f"{suite}, batch {batch}", "lines", tuple(series), "K", "speedup", ticks, even=True))
    left = len(suites) * len(batches) - len(panels)
    more = f" {left} other places are in the tables." if left else ""
    return Figure(
        "speedup-by-k",
        "Speedup by K",
        f"Speedup by K with 95 % intervals. Below the line at 1, speculation costs time.{note}{more}",
        tuple(panels),
        tuple(names),
    )


def _by_batch(summary: Summary, drawn: tuple[list[str], str]) -> Figure | None:
    names, note = drawn
    profiles = [p for p in summary.profiles if p.spec.k > 0]
    if len({p.spec.batch for p in profiles}) < 2:
        return None
    panels = []
    for suite in distinct(p.spec.suite for p in profiles)[:_PANELS]:
        inside = [p for p in profiles if p.spec.suite == suite and line_name(p) in names]
        series = []
        for style, name in enumerate(names):
            own = [p for p in inside if line_name(p) == name]
            batches = sorted({p.spec.batch for p in own})
            best = [max((p for p in own if p.spec.batch == b), key=lambda p: p.speedup.value or 0) for b in batches]
            if best:
                series.append(_speeds(name, style, [float(b) for b in batches], best, "batch"))
        if not series:
            continue
        ticks = named_ticks(p.spec.batch for p in inside)
        panels.append(Panel(suite, "lines", tuple(series), "batch", "speedup", ticks, log_x=True, even=True))
    return Figure(
        "speedup-by-batch",
        "Speedup by batch",
        f"Each draft's best K at each batch, with 95 % intervals. It stops paying where its line crosses 1.{note}",
        tuple(panels),
        tuple(names),
    )


def _speeds(name: str, style: int, at: Sequence[float], own: Sequence[Profile], what: str) -> Series:
    return Series(
        name,
        style,
        tuple(at),
        tuple(p.speedup.value for p in own),
        tuple(f"{name}, {_other(p, what)}: {_speedup(p)}" for p in own),
        tuple(p.speedup.low for p in own),
        tuple(p.speedup.high for p in own),
    )


def _other(p: Profile, what: str) -> str:
    return f"K {p.spec.k}" if what == "K" else f"batch {p.spec.batch}, K {p.spec.k}"


def _speedup(p: Profile) -> str:
    return f"speedup {form.speedup(p.speedup.value, p.speedup.low, p.speedup.high)}"


def _drafts(rows: Sequence[dict[str, Any]]) -> Figure | None:
    """A row per draft, sorted by speed at the smallest batch; and what is accepted over what a step reads."""
    batches = spread(sorted({r["batch"] for r in rows}), _BATCHES)
    if not batches:
        return None
    first = [r for r in rows if r["batch"] == batches[0]]
    order = sorted(first, key=lambda r: -(r["speedup"] or 0.0))
    row = {(r["drafter"], r["rule"]): float(n) for n, r in enumerate(order)}
    series = []
    for style, batch in enumerate(batches):
        own = [r for r in rows if r["batch"] == batch and (r["drafter"], r["rule"]) in row]
        shift = 0.22 * (style - (len(batches) - 1) / 2)
        series.append(
            Series(
                f"batch {batch}",
                style,
                tuple(r["speedup"] for r in own),
                tuple(row[r["drafter"], r["rule"]] + shift for r in own),
                tuple(
                    f"{r['drafter']}, batch {batch}, K {r['k']}: speedup "
                    f"{form.speedup(r['speedup'], r['speedup_low'], r['speedup_high'])}"
                    for r in own
                ),
                tuple(r["speedup_low"] for r in own),
                tuple(r["speedup_high"] for r in own),
            )
        )
    ticks = tuple((float(n), r["drafter"]) for n, r in enumerate(order))
    return Figure(
        "drafts",
        "Drafts side by side",
        "The speedup of each draft at its best K over all suites, with its 95 % interval, fastest first. Its tokens "
        f"per round at batch {batches[0]} over the bytes of a draft step: upper ones accept more, left ones are small.",
        (
            Panel("Speedup of each draft", "rows", tuple(series), "speedup", "", y_ticks=ticks, even=True),
            Panel(
                f"Size and acceptance, batch {batches[0]}",
                "points",
                (_sizes(order, batches[0]),),
                "bytes read a draft step / target step",
                "acceptance length",
                _size_ticks(order),
                log_x=True,
            ),
        ),
        tuple(f"batch {b}" for b in batches),
    )


def _sizes(rows: Sequence[dict[str, Any]], batch: int) -> Series:
    """Acceptance length over the bytes of a draft step; a drafter without weights reads none."""
    known = [r for r in rows if r["acceptance_length"] is not None]
    (nothing, _), *_ = _size_ticks(rows)
    return Series(
        f"batch {batch}",
        0,
        tuple(r["bytes_of_target"] or nothing for r in known),
        tuple(r["acceptance_length"] for r in known),
        tuple(
            f"{r['drafter']}, batch {batch}, K {r['k']}: reads {form.percent(r['bytes_of_target'] or 0.0)} of "
            f"the target's bytes a step, AL {form.number(r['acceptance_length'])}, speedup {form.number(r['speedup'])}"
            for r in known
        ),
        labels=tuple(r["drafter"] for r in known),
    )


def _size_ticks(rows: Sequence[dict[str, Any]]) -> tuple[tuple[float, str], ...]:
    """On a logarithmic axis, with a place for drafts that read nothing left of the others."""
    sizes = [r["bytes_of_target"] for r in rows if r["bytes_of_target"]] or [1.0]
    steps = [m * 10.0**e for e in range(-6, 3) for m in (1, 2, 5)]
    low = max((s for s in steps if s <= min(sizes)), default=steps[0])
    inside = [s for s in steps if low <= s <= max(*sizes, 2 * low)]
    return ((low / 2, "none"), *((s, f"{s:g}") for s in inside))


def _by_position(profiles: Sequence[Profile], drawn: tuple[list[str], str]) -> Figure | None:
    names, note = drawn
    panels = []
    for suite in distinct(p.spec.suite for p in profiles)[:_PANELS]:
        inside = [p for p in profiles if p.spec.suite == suite and line_name(p) in names]
        series, longest = [], 1
        for style, name in enumerate(names):
            own = [p for p in inside if line_name(p) == name]
            if not own:
                continue
            deep = min(own, key=lambda p: (-p.spec.k, p.spec.batch))
            values: Numbers = deep.acceptance.conditional_acceptance
            longest = max(longest, deep.spec.k)
            tips = tuple(f"{name}, position {n}: {form.number(v)} kept" for n, v in enumerate(values, 1))
            series.append(Series(name, style, tuple(float(n) for n in range(1, len(values) + 1)), values, tips))
        if not series:
            continue
        ticks = named_ticks(spread(range(1, longest + 1), 8))
        panels.append(
            Panel(suite, "lines", tuple(series), "position in the draft", "conditional acceptance", ticks, share=True)
        )
    forced = any(p.spec.synthetic is not None for p in profiles)
    what, how = ("Synthetic acceptance", "Forced, not measured; shown") if forced else ("Acceptance", "Measured")
    return Figure(
        "acceptance-by-position",
        f"{what} by position",
        "How often a drafted token is kept, given that all before it were. "
        f"{how} at each draft's largest K and its smallest batch there.{note}",
        tuple(panels),
        tuple(names),
    )


def _waterfall(summary: Summary) -> Figure | None:
    """Of the fastest cell of each suite at each end of the batches."""
    known = [
        (p, q) for p, q in zip(summary.profiles, summary.fit.predictions, strict=True) if len(q.waterfall.steps) > 1
    ]
    batches = sorted({p.spec.batch for p, _ in known})
    panels = []
    for suite in distinct(p.spec.suite for p, _ in known):
        for batch in spread(batches, 2):
            own = [(p, q) for p, q in known if (p.spec.suite, p.spec.batch) == (suite, batch)]
            if own:
                p, q = max(own, key=lambda pair: pair[0].speedup.value or 0.0)
                title = f"{suite}, batch {batch}: {line_name(p)}, K {p.spec.k}"
                panels.append(_losses(title, [(s.name, s.speedup) for s in q.waterfall.steps]))
    if not panels:
        return None
    return Figure(
        "waterfall",
        "Where the speedup goes",
        "From drafted + 1 tokens a plain step down to the measured speedup, one loss at a time, for the fastest draft "
        "of each suite; the number at each bar is what is left. Gains may follow: plain decoding has an overhead too.",
        tuple(panels[:_PANELS]),
        (),
    )


def _losses(title: str, steps: Sequence[tuple[str, float | None]]) -> Panel:
    known = [(name, value) for name, value in steps if value is not None]
    before = [0.0, *(value for _, value in known)]
    total = {0, len(known) - 1}
    starts = [0.0 if n in total else before[n] for n in range(len(known))]
    styles = [0 if n in total else 1 if known[n][1] < before[n] else 2 for n in range(len(known))]
    series = tuple(
        Series(
            name,
            style,
            (float(n),),
            (value,),
            (f"{name}: {form.number(value)} left",),
            (start,),
            (value,),
            (form.number(value),),
        )
        for n, ((name, value), start, style) in enumerate(zip(known, starts, styles, strict=True))
    )
    ticks = tuple((float(n), name) for n, name in enumerate(STEPS_SHORT[name] for name, _ in known))
    return Panel(title, "bars", series, "", "speedup", ticks, even=True)


STEPS_SHORT = dict(
    zip(STEPS, ("ideal", "accept", "draft", "verify", "over-\nhead", "batch", "plain", "meas-\nured"), strict=True)
)


def _predicted(summary: Summary) -> Figure | None:
    series: list[Series] = []
    pairs = list(zip(summary.profiles, summary.fit.predictions, strict=True))
    for name, field in (("card", "card"), ("full", "full"), ("full, cell held out", "held_out")):
        own = [(p, q.measured, getattr(q, field)) for p, q in pairs]
        known = [(p, x, y) for p, x, y in own if x is not None and y is not None]
        if known:
            series.append(
                Series(
                    name,
                    len(series),
                    tuple(x for _, x, _ in known),
                    tuple(y for _, _, y in known),
                    tuple(
                        f"{p.spec.suite}, batch {p.spec.batch}, {p.spec.drafter}, K {p.spec.k}: "
                        f"measured {form.number(x)}, {name} {form.number(y)}"
                        for p, x, y in known
                    ),
                )
            )
    if not series:
        return None
    return Figure(
        "predicted-and-measured",
        "Predicted against measured",
        "One point per cell and model. On the line a prediction is right; above it the model promised too much.",
        (Panel("All cells", "points", tuple(series), "measured speedup", "predicted speedup", diagonal=True),),
        tuple(s.name for s in series),
    )
