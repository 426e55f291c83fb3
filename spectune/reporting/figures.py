"""The page's figures, as inline SVG. matplotlib is only imported here, and never its GUI side."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spectune.reporting.format import visible
from spectune.speedup.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#010203"  # stands for the page's own text colour, which depends on its light or dark scheme
_COLOURS = ("#3a86c8", "#e07b39", "#2a9d78", "#b45fc4", "#c29a1d", "#d6486a", "#6d7fd1", "#7f8c3a")
_MARKERS = "osD^vPX*"
_PANEL = (3.6, 2.7)  # inches
_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Figure:
    caption: str
    svg: str


def draw(profiles: Sequence[Profile]) -> tuple[tuple[Figure, ...], str | None]:
    """The figures of a run, and a note where they could not be drawn.

    Cells without a value leave a gap. Nothing is drawn where no cell has a speedup.
    """
    try:
        import matplotlib
        import matplotlib.figure
    except (ImportError, ValueError) as error:
        # ValueError: MPLBACKEND names a backend that matplotlib does not know.
        return (), f"Figures are left out: matplotlib cannot be used ({error})."
    if not profiles:
        return (), None
    # hashsalt: equal runs give equal files
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "spectune", "font.size": 9}):
        return tuple(d(profiles) for d in (_by_k, _by_batch, _by_position)), None


def _by_k(profiles: Sequence[Profile]) -> Figure:
    places = sorted({(p.spec.suite, p.spec.batch) for p in profiles})
    colours = _colours(profiles)

    def panel(axes: Axes, place: tuple[str, int]) -> None:
        inside = [p for p in profiles if (p.spec.suite, p.spec.batch) == place]
        for name in _distinct(_line_name(p) for p in inside):
            own = sorted((p for p in inside if _line_name(p) == name), key=lambda p: p.spec.k)
            _speedup_line(axes, [p.spec.k for p in own], own, name, colours)
        axes.set_title(_text(f"{place[0]}, batch {place[1]}"))
        _whole_numbers(axes, [p.spec.k for p in inside])
        axes.set_xlabel("K")

    return Figure(
        "Speedup by K for each suite and batch, with 95 % intervals. Below 1, speculation costs time.",
        _svg("k", places, panel, "speedup"),
    )


def _by_batch(profiles: Sequence[Profile]) -> Figure:
    suites = _distinct(p.spec.suite for p in profiles)
    colours = _colours(profiles)

    def panel(axes: Axes, suite: str) -> None:
        inside = [p for p in profiles if p.spec.suite == suite]
        for name in _distinct(_line_name(p) for p in inside):
            own = [p for p in inside if _line_name(p) == name]
            batches = sorted({p.spec.batch for p in own})
            best = [max((p for p in own if p.spec.batch == b), key=lambda p: p.speedup.value or 0) for b in batches]
            _speedup_line(axes, batches, best, name, colours)
        axes.set_xscale("log", base=2)
        _whole_numbers(axes, [p.spec.batch for p in inside])
        axes.set_title(_text(suite))
        axes.set_xlabel("batch")

    return Figure(
        "Speedup by batch for each suite: each drafter's best K at each batch, with 95 % intervals.",
        _svg("b", suites, panel, "speedup"),
    )


def _by_position(profiles: Sequence[Profile]) -> Figure:
    suites = _distinct(p.spec.suite for p in profiles)
    colours = _colours(profiles)

    def panel(axes: Axes, suite: str) -> None:
        inside = [p for p in profiles if p.spec.suite == suite]
        longest = 1
        for name in _distinct(_line_name(p) for p in inside):
            own = [p for p in inside if _line_name(p) == name]
            deep = min(own, key=lambda p: (-p.spec.k, p.spec.batch))
            values = [float("nan") if v is None else v for v in deep.acceptance.conditional_acceptance]
            longest = max(longest, deep.spec.k)
            axes.plot(range(1, len(values) + 1), values, label=_text(name), **colours[name])
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(_text(suite))
        _whole_numbers(axes, range(1, longest + 1))
        axes.set_xlabel("position in the draft")

    forced = any(p.spec.synthetic is not None for p in profiles)
    what, how = ("Synthetic acceptance", "Forced, not measured; shown") if forced else ("Acceptance", "Measured")
    return Figure(
        f"{what} by position: how often a drafted token is kept, given that all before it were. "
        f"{how} at each drafter's largest K and its smallest batch there.",
        _svg("p", suites, panel, "conditional acceptance"),
    )


def _speedup_line(
    axes: Axes, at: Sequence[int], own: Sequence[Profile], name: str, colours: dict[str, dict[str, Any]]
) -> None:
    nan = float("nan")
    values = [nan if p.speedup.value is None else p.speedup.value for p in own]
    axes.plot(at, values, label=_text(name), **colours[name])
    for x, p in zip(at, own, strict=True):
        if p.speedup.low is not None and p.speedup.high is not None:
            axes.vlines(x, p.speedup.low, p.speedup.high, color=colours[name]["color"], linewidth=1.2)
    axes.axhline(1, color=_INK, linewidth=0.8, linestyle="--")


def _svg(prefix: str, items: Sequence[Any], panel: Callable[[Axes, Any], None], ylabel: str) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    columns = min(_COLUMNS, len(items))
    rows = -(-len(items) // columns)
    figure = Canvas(figsize=(_PANEL[0] * columns, _PANEL[1] * rows + 0.4), layout="constrained")
    FigureCanvasSVG(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    for n, axes in enumerate(grid.flat):
        if n >= len(items):
            axes.set_visible(False)
            continue
        panel(axes, items[n])
        _style(axes)
        if n % columns == 0:
            axes.set_ylabel(ylabel)
    entries = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=min(4, len(entries)),
        frameon=False,
        labelcolor=_INK,
    )
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue(), prefix)


def _style(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)
    axes.tick_params(colors=_INK)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(_INK)
    axes.grid(alpha=0.25, linewidth=0.5)


def _whole_numbers(axes: Axes, values: Sequence[int]) -> None:
    ticks = sorted(set(values))
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()


def _inline(svg: str, prefix: str) -> str:
    """Cut what HTML does not need, and keep the ids of several figures apart."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg, count=2)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-").replace('href="#', f'href="#{prefix}-')
    return svg.replace(_INK, "currentColor")


def _colours(profiles: Sequence[Profile]) -> dict[str, dict[str, Any]]:
    names = _distinct(_line_name(p) for p in profiles)
    return {
        name: {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 4,
            "linewidth": 1.4,
        }
        for i, name in enumerate(names)
    }


def _line_name(p: Profile) -> str:
    return p.spec.drafter if p.spec.rule == "greedy" else f"{p.spec.drafter}, {p.spec.rule}"


def _text(name: str) -> str:
    """A name as matplotlib prints it literally: dollars start formulas there, and a leading underscore
    hides it from the legend."""
    short = visible(name if len(name) <= 40 else f"…{name[-39:]}").replace("\n", " ")
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def _distinct(items: Any) -> list[Any]:
    return list(dict.fromkeys(items))
