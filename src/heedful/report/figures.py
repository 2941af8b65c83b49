"""Draws curves and distributions as inline SVG that follows the page's colours, light or dark.

matplotlib has no CSS variables, so it draws with stand-in colours that are swapped for variables afterwards.
No text of a run is ever drawn: titles and names belong to the page, where they are escaped.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_POINTS = 400
SMOOTH_FROM = 60
"""Curves with more points than this are drawn pale with their moving average on top."""

_INK, _LINE = "#010203", "#010204"
_SERIES = ("#010205", "#010206", "#010207")
_VARIABLES = {_INK: "--muted", _LINE: "--line", **{c: f"--series-{i}" for i, c in enumerate(_SERIES, start=1)}}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the page's own font
    "svg.hashsalt": "heedful",  # ids must not differ from one writing to the next
    "font.size": 9.5,
    "text.color": _INK,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.5,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.useoffset": False,
}


class Series(NamedTuple):
    """One curve; values that are None leave a gap."""

    steps: Sequence[int]
    values: Sequence[float | None]


def curves(series: Sequence[Series], *, ident: str, guide: float | None = None) -> str:
    """Values over steps.

    Args:
        series: up to three curves, coloured ``--series-1`` to ``--series-3``.
        ident: a word that is unique on the page; keeps the ids of figures apart.
        guide: a dashed horizontal line, at chance level for example.
    """

    def draw(axes: Any) -> None:
        for colour, one in zip(_SERIES, series):
            x = np.asarray(one.steps, dtype=float)
            y = np.asarray([np.nan if v is None else v for v in one.values], dtype=float)
            x, y = _thin(x, y)
            if len(x) > SMOOTH_FROM:
                axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.3)
                axes.plot(x, _smooth(y), color=colour, linewidth=1.6)
            else:
                axes.plot(x, y, color=colour, linewidth=1.6, marker="o" if len(x) <= 12 else None, markersize=3)
        if guide is not None:
            axes.axhline(guide, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
        axes.yaxis.get_major_locator().set_params(nbins=5)
        axes.set_xlabel("step")

    return _render(draw, ident)


def distributions(shapes: Sequence[tuple[Sequence[float], Sequence[int]]], *, ident: str) -> str:
    """Outlines of up to three histograms given as (edges, counts), on common bins, each scaled to its own peak."""

    def draw(axes: Any) -> None:
        low, high = _middle(shapes)
        num_values = max(sum(counts) for _, counts in shapes)
        grid = np.linspace(low, high, int(np.clip(2 * num_values ** (1 / 3), 10, 40)) + 1)
        for colour, (edges, counts) in zip(_SERIES, shapes):
            height = _rebin(edges, counts, grid)
            height = height / max(height.max(), 1e-12)
            axes.stairs(height, grid, color=colour, alpha=0.12, fill=True)
            axes.stairs(height, grid, color=colour, linewidth=1.4)
        axes.set_xlim(low, high)
        axes.set_ylim(0, 1.05)
        axes.set_yticks([])
        axes.xaxis.get_major_locator().set_params(nbins=6)

    return _render(draw, ident)


class Point(NamedTuple):
    """A measured value with its interval."""

    x: float
    value: float
    low: float
    high: float


def intervals(points: Sequence[Point], *, ident: str, x_label: str, diagonal: bool = False) -> str:
    """Values with intervals over x.

    Args:
        diagonal: both axes are fractions from ½ to 1, with a dashed line where they are equal.
    """

    def draw(axes: Any) -> None:
        x, y = np.asarray([p.x for p in points]), np.asarray([p.value for p in points])
        spans = np.asarray([[max(p.value - p.low, 0.0), max(p.high - p.value, 0.0)] for p in points]).T
        axes.errorbar(x, y, yerr=spans, color=_SERIES[0], linewidth=1.2, marker="o", markersize=4)
        if diagonal:
            axes.plot([0.5, 1.0], [0.5, 1.0], color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.set_xlim(0.49, 1.01)
            axes.set_ylim(min(0.49, float((y - spans[0]).min()) - 0.02), 1.01)
        axes.xaxis.get_major_locator().set_params(nbins=6)
        axes.yaxis.get_major_locator().set_params(nbins=6)
        axes.set_xlabel(x_label)

    return _render(draw, ident)


def _rebin(edges: Sequence[float], counts: Sequence[int], grid: np.ndarray) -> np.ndarray:
    """The counts on other bins, taking each old bin as evenly filled."""
    cumulative = np.concatenate([[0.0], np.cumsum(counts)])
    return np.diff(np.interp(grid, edges, cumulative))


def _middle(shapes: Sequence[tuple[Sequence[float], Sequence[int]]]) -> tuple[float, float]:
    """The range to show: the inner bins of all shapes. The outermost ones may reach very far for few values."""
    lows = [edges[1] if len(edges) > 4 else edges[0] for edges, _ in shapes]
    highs = [edges[-2] if len(edges) > 4 else edges[-1] for edges, _ in shapes]
    low, high = min(lows), max(highs)
    margin = 0.04 * (high - low)
    return low - margin, high + margin


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MAX_POINTS points, each the mean of a stretch."""
    if len(x) <= MAX_POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), MAX_POINTS)
    return np.array([x[p].mean() for p in parts]), np.array([_mean(y[p]) for p in parts])


def _smooth(y: np.ndarray) -> np.ndarray:
    """A centred moving mean over a twentieth of the curve."""
    half = max(len(y) // 40, 1)
    return np.array([_mean(y[max(i - half, 0) : i + half + 1]) for i in range(len(y))])


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def _render(draw: Any, ident: str) -> str:
    # Imported here: collecting a report needs no matplotlib. No pyplot: it keeps state and looks for a display.
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.2, 2.35), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        buffer = io.StringIO()
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _embed(buffer.getvalue(), ident)


def _embed(svg: str, ident: str) -> str:
    """The bare <svg> element: stand-in colours become variables, fonts those of the page, ids unique."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    opening, _, rest = svg.partition(">")
    box = re.search(r'viewBox="[^"]+"', opening)
    svg = f'<svg {box.group() if box else ""} role="img" aria-hidden="true">{rest}'
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", svg)
    svg = re.sub(r'id="([^"]+)"', rf'id="{ident}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{ident}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{ident}-\1)", svg)
    return re.sub(r"\n\s*", "\n", svg).strip()
