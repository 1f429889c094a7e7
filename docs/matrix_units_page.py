"""Writes ``docs/concepts/matrix-units.md``: how each unit adds, and its largest errors over K.

``python docs/matrix_units_page.py measure`` computes the errors anew, in minutes, and writes them
to ``docs/matrix_units.json``; without an argument the page is made of what is recorded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from parts import parts_of
from proofs import matrix_unit_sums as sums

import scalewise as sw
from scalewise.devices import UNITS, MatrixUnit, matrix_unit

HERE = Path(__file__).parent
PARTS = parts_of("matrix_units")
RECORD = HERE / "matrix_units.json"
LENGTHS = (16, 64, 256, 1024, 4096, 16384, 65536)
ROWS = 16  # of each operand: 256 dots
DATA = {
    "uniform in (0, 1)": lambda rng, shape: rng.random(shape),
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "Student's t, 3 degrees of freedom": lambda rng, shape: rng.standard_t(3, shape),
}
SCHEDULES = {
    "H100 FP8, fast accumulation": matrix_unit("h100", "e4m3fn"),
    "H100 FP8, promotion after 128 terms": matrix_unit("h100", "e4m3fn", promote=128),
    "H100 FP8, split in 4": matrix_unit("h100", "e4m3fn", splits=4),
    "B200 FP8": matrix_unit("b200", "e4m3fn"),
    "MI300X FP8": matrix_unit("mi300x", "e4m3fnuz"),
    "A100 BF16": matrix_unit("a100", "bf16"),
    "H100 BF16": matrix_unit("h100", "bf16"),
    "H100 FP16, accumulator in FP16": matrix_unit("h100", "fp16", result="fp16"),
    "MI300X BF16": matrix_unit("mi300x", "bf16"),
}
RECORDED_SUMS = 7280  # in tests/ops/matrix_units.npz


def measure() -> dict[str, dict[str, list[float]]]:
    """Returns the largest errors by distribution and schedule, one for each length."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, draw in DATA.items():
        rng = np.random.default_rng(0)
        drawn = {k: [draw(rng, s) for s in ((ROWS, k), (k, ROWS))] for k in LENGTHS}
        found[name] = {
            schedule: [largest_error(unit, *drawn[k]) for k in LENGTHS]
            for schedule, unit in SCHEDULES.items()
        }
    return found


def largest_error(unit: MatrixUnit, a: np.ndarray, b: np.ndarray) -> float:
    a, b = (jnp.asarray(x, jnp.float32) for x in (a, b))
    a, b = (np.asarray(sw.round_to(x, unit.left, saturate=True)) for x in (a, b))
    wide = a.astype(np.float64), b.astype(np.float64)
    got = np.asarray(sw.ops.matmul(jnp.asarray(a), jnp.asarray(b), accumulator=unit), np.float64)
    return float(np.max(np.abs(got - wide[0] @ wide[1]) / (np.abs(wide[0]) @ np.abs(wide[1]))))


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def units_table() -> str:
    """Returns a row for each arithmetic, with the operands that share it."""
    groups: dict[tuple, list[MatrixUnit]] = {}
    for u in UNITS:
        key = (u.architecture, u.instruction, u.terms, u.fraction_bits, u.result.name, u.method)
        groups.setdefault(key, []).append(u)
    exact = json.loads(sums.COUNTS.read_text())[sums.EXACT]
    rows = []
    for (architecture, instruction, terms, bits, result, method), units in groups.items():
        operands = ", ".join(dict.fromkeys(f.name for u in units for f in (u.left, u.right)))
        added = method.replace("_", " ") + (", flushing" if units[0].flush else "")
        compared = f"{exact[sums.instruction(units[0])]['sums']:,}"
        rows.append(
            [
                architecture,
                instruction,
                operands,
                str(terms),
                str(bits or "–"),
                result,
                added,
                compared,
            ]
        )
    head = [
        "architecture",
        "instruction",
        "operands",
        "terms",
        "fractional bits",
        "result",
        "method",
        "sums compared",
    ]
    return table(head, rows)


def page() -> str:
    """Returns the page as Markdown."""
    found: dict[str, dict[str, list[float]]] = json.loads(RECORD.read_text())
    exact = json.loads(sums.COUNTS.read_text())[sums.EXACT].values()
    counts = {"all": sum(x["sums"] for x in exact), "differ": sum(x["differ"] for x in exact)}
    parts = [
        PARTS.HEAD,
        PARTS.COMPARED.format(**counts, recorded=RECORDED_SUMS),
        units_table(),
        PARTS.BETWEEN,
    ]
    for name, schedules in found.items():
        rows = [[s, *(f"{e:.1e}" for e in errors)] for s, errors in schedules.items()]
        parts += [f"Operands {name}:\n\n", table(["K", *map(str, LENGTHS)], rows), "\n"]
    return "".join([*parts[:-1], PARTS.TAIL])


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        RECORD.write_text(json.dumps(measure(), indent=1) + "\n")
    (HERE / "concepts" / "matrix-units.md").write_text(page())
