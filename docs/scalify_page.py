"""Writes ``docs/scalify.md``: tables from the rules and from ``docs/scaling_kinds.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parts import parts_of

from scalewise.scaled import RULES

HERE = Path(__file__).parent
PARTS = parts_of("scalify")

DATA = {
    "add": "A (sA/s') + B (sB/s'), s' the result's",
    "sub": "A (sA/s') - B (sB/s')",
    "maximum": "max(A sA/s', B sB/s')",
    "minimum": "min(A sA/s', B sB/s')",
    "where": "A sA/s' or B sB/s'",
    "concatenate": "each at the largest scale",
    "clip": "clip(A sA/s', bounds / s'), for bounds around 0; max(sA, sB) for others",
    "mul": "A B",
    "div": "A / B",
    "integer_pow": "A^n",
    "square": "A^2, n = 2",
    "sqrt": "sqrt(A), n = 2; half of an odd exponent stays with the data",
    "rsqrt": "1 / sqrt(A), n = 2",
    "matmul": "A @ B / s",
    "dot_general": "dot_general(A, B) / s",
    "conv": "conv(A, B) / s",
    "sum": "sum(A) / s",
    "cumsum": "cumsum(A) / s",
    "mean": "mean(A) s",
    "max": "max(A)",
    "min": "min(A)",
    "neg": "-A",
    "abs": "|A|",
    "relu": "relu(A)",
    "gelu": "A Φ(A sA); left open in the design",
    "cast_data": "A, rounded to another format",
    "exp": "exp(A sA)",
    "log": "log(A) + log(sA)",
    "tanh": "tanh(A sA) / s', of small values A",
    "sigmoid": "sigmoid(A sA)",
    "sin": "sin(A sA) / s', of small values A",
    "cos": "cos(A sA)",
    "erf": "erf(A sA) / s', of small values 2/√π A sA/s'",
    "log_softmax": "(A - max A) sA/s' - log(sum of exp) / s'",
    "softmax": "exp((A - max A) sA), one scale a row",
}

KINDS = {
    "static": "static loss scaling",
    "automatic": "automatic loss scaling",
    "bias": "automatic bias selection (`fp8`)",
    "unit": "unit scaling (`unit_scaling`)",
    "propagated": "scale propagation (`scalify`)",
}


def rules() -> str:
    """Returns the table of operations and their rules."""
    lines = ["| operation | scale | data |", "|---|---|---|"]
    lines += [f"| `{name}` | {rule.formula} | {DATA[name]} |" for name, rule in RULES.items()]
    return "\n".join(lines).replace("|A|", r"\|A\|") + "\n"


def percent(x: float) -> str:
    return f"{100 * x:.2g} %" if x else "0 %"


def row(kind: str, figures: dict[str, Any]) -> str:
    """Returns one kind's row of the comparison."""
    sources, changes = figures["sources"], figures["changes"]
    counted = f"{sources['propagated']} of {sources['rows']}"
    propagates = {
        "static": f"backward: {counted} gradients",
        "automatic": f"backward: {counted} gradients",
        "bias": f"no: {counted}",
        "unit": f"no: {counted}, from shapes",
        "propagated": f"yes: {counted}, the others from data",
    }[kind]
    count = figures["scales over time"]
    published = f" (as published {percent(changes['published'])})" if "published" in changes else ""
    cells = [
        KINDS[kind],
        propagates,
        f"{'yes' if count > 1 else 'no'}: {count}",
        f"{'no' if sources['scales'] == 1 else 'yes'}: {sources['scales']}",
        f"{percent(figures['lost at once'])} lost",
        f"{percent(changes['ours'])}{published}",
    ]
    return f"| {' | '.join(cells)} |"


def kinds(measured: dict[str, Any]) -> str:
    """Returns the table of the five kinds."""
    head = "| | propagates | adapts over time | local | right at once | model unchanged |"
    rows = [row(kind, measured["kinds"][kind]) for kind in KINDS]
    return "\n".join([head, "|---|---|---|---|---|---|", *rows]) + "\n"


def page() -> str:
    """Returns the page as Markdown."""
    measured = json.loads((HERE / "scaling_kinds.json").read_text())
    text = PARTS.TEXT.replace("{steps}", str(measured["steps"])).replace("{jax}", measured["JAX"])
    return PARTS.HEAD + rules() + text + kinds(measured) + PARTS.TAIL


if __name__ == "__main__":
    (HERE / "scalify.md").write_text(page())
