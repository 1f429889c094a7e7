"""Charts of curves, as SVG."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40
LONG_NAME = 26  # letters of a name in the legend, of which three don't fit side by side
COLOURS = 6  # Okabe and Ito's palette, which colour-blind readers can distinguish
STYLE = """
.chart { font: 13px system-ui, sans-serif }
.chart text { fill: #222 } .chart .axis { stroke: #ccc; stroke-width: 1 }
.chart path { fill: none; stroke-width: 2; stroke-linejoin: round }
.chart .c0 { stroke: #555 } .chart .c1 { stroke: #d55e00 } .chart .c2 { stroke: #0072b2 }
.chart .c3 { stroke: #009e73 } .chart .c4 { stroke: #cc79a7 } .chart .c5 { stroke: #e69f00 }
@media (prefers-color-scheme: dark) {
  .chart text { fill: #ddd } .chart .axis { stroke: #444 }
  .chart .c0 { stroke: #bbb } .chart .c2 { stroke: #56b4e9 }
}
"""
Points = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Curves over one pair of axes; a curve that ends in NaN ends with a cross."""

    title: str
    unit: str  # below the horizontal axis
    curves: Sequence[Points]  # with a gap where y isn't finite

    @functools.cached_property
    def ends(self) -> tuple[float, float, float, float]:
        """The smallest and the largest x, the lower and the upper end of the vertical axis."""
        points = [p for some in self.curves for p in some]
        ys = [y for _, y in points if math.isfinite(y)] or [0.0, 1.0]
        low, high = min(ys), max(ys)
        if low == high:
            low, high = low - 0.5, high + 0.5
        xs = [x for x, _ in points]
        return min(xs), max(xs), low, high

    def at(self, x: float, y: float) -> tuple[float, float]:
        left, right, low, high = self.ends
        across, down = (x - left) / ((right - left) or 1), (high - y) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        left, right, low, _ = self.ends
        found = ticks(left, right)
        if all(isinstance(x, int) for x in (left, right)):
            found = [tick for tick in found if tick == int(tick)]
        return [(self.at(tick, low)[0], f"{tick:g}") for tick in found]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        left, _, low, high = self.ends
        return [(self.at(left, tick)[1], f"{tick:g}") for tick in ticks(low, high)]

    def path(self, curve: Points) -> str:
        """Returns SVG path data with gaps for non-finite values, dots for single values."""
        pieces, pen = [], "M"
        for x, y in curve:
            if math.isfinite(y):
                x, y = self.at(x, y)
                pieces.append(f"{pen}{x:.1f} {y:.1f}" + ("h.1" if pen == "M" else ""))
            pen = "L" if math.isfinite(y) else "M"
        return "".join(pieces)

    @property
    def longest_first(self) -> list[tuple[int, Points]]:
        """The curves with their indices, so that one that ends early isn't hidden."""
        return sorted(enumerate(self.curves), key=lambda x: -len(_finite(x[1])))

    def cross(self, curve: Points) -> str:
        """Returns SVG path data of a cross at the end of a curve that goes on without numbers."""
        finite = _finite(curve)
        if not finite or finite[-1] == curve[-1]:
            return ""
        x, y = self.at(*finite[-1])
        return f"M{x - 7:.1f} {y - 7:.1f}l14 14m0-14l-14 14"


def _finite(curve: Points) -> Points:
    return [(x, y) for x, y in curve if math.isfinite(y)]


def chart_svg(title: str, panels: Sequence[Panel], legend: Sequence[str] = ()) -> str:
    """Returns panels below each other, and below them the names of the curves."""
    from ._templates import Pages  # imports jinja2, which takes 0.1 s: not for --help

    return (
        Pages(__package__ or "")
        .get_template("chart.svg.j2")
        .render(
            title=title, panels=panels, legend=legend, style=STYLE, colours=COLOURS,
            width=WIDTH, height=HEIGHT, left=LEFT, right=RIGHT, bottom=BOTTOM,
            columns=3 if max(map(len, legend), default=0) < LONG_NAME else 2,
        )
    )  # fmt: skip


def ticks(low: float, high: float) -> list[float]:
    """Returns four to eight round numbers from low to high."""
    span = high - low
    if not span > 0:
        return [low]
    base = 10.0 ** math.floor(math.log10(span))
    # spans of 1 to 10 bases: the smallest of these steps that leaves at most eight ticks
    step = next(base * s for s in (0.1, 0.2, 0.5, 1.0, 2.0) if span / (base * s) <= 7)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step) + 1)]
