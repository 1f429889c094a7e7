"""A report's charts: exponent histograms beside the format's range, error along the program."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from .._run._equation_statistics import Equations, EquationStatistics
from .._run._statistics import BINS, LOWEST
from ._summary import Summary

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 120, 42, 18
PLOT = HEIGHT - BOTTOM
ARGUMENTS = 8  # with a histogram each: weights, moments, data
TICKS = 10  # at most, on an axis
NARROWEST = 16  # binades of a histogram's axis
LOWEST_ERROR = -12  # the smallest error drawn is 1e-12

Axis = tuple[int, int]  # the lowest exponent, and the first one beyond the highest


def panels(report: Summary) -> list[tuple[str, Markup]]:
    """Returns titles and SVG charts; the charts contain numbers only, and need no escaping."""
    counts = [(f"argument {name}", x) for name, x in report.ranges[:ARGUMENTS] if any(x)]
    for title, equations in _by_direction(report.equations):
        sums = tuple(sum(e.histogram[i] for e in equations) for i in range(BINS))
        if any(sums):
            counts.append((title, sums))
    axis = axis_of([x for _, x in counts])
    found = [(title, histogram(x, report, axis)) for title, x in counts]
    title = "relative error of each operation in program order (made here and carried in)"
    return [*found, (title, growth(report.equations, 2.0**-report.precision))]


def legend(report: Summary) -> list[tuple[str, str]]:
    beyond = "saturation" if report.low.endswith("saturating") else "overflow"
    smallest, normal = _power(report.smallest / 2), _power(report.smallest_normal)
    return [
        ("bar", "numbers, error"),
        ("flushed", f"flushed to zero (up to {smallest})"),
        ("subnormal", f"subnormal (below {normal})"),
        ("normal", "normal"),
        ("over", f"{beyond} (beyond {_power(report.largest)}), NaN"),
        ("unit", "one rounding"),
    ]


def _power(x: float) -> str:
    return f"2^{math.log2(x):.2f}".rstrip("0").rstrip(".")


def _by_direction(equations: Equations) -> list[tuple[str, list[EquationStatistics]]]:
    names = {
        "forward": "activations (results of the forward pass)",
        "backward": "gradients (results of the backward pass)",
        "optimizer": "updates (results of the optimizer)",
    }
    return [(title, [e for e in equations if e.direction == key]) for key, title in names.items()]


def axis_of(histograms: Sequence[Sequence[int]]) -> Axis:
    used = [i for counts in histograms for i, n in enumerate(counts) if n] or [-LOWEST]
    low, high = min(used) + LOWEST - 1, max(used) + LOWEST + 2
    missing = max(NARROWEST - (high - low), 0)
    return low - missing // 2, high + missing - missing // 2


def histogram(counts: Sequence[int], report: Summary, axis: Axis) -> Markup:
    """Returns bars over log2 |x|; flushed, subnormal, normal and overflowing ranges are shaded."""
    low, high = axis
    bar, top = WIDTH / (high - low), max(counts)

    def x(value: float) -> float:
        exponent = math.log2(value) - low if value > 0 else 0.0
        return min(max(exponent * bar, 0.0), WIDTH)

    edges = [0.0, x(report.smallest / 2), x(report.smallest_normal), x(report.largest), WIDTH]
    classes = ("flushed", "subnormal", "normal", "over")
    parts = [
        f'<rect class="{c}" x="{a:.1f}" y="0" width="{b - a:.1f}" height="{PLOT}"/>'
        for c, a, b in zip(classes, edges, edges[1:], strict=False)
        if b > a
    ]
    for i, n in enumerate(counts):
        if n:
            h = max((PLOT - 4) * math.log1p(n) / math.log1p(top), 1)
            parts.append(
                f'<rect class="bar" x="{(i + LOWEST - low) * bar:.1f}" y="{PLOT - h:.1f}" '
                f'width="{bar * 0.85:.1f}" height="{h:.1f}">'
                f"<title>2^{i + LOWEST}: {n}</title></rect>"
            )
    step = _step(high - low)
    for exponent in range(-(-low // step) * step, high, step):
        at = (exponent - low) * bar
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 4}">2^{exponent}</text>')
    return _svg(parts)


def growth(equations: Equations, unit: float) -> Markup:
    """A dashed line is one rounding; red lines are operations whose results overflow or are NaN."""
    errors = [e.inherited if e.sqnr > -math.inf else math.inf for e in equations]
    drawn = [x for x in errors if 0 < x < math.inf]
    exponents = [max(math.log10(x), LOWEST_ERROR) for x in (*drawn, unit)]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    high = max(high, low + 1)

    def y(error: float) -> float:
        exponent = math.log10(error) if error > 0 else low
        return PLOT * (1 - min(max((exponent - low) / (high - low), 0.0), 1.0))

    def x(i: int) -> float:
        return LEFT + (WIDTH - LEFT) * i / max(len(equations) - 1, 1)

    parts = []
    for exponent in range(low, high + 1, _step(high - low)):
        at = y(10.0**exponent)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="0" y="{max(at + 4, 9):.1f}">1e{exponent}</text>')
    for i, equation in enumerate(equations):
        if equation["overflowed"] or equation["nan"]:
            at = f'x1="{x(i):.1f}" x2="{x(i):.1f}"'
            parts.append(f'<line class="event" {at} y1="0" y2="{PLOT}"/>')
    line = f'x1="{LEFT}" x2="{WIDTH}" y1="{y(unit):.1f}" y2="{y(unit):.1f}"'
    parts.append(f'<line class="unit" {line}/>')
    points = " ".join(f"{x(i):.1f},{y(e):.1f}" for i, e in enumerate(errors))
    parts.append(f'<polyline points="{points}"/>')
    for i in range(0, len(equations), _step(len(equations))):
        parts.append(f'<text x="{min(x(i), WIDTH - 30):.1f}" y="{HEIGHT - 4}">{i + 1}</text>')
    return _svg(parts)


def _step(size: int) -> int:
    """Returns 1, 2, 5, 10, 20, ...: the distance of at most TICKS ticks."""
    return next(m * 10**k for k in range(12) for m in (1, 2, 5) if m * 10**k * TICKS >= size)


def _svg(parts: Sequence[str]) -> Markup:
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>')
