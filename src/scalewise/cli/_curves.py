"""Curves over the steps of a training, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._output import page_environment

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40
LONG_NAME = 26  # letters of a name in the legend, of which three don't fit side by side


def curves_svg(
    title: str, panels: Mapping[str, Sequence[Sequence[float]]], legend: Sequence[str]
) -> str:
    """Returns panels, by their titles, below each other, and below them the names of the curves."""
    return (
        page_environment("scalewise.cli").get_template("curves.svg.j2").render(
            title=title, panels=[panel(*each) for each in panels.items()], legend=legend,
            width=WIDTH, height=HEIGHT, left=LEFT, right=RIGHT, bottom=BOTTOM,
            columns=3 if max(map(len, legend)) < LONG_NAME else 2,
        )
    )  # fmt: skip


def panel(title: str, curves: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns ticks and SVG path data of curves, which have gaps where they aren't finite.

    A curve that ends there ends with a cross. The longest is drawn first and hides no other.
    """
    finite = [[i for i, y in enumerate(curve) if math.isfinite(y)] for curve in curves]
    ys = [curve[i] for curve, at in zip(curves, finite, strict=True) for i in at] or [0.0, 1.0]
    low, high, last = min(ys), max(ys), max(map(len, curves))
    low, high = (low, high) if low < high else (low - 0.5, high + 0.5)

    def x(step: float) -> float:
        return LEFT + (step - 1) / (last - 1 or 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(curve: Sequence[float], at: Sequence[int]) -> str:
        first = [i == 0 or not math.isfinite(curve[i - 1]) for i in at]
        steps = [(x(i + 1), y(curve[i])) for i in at]
        drawn = [
            f"{'LM'[start]}{across:.1f} {down:.1f}{'h.1' * start}"
            for start, (across, down) in zip(first, steps, strict=True)
        ]
        if at and at[-1] < len(curve) - 1:
            drawn.append("M{:.1f} {:.1f}l14 14m0-14l-14 14".format(*(z - 7 for z in steps[-1])))
        return "".join(drawn)

    order = sorted(range(len(curves)), key=lambda i: -len(finite[i]))
    return {
        "title": title, "paths": [(i, path(curves[i], finite[i])) for i in order],
        "x_ticks": [(x(step), f"{step:g}") for step in ticks(1, last) if step == int(step)],
        "y_ticks": [(y(value), f"{value:g}") for value in ticks(low, high)],
    }  # fmt: skip


def ticks(low: float, high: float) -> list[float]:
    """Returns four to eight round numbers from low to high."""
    span = high - low or 1.0
    base = 10.0 ** math.floor(math.log10(span))
    # spans of 1 to 10 bases: the smallest of these steps that leaves at most eight ticks
    step = next(base * s for s in (0.1, 0.2, 0.5, 1.0, 2.0) if span / (base * s) <= 7)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
