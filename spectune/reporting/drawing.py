"""Drawing charts with matplotlib, which is only imported here, and never its GUI side."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from spectune.reporting.chart import Figure, Numbers, Panel, Series
from spectune.reporting.format import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Okabe and Ito's order of hues, told apart by the colour-blind too; the page swaps each for its own light or dark one.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a5195", "#6b6b6b")
MARKERS = "osD^vP*X"
_INK = "#010203"  # stands for the page's own text colour, which depends on its light or dark scheme
_PLAIN_INK = "#1b1f24"  # in a file of its own
_POINT = 72.0  # per inch
_CHARACTER = 5.2 / _POINT  # inches, the mean width at the figures' 9 points


def unavailable() -> str | None:
    """Why nothing can be drawn, or None."""
    try:
        import matplotlib
        import matplotlib.figure  # noqa: F401
    except (ImportError, ValueError) as error:
        # ValueError: MPLBACKEND names a backend that matplotlib does not know.
        return f"Figures are left out: matplotlib cannot be used ({error})."
    return None


def inline(panel: Panel, prefix: str) -> str:
    """A panel as SVG inside HTML: inks and fonts come from the page, every point has its words as a title."""
    with _settings():
        canvas = _canvas(*_size(panel))
        axes = canvas.add_axes(_frame(panel))
        _draw(axes, panel)
        out = io.StringIO()
        canvas.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue(), panel, prefix)


def export(figure: Figure, kind: Literal["svg", "png"]) -> bytes:
    """A figure as a file of its own, with its title and legend."""
    with _settings():
        sizes = [_size(p) for p in figure.panels]
        columns = min(3, len(sizes))
        rows = -(-len(sizes) // columns)
        width, height = max(w for w, _ in sizes), max(h for _, h in sizes)
        whole = _canvas(width * columns, (height + 0.35) * rows + 0.8)
        whole.suptitle(_text(figure.title), fontsize=11)
        for n, panel in enumerate(figure.panels):
            row, column = divmod(n, columns)
            x, y, w, h = _frame(panel)
            total = (height + 0.35) * rows + 0.8
            bottom = total - 0.45 - (row + 1) * (height + 0.35) + (height - sizes[n][1])
            axes = whole.add_axes(
                (
                    (column * width + x * sizes[n][0]) / (width * columns),
                    (bottom + y * sizes[n][1] + 0.05) / total,
                    w * sizes[n][0] / (width * columns),
                    h * sizes[n][1] / total,
                )
            )
            _draw(axes, panel)
            axes.set_title(_text(panel.title, most=48), color=_INK, fontsize=9)
        if figure.legend:
            handles = [_handle(n) for n in range(len(figure.legend))]
            labels = [_text(name) for name in figure.legend]
            whole.legend(handles, labels, loc="lower center", ncols=min(4, len(labels)), frameon=False)
        out = io.BytesIO()
        plain = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        whole.savefig(out, format=kind, facecolor="white", metadata=plain, dpi=120)
    return out.getvalue().replace(_INK.encode(), _PLAIN_INK.encode())


def _size(panel: Panel) -> tuple[float, float]:
    """Inches."""
    if panel.kind == "rows":
        return 4.8, max(2.6, 0.24 * len(panel.y_ticks) + 0.8)
    return 3.9, 2.7


def _frame(panel: Panel) -> tuple[float, float, float, float]:
    """Left, bottom, width and height of the axes, as shares: no layout engine has to measure texts."""
    width, height = _size(panel)
    left = 0.55
    if panel.kind == "rows":
        left = min(2.2, 0.15 + _CHARACTER * max((len(_text(name)) for _, name in panel.y_ticks), default=1))
    bottom = 0.5
    return left / width, bottom / height, (width - left - 0.12) / width, (height - bottom - 0.12) / height


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    # hashsalt: equal runs give equal files
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "spectune", "font.size": 9}):
        yield


def _canvas(width: float, height: float) -> Canvas:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, height))
    FigureCanvasAgg(canvas)
    return canvas


def _draw(axes: Axes, panel: Panel) -> None:
    if panel.even:
        draw = axes.axvline if panel.kind == "rows" else axes.axhline
        draw(1, color=_INK, linewidth=0.8, linestyle="--")
    for n, series in enumerate(panel.series):
        if panel.kind == "bars":
            _bar(axes, series, n)
        else:
            _points(axes, series, panel, n)
    if panel.log_x:
        axes.set_xscale("log", base=2)
    if panel.share:
        axes.set_ylim(-0.03, 1.03)
    if panel.kind == "bars":
        axes.set_ylim(0, 1.1 * max(v for s in panel.series for v in s.high if v is not None))
        axes.tick_params(axis="x", labelsize=7.5)
    if panel.kind == "rows":
        axes.set_ylim(len(panel.y_ticks) - 0.4, -0.6)
    if panel.diagonal:
        ends = [v for s in panel.series for v in (*s.x, *s.y) if v is not None]
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=_INK, linewidth=0.8, linestyle="--")
    if panel.x_ticks:
        axes.set_xticks([v for v, _ in panel.x_ticks], [_text(t, lines=True) for _, t in panel.x_ticks])
        axes.minorticks_off()
    if panel.y_ticks:
        axes.set_yticks([v for v, _ in panel.y_ticks], [_text(t) for _, t in panel.y_ticks])
    axes.set_xlabel(panel.x_label, labelpad=2)
    axes.set_ylabel(panel.y_label, labelpad=2)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
        spine.set_linewidth(0.6)
    axes.tick_params(which="both", left=False, bottom=False, labelcolor=_INK, pad=2)
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_color(_INK)
    _labels(axes, panel)
    axes.grid(alpha=0.2, linewidth=0.5, color=_INK)
    axes.set_axisbelow(True)


def _points(axes: Axes, series: Series, panel: Panel, n: int) -> None:
    style = _style(series.style)
    places = _apart(panel, n)
    if panel.kind == "lines":
        axes.plot(_gaps(places), _gaps(series.y), color=style["color"], linewidth=1.1, alpha=0.7)
    for low, high, x, y in zip(series.low, series.high, places, series.y, strict=False):
        if low is not None and high is not None and x is not None and y is not None:
            span = ([x, x], [low, high]) if panel.kind == "lines" else ([low, high], [y, y])
            axes.plot(*span, color=style["color"], linewidth=1.1)
    known = [(x, y) for x, y in zip(places, series.y, strict=True) if x is not None and y is not None]
    (line,) = axes.plot([x for x, _ in known], [y for _, y in known], linestyle="none", markersize=4.5, **style)
    line.set_gid(f"tips-{n}")


def _apart(panel: Panel, n: int) -> Numbers:
    """Where the points of a series are drawn: beside those of the others, so that their intervals do not overlap."""
    series = panel.series[n]
    if panel.kind != "lines" or not series.low:
        return series.x
    known = [x for s in panel.series for x in s.x if x is not None]
    step = 0.1 / max(8, len(panel.series)) * (n - (len(panel.series) - 1) / 2)
    if panel.log_x:
        return tuple(None if x is None else x * (max(known) / min(known)) ** step for x in series.x)
    return tuple(None if x is None else x + (max(known) - min(known)) * step for x in series.x)


def _labels(axes: Axes, panel: Panel) -> None:
    """Labels beside their points: one is left out where it would cover another point or label, or leave the axes."""
    _, _, width, height = _frame(panel)
    inches = width * _size(panel)[0], height * _size(panel)[1]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()

    def along(x: float) -> float:
        share = (math.log(x / left) / math.log(right / left)) if panel.log_x else (x - left) / (right - left)
        return share * inches[0]

    def box(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        """Left, right, bottom and top in inches of something of w by h inches that begins at a point."""
        at, up = along(x), (y - low) / (high - low) * inches[1]
        return at, at + w, up - h / 2, up + h / 2

    found = [
        (x, y, label, s)
        for s in panel.series
        for x, y, label in zip(s.x, s.y, s.labels, strict=False)
        if x is not None and y is not None
    ]
    if panel.kind == "bars":
        for x, y, label, s in found:
            falls = s.style == 1
            axes.annotate(
                label,
                (x, y),
                xytext=(0, -2 if falls else 2),
                textcoords="offset points",
                ha="center",
                va="top" if falls else "bottom",
                fontsize=6.5,
                color=_INK,
            )
        return
    taken = [box(x, y, 0.0, 0.05) for x, y, _, _ in found]
    for x, y, label, _ in found:
        own = _text(label)
        a, b, c, d = box(x, y, _CHARACTER * 0.72 * len(own) + 0.1, 0.09)
        before = b > inches[0]
        if before:
            a, b = a - (b - a), a
        if a < 0 or any(a + 0.04 < q and p < b - 0.04 and c < s and r < d for p, q, r, s in taken):
            continue
        taken.append((a, b, c, d))
        axes.annotate(
            own,
            (x, y),
            xytext=(-4 if before else 4, 0),
            textcoords="offset points",
            ha="right" if before else "left",
            va="center",
            fontsize=6.5,
            color=_INK,
        )


def _gaps(values: Numbers) -> list[float]:
    """A line breaks at NaN."""
    return [math.nan if v is None else v for v in values]


def _bar(axes: Axes, series: Series, n: int) -> None:
    (x,), (low,), (high,) = series.x, series.low, series.high
    if x is None or low is None or high is None:
        return
    colour = COLOURS[(0, 1, 2)[series.style]]
    bars = axes.bar([x], [high - low], bottom=[low], width=0.7, color=colour, linewidth=0)
    bars[0].set_gid(f"tips-{n}")


def _style(n: int) -> dict[str, Any]:
    """Colour and marker: the second eight have other markers."""
    return {
        "color": COLOURS[n % len(COLOURS)],
        "marker": MARKERS[(n + n // len(COLOURS)) % len(MARKERS)],
        "markeredgewidth": 0,
    }


def _handle(n: int) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], markersize=5, linewidth=1.3, **_style(n))


def _inline(svg: str, panel: Panel, prefix: str) -> str:
    """Cut what HTML does not need, round coordinates, add the words, and keep the ids of several figures apart."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<clipPath.*?</clipPath>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' clip-path="[^"]*"', "", svg)
    for n, series in enumerate(panel.series):
        svg = _with_tips(svg, f'id="tips-{n}"', _drawn_tips(series))
    svg = re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], prefix), svg)
    svg = re.sub(r">\s+<", "><", svg).replace("<g></g>", "")
    title, words = escape(panel.title), escape(visible(panel.description))
    box = re.search(r'viewBox="([^"]*)"', svg)
    head = (
        f'<svg viewBox="{box[1] if box else ""}" role="img" aria-labelledby="{prefix}-t {prefix}-d" '
        f'style="max-width:{_size(panel)[0] * _POINT * 1.35:.0f}px">'
        f'<title id="{prefix}-t">{title}</title><desc id="{prefix}-d">{words}</desc>'
    )
    return head + svg[svg.index(">") + 1 :].strip()


def _drawn_tips(series: Series) -> list[str]:
    points = zip(series.x, series.y, series.tips, strict=True)
    return [tip for x, y, tip in points if x is not None and y is not None]


def _with_tips(svg: str, mark: str, tips: list[str]) -> str:
    """Each point that follows the mark, in a group with its words as a title."""
    start = svg.find(mark)
    if start < 0:
        return svg
    parts, at = [], start
    for tip in tips:
        found = re.compile(r"<use [^>]*/>|<path [^>]*/>(?=\s*</g>)").search(svg, at)
        if found is None:
            break
        parts += [svg[at : found.start()], f"<g class=p><title>{escape(visible(tip))}</title>", found[0], "</g>"]
        at = found.end()
    return svg[:start] + "".join(parts) + svg[at:]


def _tag(tag: str, prefix: str) -> str:
    """A tag without what is not needed, and with the page's inks. Texts between tags stay as they are."""
    tag = re.sub(r' id="(?![mp][0-9a-f]{6,}")[^"]*"', "", tag)
    tag = re.sub(r"\d+\.\d{2,}", lambda m: f"{float(m[0]):.1f}".rstrip("0").rstrip("."), tag)
    tag = re.sub(r' transform="rotate\(-?0 [^"]*"', "", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?|stroke-linecap: square;? ?|stroke-linejoin: \w+;? ?", "", tag)
    tag = re.sub(r"\s+", " ", tag).replace(' style=""', "")
    tag = tag.replace(' id="', f' id="{prefix}-').replace('xlink:href="#', f'href="#{prefix}-')
    for n, colour in enumerate(COLOURS):
        tag = tag.replace(colour, f"var(--s{n})")
    return tag.replace(_INK, "currentColor")


def _text(name: str, *, lines: bool = False, most: int = 30) -> str:
    """A name as matplotlib prints it literally: dollars start formulas there."""
    short = visible(name if len(name) <= most else f"…{name[1 - most :]}")
    return (short if lines else short.replace("\n", " ")).replace("$", r"\$")
