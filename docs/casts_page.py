"""Writes ``docs/casts.md``, whose tables are made of casts; run it to update them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from parts import parts_of

import scalewise as sw
from scalewise.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Format
from scalewise.rounding import SATURATION_RULES

HERE = Path(__file__).parent
PARTS = parts_of("casts")
FLOAT8 = (E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ)
NEGATIVE_NAN = np.uint32(0xFFC00000).view(np.float32)  # Python's and NumPy's -nan loses its sign
BEYOND = 1e6  # [x] > FLT_MAX in all four
BETWEEN = 0.3  # the table's "else"
INPUTS: dict[str, float] = {
    "0": 0.0,
    "-0": -0.0,
    "NaN": np.nan,
    "-NaN": float(NEGATIVE_NAN),
    "Inf": np.inf,
    "-Inf": -np.inf,
    r"\[x] > FLT_MAX": BEYOND,
    r"\[x] < -FLT_MAX": -BEYOND,
}
SCALES = {
    "0": 0.0,
    "2^-128": 2.0**-128,
    "2^-127": 2.0**-127,
    "1": 1.0,
    "1 + 2^-23": 1 + 2.0**-23,
    "1.5": 1.5,
    "2 - 2^-23": 2 - 2.0**-23,
    "1.5 x 2^127": 1.5 * 2.0**127,
    "Inf": np.inf,
    "-1": -1.0,
    "NaN": np.nan,
}


def shown(fmt: Format, x: float, saturate: bool | str) -> str:
    """Returns the name of what an input becomes."""
    y = sw.cast(jnp.asarray(np.float32(x)), fmt, saturate=saturate)
    code = int(np.asarray(y).view(np.uint8))
    number = float(fmt.decode([code])[0])
    one_nan = fmt.nan == "negative_zero"
    sign = "-" if code >> 7 and not (one_nan and np.isnan(number)) else ""
    if np.isnan(number):
        return f"{sign}NaN"
    names = {0.0: "0", np.inf: "Inf", float(fmt.max): "FLT_MAX"}
    return sign + names.get(abs(number), f"{abs(number):g}")


def float8_table(saturate: bool | str, inputs: dict[str, float] = INPUTS) -> list[list[str]]:
    """Returns the rows of a table: the input, and what it becomes in each format."""
    rows = [[name, *(shown(f, x, saturate) for f in FLOAT8)] for name, x in inputs.items()]
    rounded = [f"{float(f.decode(f.encode(BETWEEN))):g}" for f in FLOAT8]
    got = [shown(f, BETWEEN, saturate) for f in FLOAT8]
    return [*rows, ["else", *("RNE" if a == b else a for a, b in zip(got, rounded, strict=True))]]


def power(x: float) -> str:
    return "NaN" if np.isnan(x) else f"2^{int(np.log2(x))}" if x != 1 else "1"


def e8m0_table() -> list[list[str]]:
    """Returns the rows of E8M0's table: the input, and what each rounding makes of it."""
    rows = []
    for name, x in SCALES.items():
        row = [name]
        for saturate in (False, True):
            for rounding in ("up", "down", "nearest"):
                code = sw.cast(
                    jnp.asarray(np.float32(x)), E8M0, rounding=rounding, saturate=saturate
                )
                row.append(power(float(E8M0.decode(np.asarray(code).view(np.uint8)))))
        rows.append(row)
    return rows


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def page() -> str:
    """Returns the page as Markdown."""
    formats = list(dict.fromkeys(f for rule in SATURATION_RULES.values() for f in rule))
    rules = [
        [f.name, *(f"`{r[f]!r}`" if f in r else "error" for r in SATURATION_RULES.values())]
        for f in formats
    ]
    names = ["x", *(f.name.upper() for f in FLOAT8)]
    roundings = [f"{r}, saturate={s}" for s in (False, True) for r in ("up", "down", "nearest")]
    older = {k: INPUTS[k] for k in ("Inf", "-Inf")}
    parts = [
        PARTS.HEAD,
        table(["format", *(f'`"{name}"`' for name in SATURATION_RULES)], rules),
        '\n## To float8, saturating: `saturate="onnx"`\n\n',
        table(names, float8_table("onnx")),
        '\nUnder `"onnx-19"`, the older rule, only these rows differ:\n\n',
        table(names, float8_table("onnx-19", older)[:-1]),
        "\n## To float8, not saturating: `saturate=False`\n\n",
        table(names, float8_table(False)),
        f"\nFLT_MAX is {', '.join(f'{Fraction(f.max)} in {f.name.upper()}' for f in FLOAT8)}. "
        "The last row holds for all other x: rounded to nearest even.\n",
        PARTS.HARDWARE,
        PARTS.E8M0_TEXT,
        table(["x", *roundings], e8m0_table()),
        PARTS.TAIL,
    ]
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "casts.md").write_text(page())
