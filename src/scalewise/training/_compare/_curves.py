"""Draws loss curves as a self-contained SVG file with a light and a dark theme."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..._output import visible
from ._results import Comparison, Record, smoothed

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40
SMOOTHING = 25  # steps

# Okabe and Ito's palette, which colour-blind readers can distinguish
STYLE = """
.curves { font: 13px system-ui, sans-serif }
.curves text { fill: #222 } .curves .axis { stroke: #ccc; stroke-width: 1 }
.curves path { fill: none; stroke-width: 2; stroke-linejoin: round }
.curves .c0 { stroke: #555 } .curves .c1 { stroke: #d55e00 } .curves .c2 { stroke: #0072b2 }
.curves .c3 { stroke: #009e73 } .curves .c4 { stroke: #cc79a7 } .curves .c5 { stroke: #e69f00 }
@media (prefers-color-scheme: dark) {
  .curves text { fill: #ddd } .curves .axis { stroke: #444 }
  .curves .c0 { stroke: #bbb } .curves .c2 { stroke: #56b4e9 }
}
"""
COLOURS = 6


@dataclass(frozen=True)
class Frame:
    top: int
    steps: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (step - 1) / max(self.steps - 1, 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inner = HEIGHT - TOP - BOTTOM
        return self.top + TOP + (self.high - value) / (self.high - self.low) * inner


def curves_svg(comparison: Comparison) -> str:
    """Draws two panels: smoothed losses, and their relative differences from the reference."""
    records = comparison.records
    losses = [smoothed(r.losses, SMOOTHING) for r in records]
    reference = losses[records.index(comparison.reference)]
    apart = [
        [100 * (a / b - 1) if b else math.nan for a, b in zip(ys, reference, strict=True)]
        for ys in losses
    ]
    panels = [_panel(losses, 0, f"training loss, mean of the last {SMOOTHING} steps")]
    if len(records) > 1:
        title = f"difference of that to {comparison.reference.name}, %"
        panels.append(_panel(apart, HEIGHT, title))
    return _figure("Loss curves", panels, records)


def scales_svg(records: Sequence[Record]) -> str:
    """Draws one panel: the exponent of each loss scale over the steps."""
    exponents = [[math.log2(x) for x in r.scales] for r in records]
    return _figure("Loss scales", [_panel(exponents, 0, "loss scale, exponent of two")], records)


def _figure(title: str, panels: Sequence[str], records: Sequence[Record]) -> str:
    top = HEIGHT * len(panels)
    head = (
        f'<svg class="curves" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {WIDTH} {top + 24 * ((len(records) + 2) // 3)}">'
        f"<title>{title}</title><style>{STYLE}</style>"
    )
    return "\n".join([head, *panels, _legend(records, top), "</svg>"])


def _panel(curves: Sequence[Sequence[float]], top: int, title: str) -> str:
    values = [y for ys in curves for y in ys if math.isfinite(y)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    steps = max(map(len, curves))
    frame = Frame(top, steps, low, high)
    parts = [f'<text x="{LEFT}" y="{top + 20}" font-weight="600">{escape(visible(title))}</text>']
    for tick in ticks(low, high):
        y = f"{frame.y(tick):.1f}"
        parts.append(f'<path class="axis" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{tick:g}</text>')
    bottom = top + HEIGHT - BOTTOM
    for tick in ticks(1, steps):
        if tick >= 1 and tick == int(tick):
            x = f"{frame.x(tick):.1f}"
            parts.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{int(tick)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 34}" text-anchor="end">step</text>')
    for index, ys in enumerate(curves):
        parts.append(f'<path class="c{index % COLOURS}" d="{_path(ys, frame)}"/>')
    return "\n".join(parts)


def _path(ys: Sequence[float], frame: Frame) -> str:
    """Returns SVG path data with gaps for non-finite values, dots for single values."""
    pieces, pen = [], "M"
    for step, y in enumerate(ys, start=1):
        if not math.isfinite(y):
            pen = "M"
            continue
        x, y = frame.x(step), frame.y(y)
        pieces.append(f"{pen}{x:.1f} {y:.1f}" + ("h.1" if pen == "M" else ""))
        pen = "L"
    return "".join(pieces)


def _legend(records: Sequence[Record], top: int) -> str:
    parts = []
    for index, record in enumerate(records):
        x = LEFT + index % 3 * 220
        y = top + 12 + 24 * (index // 3)
        note = " (diverged)" if record.divergence and not math.isfinite(record.final_loss) else ""
        parts.append(f'<path class="c{index % COLOURS}" d="M{x} {y}h24"/>')
        parts.append(f'<text x="{x + 32}" y="{y + 4}">{escape(visible(record.name))}{note}</text>')
    return "\n".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """Returns four to eight round numbers from low to high.

    Example:
        >>> ticks(0, 300)
        [0.0, 50.0, 100.0, 150.0, 200.0, 250.0, 300.0]
    """
    span = high - low
    if not span > 0:
        return [low]
    base = 10.0 ** math.floor(math.log10(span))
    # spans of 1 to 10 bases: the smallest of these steps that leaves at most eight ticks
    step = next(base * s for s in (0.1, 0.2, 0.5, 1.0, 2.0) if span / (base * s) <= 7)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step) + 1)]
