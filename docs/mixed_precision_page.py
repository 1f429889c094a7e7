"""Draws the figures of ``docs/mixed_precision.md`` from the variables of the page's own code."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

HERE = Path(__file__).parent
FOLDER = HERE / "mixed_precision"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 260, 60, 20, 40
COLOURS = {
    "float32": "#111111",
    "FP16, no scale": "#d62828",
    "FP16, dynamic scale": "#f77f00",
    "AMP, FP16": "#4361ee",
    "AMP, BF16": "#2a9d8f",
}


def run() -> dict[str, Any]:
    """Runs all code of the page; returns its variables."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (HERE / "mixed_precision.md").read_text(), re.M | re.S
    )
    variables: dict[str, Any] = {}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile("\n".join(blocks), "mixed_precision.md", "exec"), variables)
    return variables


def svg(body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([head, *body, "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#333") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def histogram(counts: Sequence[int], edges: Sequence[float], scale: float) -> str:
    """Returns bars of the share of gradients in each binade, before and after scaling."""
    low, high, moved = edges[0], edges[-1], math.log2(scale)
    plot, total = HEIGHT - TOP - BOTTOM, float(sum(counts))
    top = max(counts) / total

    def at(exponent: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (exponent - low) / (high - low)

    body = []
    for name, a, b, colour in (
        ("zero", low, -25, "#fde2e2"), ("subnormal", -25, -14, "#fdf3d6"),
        ("normal", -14, 16, "#e3f4e8"),
    ):  # fmt: skip
        body.append(
            f'<rect x="{at(a):.0f}" y="{TOP}" width="{at(b) - at(a):.0f}" height="{plot}" '
            f'fill="{colour}"/>'
        )
        body.append(text((at(a) + at(b)) / 2, TOP + 14, f"{name} in FP16"))
    for shift, colour in ((0.0, "#8d99ae"), (moved, "#4361ee")):
        for count, edge in zip(counts, edges, strict=False):
            tall = round(plot * 0.85 * count / total / top)
            if tall and edge + shift < high:
                body.append(
                    f'<rect x="{at(edge + shift):.0f}" y="{TOP + plot - tall}" width="8" '
                    f'height="{tall}" fill="{colour}" fill-opacity="0.8"/>'
                )
    body += [text(at(e), HEIGHT - 22, f"2^{e}") for e in range(int(low), int(high) + 1, 8)]
    body.append(text(LEFT, HEIGHT - 6, "grey: as they are", "start", "#6b7689"))
    body.append(text(LEFT + 130, HEIGHT - 6, f"blue: times S = 2^{moved:.0f}", "start", "#4361ee"))
    return svg(body)


def lines(curves: dict[str, Sequence[float]], base: float, unit: str) -> str:
    """Returns curves over steps on a logarithmic axis of the given base."""
    points = [v for curve in curves.values() for v in curve if v > 0 and math.isfinite(v)]
    low = math.floor(math.log(min(points), base))
    high = math.ceil(math.log(max(points), base))
    plot, steps = HEIGHT - TOP - BOTTOM, max(map(len, curves.values()))

    def at(i: int, v: float) -> str:
        x = LEFT + (WIDTH - LEFT - 20) * i / (steps - 1)
        return f"{x:.0f} {TOP + plot * (high - math.log(v, base)) / (high - low):.0f}"

    body = [f'<path d="M{LEFT} {TOP}v{plot}H{WIDTH - 20}" fill="none" stroke="#999"/>']
    ticks = range(low, high + 1, max(1, (high - low) // 6))
    for k in ticks:
        y = TOP + plot * (high - k) / (high - low)
        body.append(text(LEFT - 6, y + 4, f"{base:g}^{k}", "end"))
    for n, (name, curve) in enumerate(curves.items()):
        colour = COLOURS.get(name, "#4361ee")
        good = [(i, v) for i, v in enumerate(curve) if v > 0 and math.isfinite(v)]
        path = "L".join(at(i, v) for i, v in good)
        body.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body.append(text(LEFT + 10 + 130 * n, HEIGHT - 6, name, "start", colour))
    body.append(text(WIDTH - 20, HEIGHT - 22, f"{steps} steps; {unit}", "end"))
    return svg(body)


def figures() -> dict[str, str]:
    """Returns the page's figures by file name."""
    v = run()
    edges = [int(e) for e in v["edges"]]
    return {
        "histogram.svg": histogram([int(c) for c in v["counts"]], edges, float(v["S"])),
        "scale.svg": lines({"loss scale S": v["scales"]}, 2, "S"),
        "losses.svg": lines({n: v["losses"][n] for n in COLOURS}, 10, "loss"),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in figures().items():
        (FOLDER / name).write_text(content)
