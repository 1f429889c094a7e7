"""A report's charts: exponent histograms beside the format's range, error along the program."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from .._run._equation_statistics import Equations, EquationStatistics
from .._run._statistics import BINS, LOWEST
from ._summary import Summary

WIDTH, HEIGHT = 640, 110
ARGUMENTS = 8  # with a histogram each: weights, moments, data


def panels(report: Summary) -> list[tuple[str, Markup]]:
    """Returns titles and SVG charts; the charts contain numbers only, and need no escaping."""
    found = [
        (f"argument {name}", histogram(counts, report))
        for name, counts in report.ranges[:ARGUMENTS]
        if any(counts)
    ]
    for title, equations in _by_direction(report.equations):
        counts = [sum(e.histogram[i] for e in equations) for i in range(BINS)]
        if any(counts):
            found.append((title, histogram(counts, report)))
    title = "error along the program: made here and carried in, against the reference run"
    found.append((title, growth(report.equations)))
    return found


def _by_direction(equations: Equations) -> list[tuple[str, list[EquationStatistics]]]:
    names = {
        "forward": "activations (results of the forward pass)",
        "backward": "gradients (results of the backward pass)",
        "optimizer": "updates (results of the optimizer)",
    }
    return [(title, [e for e in equations if e.direction == key]) for key, title in names.items()]


def histogram(counts: Sequence[int], report: Summary) -> Markup:
    """Returns bars over log2 |x|; flushed, subnormal, normal and overflowing ranges are shaded."""
    top = max(counts)
    bar = WIDTH / BINS

    def x(value: float) -> float:
        exponent = math.log2(value) - LOWEST if value > 0 else 0.0
        return min(max(exponent, 0.0), BINS) * bar

    edges = [0.0, x(report.smallest / 2), x(report.smallest_normal), x(report.largest), WIDTH]
    classes = ("flushed", "subnormal", "normal", "over")
    parts = [
        f'<rect class="{c}" x="{a:.1f}" y="0" width="{max(b - a, 0):.1f}" height="{HEIGHT - 18}"/>'
        for c, a, b in zip(classes, edges, edges[1:], strict=False)
    ]
    for i, n in enumerate(counts):
        if n:
            h = max((HEIGHT - 22) * math.log1p(n) / math.log1p(top), 1)
            y = HEIGHT - 18 - h
            parts.append(
                f'<rect class="bar" x="{i * bar:.1f}" y="{y:.1f}" width="{bar * 0.85:.1f}" '
                f'height="{h:.1f}"><title>2^{i + LOWEST}: {n}</title></rect>'
            )
    for exponent in range(LOWEST, LOWEST + BINS, 16):
        at = (exponent - LOWEST) * bar
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 4}">2^{exponent}</text>')
    return _svg(parts)


def growth(equations: Equations) -> Markup:
    """Returns the error against the reference run operation by operation, from 2^-30 to 2^4."""
    points = []
    for i, equation in enumerate(equations):
        error = min(max(equation.inherited, 2.0**-30), 2.0**4)
        x = WIDTH * i / max(len(equations) - 1, 1)
        y = (HEIGHT - 18) * (4 - math.log2(error)) / 34
        points.append(f"{x:.1f},{y:.1f}")
    parts = [f'<polyline points="{" ".join(points)}"/>']
    parts.append(f'<text x="0" y="{HEIGHT - 4}">first operation</text>')
    parts.append(f'<text x="{WIDTH - 90}" y="{HEIGHT - 4}">last operation</text>')
    return _svg(parts)


def _svg(parts: Sequence[str]) -> Markup:
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>')
