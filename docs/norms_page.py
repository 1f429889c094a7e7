"""Writes ``docs/norms.md`` and its picture from the results of ``python -m proofs.norms``."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path

from parts import parts_of
from proofs.normalise import BOUND

from scalewise.formats import format as format_
from scalewise.ops import NORM_METHODS, Arithmetic, beta_high, beta_low, ulp_bound
from scalewise.ops._auto import BLOCK, plan

HERE = Path(__file__).parent
PARTS = parts_of("norms")
COLOURS = {
    "auto": "#111111",
    "direct": "#d62828",
    "max_normalised": "#f77f00",
    "two_segment_overflow": "#9d4edd",
    "two_segment_underflow": "#4361ee",
    "two_segment_overflow_corrected": "#c8a2eb",
    "two_segment_underflow_corrected": "#90a8f5",
    "power_of_two": "#2a9d8f",
    "wide_scalar": "#8d99ae",
    "narrow_squares": "#bc6c25",
    "blue": "#6a994e",
}
WIDTH, HEIGHT, GAP, LEFT, TOP = 400, 150, 50, 60, 70
LOWEST, HIGHEST = -3, 12  # log2 of the error in ulps; what is above, or lost, lies on the top line

CLAIMS = (
    (
        "β_H = sqrt(max) = 256: below it the direct norm is safe",
        "`[200, 200]` overflows; a sum of n squares needs sqrt(max / n)",
        "β from format, n and order (`growth`): what a rounded sum of n terms can reach",
    ),
    (
        "K x + Q / (2 K x) joins the segments",
        "`[257, 255]` comes out 6 % too large: Taylor's next term is -Q^2 / 8",
        "the two sums are added at one power of two, then one root",
    ),
    (
        "Q / (2 K x), halved by a shift of the exponent, can't overflow",
        "right: `[6e4]` and 100 times 10 give 60,000. But Q does: with 100 times 100 it is 1e6",
        "both sums at the scale of the largest",
    ),
    (
        "β_L = 2^-12 parts what underflows; γ = K x / Q",
        "`[1e-4, 1e-4]` isn't finite: Q = 0. Squares lose bits from 2^-7 on, far above β_L",
        "the cut where squares are normal numbers; sums meet at the larger one's exponent",
    ),
    (
        "dividing by the largest is safe",
        "65,536 equal numbers stall at 2,048 of them: the sum swamps. Small parts flush",
        "nothing short of another sum",
    ),
    (
        "ε may be any number of the format, added to the sum of squares",
        "`[200]` with ε = 60,000 overflows, the norm is 316; ε / x^2 does at x = 1e-3, ε = 1",
        "the sum and ε meet at the exponent of the larger, as numbers with exponents of their own",
    ),
    (
        "a float32 scalar is enough",
        "yes, but where ε cancels the sum, and for BF16, whose range is float32's",
        "`narrow_squares`: a power of two first; digits where ε cancels",
    ),
)

SCALAR_METHODS = ("narrow_squares", "wide_scalar", "power_of_two", "auto")


def read(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def operations(arithmetic: Arithmetic, n: int) -> tuple[int, float]:
    """Returns the digit width that needs the fewest operations per element, and their number.

    Scaling, square, remainder; for each digit of the square, and for each that lies low enough of
    the remainder, five: scaled, rounded to an integer, scaled back, taken away, added (the last
    one isn't taken away). A carry is five for each digit, due when a digit could pass 2^p; a
    block's sum is moved and added with seven for each digit.
    """
    p, kept = arithmetic.fmt.precision, plan(arithmetic, n).kept
    best = (0, math.inf)
    for width in range(1, p + 1):
        between = 2 ** (p - width + 1) - 1  # deposits, of two for each element
        digits = -(-kept // width)
        low = -(-max(kept - p, 0) // width)
        each = 3 + sum(5 * d - 2 for d in (digits, low) if d)
        each += 2 / between * 5 * digits + 7 * digits / BLOCK
        best = min(best, (width, each), key=lambda pair: pair[1])
    return best


def torture(records: list[dict[str, str]]) -> list[str]:
    """One table: formats beside each other, methods below each other."""
    by: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for r in records:
        by[r["format"], r["method"]].append(r)
    formats = list(dict.fromkeys(f for f, _ in by))
    cases = ", ".join(dict.fromkeys(r["case"] for r in records))
    lengths = ", ".join(f"{int(n):,}" for n in dict.fromkeys(r["n"] for r in records))
    count = sum(int(r["count"]) for r in by[formats[0], "auto"])
    lines = [
        "## The torture set",
        "",
        f"{cases}; n = {lengths}: {count} vectors for each format, all of whose norms the format "
        "holds.",
        "",
        "Each cell: the worst (the mean) error in ulps where the result is finite; how many "
        "results aren't (overflow, or a negative or undefined intermediate); how many are 0 and "
        "shouldn't be.",
        "",
        f"| method | {' | '.join(formats)} |",
        "|---|" + "---:|" * len(formats),
    ]
    for method in NORM_METHODS:
        cells = []
        for f in formats:
            rows = by[f, method]
            worst = max(float(r["worst"]) for r in rows if r["worst"] != "nan")
            finite = [int(r["count"]) - int(r["overflows"]) for r in rows]
            mean = sum(float(r["mean"]) * n for r, n in zip(rows, finite, strict=True) if n) / max(
                sum(finite), 1
            )
            lost, flushed = (sum(int(r[c]) for r in rows) for c in ("overflows", "flushes"))
            cells.append(f"{worst:.3g} ({mean:.2g}); {lost}; {flushed}")
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return lines


def failures(records: list[dict[str, str]]) -> list[str]:
    """How many vectors each method gets wrong: by format, and by case in FP16."""
    by: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for r in records:
        for key in (r["format"], r["case"] if r["format"] == "fp16" else ""):
            by[r["method"], key][0] += int(r["failures"])
            by[r["method"], key][1] += int(r["count"])
    formats = list(dict.fromkeys(r["format"] for r in records))
    lines = [
        "",
        "## Where methods fail",
        "",
        "A result fails that is not finite, or is off by more than 1 % and more than 2 ulps. "
        "Methods as published fail as published; `auto`, `power_of_two` and the `..._corrected` "
        "ones are ours. Failures of all vectors of the torture set:",
        "",
    ]
    for keys in (formats, list(dict.fromkeys(r["case"] for r in records))):
        if keys is not formats:
            lines += ["", "The same in FP16, by case:", ""]
        rows, columns = (NORM_METHODS, keys) if keys is formats else (keys, NORM_METHODS)
        lines.append(
            f"| {'method' if keys is formats else 'case'} | "
            + " | ".join(c if keys is formats else f"`{c}`" for c in columns)
            + " |"
        )
        lines.append("|---|" + "---:|" * len(columns))
        for row in rows:
            cells = [by[(row, c) if keys is formats else (c, row)] for c in columns]
            name = f"`{row}`" if keys is formats else row
            shown = [f"{wrong} of {count}" if wrong else "0" for wrong, count in cells]
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def scalar(records: list[dict[str, str]]) -> str:
    """Compares methods with and without a float32 scalar."""
    kept = [r for r in records if r["case"] != "ε near -Σx²"]
    formats = list(dict.fromkeys(r["format"] for r in records))

    def of(rows: list[dict[str, str]], fmt: str, method: str) -> list[dict[str, str]]:
        return [r for r in rows if (r["format"], r["method"]) == (fmt, method)]

    def cell(fmt: str, method: str) -> str:
        mine = of(kept, fmt, method)
        worst = max(float(r["worst"]) for r in mine if r["worst"] != "nan")
        return f"{worst:.3g} | {sum(int(r['failures']) for r in mine)}"

    rows = [f"| {f} | " + " | ".join(cell(f, m) for m in SCALAR_METHODS) + " |" for f in formats]
    cancelled = [[r for r in of(records, "fp16", m) if r not in kept] for m in SCALAR_METHODS[:2]]
    wrong = [sum(int(r["failures"]) for r in some) for some in cancelled]
    total = sum(int(r["count"]) for r in cancelled[0])
    return PARTS.SCALAR.format(
        count=sum(int(r["count"]) for r in of(kept, formats[0], "auto")),
        columns=" | ".join(f"`{m}`: worst | failures" for m in SCALAR_METHODS),
        dashes="---:|" * 2 * len(SCALAR_METHODS),
        rows="\n".join(rows),
        cancelled=f"{wrong[0]} of {total} fail in FP16, of `wide_scalar` {wrong[1]}",
    )


def bounds(records: list[dict[str, str]]) -> list[str]:
    """Returns the bound on the error of ``auto`` for each format and n, and the measured error."""
    worst: dict[tuple[str, int], float] = defaultdict(float)
    for r in records:
        if r["method"] == "auto" and r["case"] != "ε near -Σx²":
            key = r["format"], int(r["n"])
            worst[key] = max(worst[key], float(r["worst"]))
    lines = [
        "| format | n | bits kept | bits a digit | bound, ulp | worst measured "
        "| operations an element |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, n), seen in worst.items():
        if n not in (16, 4096, 65536):
            continue
        fmt = format_(name)
        width, each = operations(Arithmetic(fmt), n)
        lines.append(
            f"| {name} | {n:,} | {plan(Arithmetic(fmt), n).kept} | {width} "
            f"| {ulp_bound(fmt, n):.3f} | {seen:.3f} | {each:.0f} |"
        )
    return lines


def power(x: float) -> str:
    return f"2^{math.log2(x):g}"


def thresholds() -> list[str]:
    """Returns the published thresholds and ours, for each format."""
    lines = []
    for name in ("fp16", "bf16", "e5m2", "e4m3", "dlfloat16"):
        fmt = format_(name)
        cells = [
            f"{math.sqrt(float(fmt.max)):.4g}",
            *(power(beta_high(fmt, n)) for n in (2, 256, 65536)),
            f"{math.sqrt(float(fmt.smallest)):.3g}",
            power(beta_low(fmt)),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def layer_norms() -> str:
    """Returns the table of layer norm and RMS norm."""
    worst: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    records = read("normalise.csv")
    for r in records:
        key = r["format"], r["function"]
        worst[key] = [
            max(w, float(r[k])) for w, k in zip(worst[key], ("value", "gradient"), strict=True)
        ]
    rows = [
        f"| {name} | "
        + " | ".join(f"{w:.2f}" for f in ("rms_norm", "layer_norm") for w in worst[name, f])
        + " |"
        for name in dict.fromkeys(f for f, _ in worst)
    ]
    lengths = "n = " + ", ".join(f"{int(n):,}" for n in dict.fromkeys(r["n"] for r in records))
    text = PARTS.NORMALISE.replace("{lengths}", lengths).replace("{bound}", f"{BOUND:g}")
    return text + "\n".join(rows) + "\n"


def page() -> str:
    """The page's Markdown."""
    records = read("norms.csv")
    promise = [
        "",
        "## What `auto` promises and does",
        "",
        "Measured without the cancelled sums, which stand above.",
        "",
        *bounds(records),
    ]
    picture = [
        "",
        "## Error against magnitude",
        "",
        "Normal vectors of every magnitude, four of each: the worst error in ulps. Results that "
        "are not finite or beyond 2^12 ulps lie on the top line; below 1/8 ulp on the bottom line.",
        "",
        "![Error of each method against magnitude, for each format and n](norms.svg)",
        "",
        "Times are in [benchmarks.md](benchmarks.md).",
        "",
    ]
    claims = ["| claim | measured in FP16 | corrected by |", "|---|---|---|"]
    claims += [f"| {' | '.join(row)} |" for row in CLAIMS]
    story = PARTS.STORY.replace("{claims}", "\n".join(claims))
    return (
        story
        + "\n".join([*torture(records), *failures(records), *promise])
        + "\n"
        + scalar(records)
        + PARTS.THRESHOLDS
        + "\n".join(thresholds())
        + "\n"
        + layer_norms()
        + PARTS.LAYERS
        + PARTS.COST
        + "\n".join(picture)
    )


def panel(records: list[dict[str, str]], title: str, x0: float, y0: float) -> list[str]:
    """One format and n: a line for each method."""
    scales = sorted({float(r["log2"]) for r in records})
    low, high = scales[0], scales[-1]

    def at(scale: float, error: float) -> str:
        level = math.log2(error) if 0 < error < math.inf else HIGHEST if error else LOWEST
        level = min(max(level, LOWEST), HIGHEST)
        x = x0 + WIDTH * (scale - low) / (high - low)
        return f"{x:.1f} {y0 + HEIGHT * (HIGHEST - level) / (HIGHEST - LOWEST):.1f}"

    out = [
        f'<text x="{x0}" y="{y0 - 8}" font-weight="bold">{title}</text>',
        f'<rect x="{x0}" y="{y0}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
    ]
    for level in (0, 4, 8, 12):
        y = y0 + HEIGHT * (HIGHEST - level) / (HIGHEST - LOWEST)
        out.append(f'<path d="M{x0} {y:.1f}h{WIDTH}" stroke="#eee"/>')
        out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">2^{level}</text>')
    for scale in (low, (low + high) / 2, high):
        x = x0 + WIDTH * (scale - low) / (high - low)
        label = f'<text x="{x:.1f}" y="{y0 + HEIGHT + 15}" text-anchor="middle">'
        out.append(f"{label}2^{scale:g}</text>")
    for method in reversed(NORM_METHODS):  # auto on top
        mine = {float(r["log2"]): float(r["worst"]) for r in records if r["method"] == method}
        line = "L".join(at(s, mine[s]) for s in scales)
        width = 2.4 if method == "auto" else 1.3
        out.append(
            f'<path d="M{line}" fill="none" stroke="{COLOURS[method]}" stroke-width="{width}"/>'
        )
    return out


def picture() -> str:
    """All panels and their legend, as SVG."""
    by: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for r in read("norms_sweep.csv"):
        by[r["format"], r["n"]].append(r)
    columns = list(dict.fromkeys(n for _, n in by))
    rows = list(dict.fromkeys(f for f, _ in by))
    width = LEFT + len(columns) * (WIDTH + GAP + 20)
    height = TOP + len(rows) * (HEIGHT + GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for i, (method, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 190 * (i % 5), 16 + 16 * (i // 5)
        out.append(f'<path d="M{x} {y}h16" stroke="{colour}" stroke-width="3"/>')
        out.append(f'<text x="{x + 20}" y="{y + 4}">{method}</text>')
    for i, f in enumerate(rows):
        for j, n in enumerate(columns):
            x, y = LEFT + j * (WIDTH + GAP + 20), TOP + i * (HEIGHT + GAP)
            out += panel(by[f, n], f"{f}, n = {int(n):,}", x, y)
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "norms.md").write_text(page())
    (HERE / "norms.svg").write_text(picture())
