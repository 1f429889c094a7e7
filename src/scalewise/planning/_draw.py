"""Draws a Pareto front as SVG: cost against error, both as people read them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape

from .._output import visible
from ..training._compare._curves import ticks

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 34, 44


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """A plan that none beats in both cost and predicted error; ``measured`` is None if not run."""

    cost: float
    predicted: float
    measured: float | None


def front_svg(
    front: Sequence[FrontPoint], chosen: tuple[float, float], unit: str, title: str
) -> str:
    """Returns the predicted front as a line, runs as dots, and the chosen plan as a ring. The
    error's axis is logarithmic; errors that aren't positive (a loss that fell) are left out."""
    runs = [(p.cost, abs(p.measured)) for p in front if p.measured]
    line = [(p.cost, abs(p.predicted)) for p in front if p.predicted]
    ring = [(chosen[0], abs(chosen[1]))] if chosen[1] else []
    points = [*runs, *line, *ring]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [math.log10(y) for _, y in points]
    x0, x1, y0, y1 = min(xs), max(xs), math.floor(min(ys)), math.ceil(max(ys))
    y1 = max(y1, y0 + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / max(x1 - x0, 1e-300)
        up = (math.log10(y) - y0) / (y1 - y0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (
            HEIGHT - TOP - BOTTOM
        )

    parts = [
        f'<svg class="front" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}"><title>{escape(visible(title))}</title>',
        f'<text x="{LEFT}" y="20" class="title">{escape(visible(title))}</text>',
    ]
    for exponent in range(y0, y1 + 1):
        y = at(x0, 10.0**exponent)[1]
        parts.append(f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y:.1f}" dy="4" class="end">1e{exponent}</text>')
    for tick in ticks(x0, x1):
        x = at(tick, 10.0**y0)[0]
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" class="middle">{tick:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" class="end">{escape(unit)}</text>')
    path = "L".join("{:.1f} {:.1f}".format(*at(*p)) for p in line)
    parts.append(f'<path class="line" d="M{path}"/>')
    for kind, some, size in (("run", runs, 3), ("chosen", ring, 7)):
        for p in some:
            parts.append(
                '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"/>'.format(kind, *at(*p), size)
            )
    return "\n".join([*parts, "</svg>"])
