"""Writes ``docs/functions.md`` and ``docs/functions.csv``: the errors of functions and casts."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from parts import parts_of

HERE = Path(__file__).parent
PARTS = parts_of("functions")
sys.path.insert(0, str(HERE.parent))

from proofs.function_errors import FunctionErrors, function_table  # noqa: E402
from proofs.function_tables import CastErrors, cast_table, function_ranges  # noqa: E402

from scalewise.formats import format as format_  # noqa: E402

FORMATS = ("fp16", "bf16")
CASTS = ("fp16", "bf16", "dlfloat16", "e5m2", "e4m3fn", "e2m1fn")
# PaddlePaddle's low-precision operator guide: FP16 against FP32, ranges over a group: max abs,
# max rel, mean abs, mean rel; and the cast from FP32 (all numbers, the normal ones).
PUBLISHED = (
    (
        "sin cos atan acosh asinh tanh acos asin atanh",
        "2.44e-4..3.905e-3 | 4.86e-4..5.17e-4 | 5.85e-5..1.138e-3 | 1.15e-4..1.79e-4",
    ),
    (
        "log2 log10 log1p",
        "1.953e-3..3.3905e-3 | 4.82e-4..4.87e-4 | 4e-4..1.258e-3 | 1.71e-4..1.75e-4",
    ),
    ("floor round relu ceil", "0 | 0 | 0 | 0"),
    ("sqrt rsqrt", "3.1227e-2..6.2485e-2 | 4.88e-4 | 2.071e-3..4.158e-3 | 1.72e-4..1.79e-4"),
    (
        "exp expm1 tan cosh sinh square reciprocal tanh_shrink",
        "1..16 | 4.86e-4..1 | 7.86e-4..0.378427 | 9.18e-5..0.082869",
    ),
    (
        "log_sigmoid sigmoid silu softsign",
        "7.01e-4..2.665e-3 | 4.86e-4..9.45e-4 | 6.55e-5..9.96e-5 | 1.04e-4..2.03e-4",
    ),
)

PUBLISHED_CASTS = {
    "all": "16 | 0.33289 | 0.38871 | 0.008834",
    "normal": "16 | 0.00048 | 0.51876 | 0.000175",
}

RANGES = ("fp16", "bf16", "e5m2", "e4m3fn")
ERRORS = ("max_absolute", "max_relative", "mean_absolute", "mean_relative")


def fields(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def _functions(name: str) -> Iterator[FunctionErrors]:
    return function_table(name, domain=("all", "normal"))


def measure() -> None:
    """Minutes: all functions of two formats, and the casts."""
    rows = [
        {"format": name, **dataclasses.asdict(record)}
        for names, table in ((FORMATS, _functions), (CASTS, cast_table))
        for name in names
        for record in table(name)
    ]
    columns = ["format", *fields(FunctionErrors)]
    with (HERE / "functions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(rows)


def measure_ranges() -> None:
    """Writes the inputs at which functions overflow or become zero."""
    found = {
        name: {
            r.name: {"overflows": r.overflows, "flushes": r.flushes} for r in function_ranges(name)
        }
        for name in RANGES
    }
    (HERE / "function_ranges.json").write_text(json.dumps(found) + "\n")


def interval(low: float, high: float, top: float) -> str:
    """Returns an interval of inputs as text; one that reaches the largest number has one end."""
    if low == high:
        return f"{low:.4g}"
    if high == top:
        return f"from {low:.4g} on"
    return f"up to {high:.4g}" if low == -top else f"{low:.4g} to {high:.4g}"


def shown_intervals(pairs: list[list[float]], top: float) -> str:
    """Returns at most three intervals, and how many more there are."""
    text = "; ".join(interval(*pair, top) for pair in pairs[:3])
    return text + (f"; {len(pairs) - 3} more" if len(pairs) > 3 else "") or "–"


def limits(by: dict[tuple[str, str, str, str], dict[str, str]]) -> str:
    """Returns which functions are inaccurate or leave a format's range."""
    text = PARTS.LIMITS
    for name in FORMATS:
        rows = [r for (f, d, _, a), r in by.items() if (f, d, a) == (name, "all", "native")]
        bad = [
            f"`{r['name']}`"
            for r in rows
            if float(r["max_ulp"]) > 1 or float(r["correctly_rounded"]) < 0.9
        ]
        text += f"| {name} | {', '.join(bad)} |\n"
    found = json.loads((HERE / "function_ranges.json").read_text())
    for name, functions in found.items():
        top = float(format_(name).max)
        text += f"\n| {name} | overflows | becomes zero |\n|---|---|---|\n"
        for function, r in functions.items():
            if r["overflows"] or r["flushes"]:
                cells = (shown_intervals(r[k], top) for k in ("overflows", "flushes"))
                text += f"| `{function}` | {' | '.join(cells)} |\n"
    return text


def read() -> list[dict[str, str]]:
    with (HERE / "functions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> str:
    return f"{float(text):.4g}"


def casts(records: list[dict[str, str]]) -> list[str]:
    """The cast to FP16: published, expected of log-uniform numbers, measured on all."""
    expected = {c.domain: c for c in cast_table("fp16", "log_uniform")}
    lines = []
    for r in records:
        if r["format"] != "fp16" or r["name"]:
            continue
        domain = r["domain"]
        mean = expected[domain]
        lines += [
            f"| {domain} | published | {PUBLISHED_CASTS[domain]} |",
            f"| | log-uniform | {mean.max_absolute:g} | {mean.max_relative:.4g} "
            f"| {mean.mean_absolute:.5f} | {mean.mean_relative:.4g} |",
            f"| | every float32 | {' | '.join(number(r[e]) for e in ERRORS)} |",
        ]
    return lines


def page() -> str:
    """The page's Markdown."""
    records = read()
    assert set(ERRORS) <= set(fields(CastErrors))
    lines = [
        f"| {r['format']} | {r['domain']} | {int(r['count']):,} | "
        + " | ".join(number(r[e]) for e in ERRORS)
        + " |"
        for r in records
        if not r["name"]
    ]
    text = PARTS.INTRODUCTION + "\n".join(lines) + "\n"
    text += PARTS.CASTS_PUBLISHED + "\n".join(casts(records)) + "\n" + PARTS.CASTS_EXPLAINED
    by = {(r["format"], r["domain"], r["name"], r["arithmetic"]): r for r in records if r["name"]}
    lines = []
    for names, published in PUBLISHED:
        lines.append(f"| {names} | published | {published} |")
        for domain in ("normal", "all"):
            ours = [by["fp16", domain, n, "float32"] for n in names.split()]
            ranges = [[float(r[e]) for r in ours] for e in ERRORS]
            shown = (f"{min(r):.4g}..{max(r):.4g}" if max(r) else "0" for r in ranges)
            lines.append(f"| | {domain} | {' | '.join(shown)} |")
    text += "\n".join(lines) + "\n" + PARTS.EXPLAINED + limits(by)
    rows = {(f, n, a): r for (f, domain, n, a), r in by.items() if domain == "all"}
    for name in FORMATS:
        text += f"\n## Every function, {name}\n\n"
        text += (
            "| function | arithmetic | inputs | max abs | mean abs | max rel | mean rel | max ulp "
            "| correctly rounded | worst input |\n|---|---|" + "---:|" * 8 + "\n"
        )
        for (fmt, function, arithmetic), r in rows.items():
            if fmt == name:
                cells = (
                    "max_absolute", "mean_absolute", "max_relative", "mean_relative", "max_ulp",
                )  # fmt: skip
                text += (
                    f"| {function} | {arithmetic} | {int(r['count']):,} | "
                    + " | ".join(number(r[c]) for c in cells)
                    + f" | {100 * float(r['correctly_rounded']):.3f} % | {number(r['worst'])} |\n"
                )
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    if sys.argv[1:]:
        measure_ranges()
    (HERE / "functions.md").write_text(page())
