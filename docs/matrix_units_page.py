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
from proofs import matrix_unit_sums as sums

import scalewise as sw
from scalewise.devices import UNITS, MatrixUnit, matrix_unit

HERE = Path(__file__).parent
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
HEAD = """# How matrix units add

A tensor core computes no sum of exact products. It cuts terms off, keeps few bits of a running
sum, and rounds in its own way. `sw.emulate(f, device="h100")` computes each product of a program
as the units of that device do, bit for bit; so does `sw.ops.matmul(a, b,
accumulator=sw.devices.matrix_unit("h100", "e4m3fn"))`. `sw.autoscale(f, "fp8", emulate="h100")`
rounds the operands as the recipe says and adds their products as the device does, in training
steps too; `sw.devices.MatrixUnits("h100", promote=128)` in place of the name sets the schedule.
`scalewise formats --device h100` lists the units. PyTorch models: `st.emulate(model,
device="h100")` ([torch](../torch.md#train-it-under-a-recipe)).

The order of a whole product is not modelled: one accumulator takes the terms in ascending order
of K. cuBLAS may split K, or keep several accumulators, and then differs in the last bits.
`splits` and `promote` model two schedules of that kind.

The rules are those of MMA-Sim ([arXiv 2511.10909](https://arxiv.org/abs/2511.10909)), whose
authors compared ten GPUs with them. `python -m proofs.matrix_units --mmasim FOLDER` compares
scalewise with a checkout of it and with exact rational arithmetic, on numbers of all magnitudes,
subnormals, cancellations, NaN and infinities. FP6 operands, and FP4 operands without block
scales, are compared with the rational arithmetic alone, since MMA-Sim doesn't have them. No rules
were published for TPUs.

```python
import jax.numpy as jnp
import numpy as np
import scalewise as sw

rng = np.random.default_rng(0)
a, b = (jnp.asarray(rng.random(shape), jnp.float8_e4m3fn) for shape in ((1, 4096), (4096, 1)))
exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
for promote in (None, 128):
    unit = sw.devices.matrix_unit("h100", "e4m3fn", promote=promote)
    y = sw.ops.matmul(a, b, accumulator=unit, out=jnp.float32)
    print(promote, f"{float(abs(y / exact - 1)[0, 0]):.1%}")
```

## What one instruction does

On NVIDIA's GPUs, an instruction adds *terms* products to the accumulator at once:

1. The exponent of a product is the sum of its factors' exponents, without normalising.
2. All terms and the accumulator are cut off, toward zero, so many *fractional bits* below the
   largest exponent.
3. They are added exactly. The sum is cut off to the *result*'s bits, or rounded to nearest even
   for FP16.

AMD's CDNA 3 adds the products first, then their sum (rounded down after 31 bits) and the
accumulator (rounded down after 24), and rounds to nearest even; CDNA 1 and 2 add in pairs in
float32. `sw.devices.MatrixUnit` states all of it.

"""
COMPARED = """The last column counts the sums of two steps, on random and directed operands, that
are equal to exact rational arithmetic bit by bit (`python -m proofs.matrix_unit_sums`, resumable;
{differ} of {all:,} differ, accumulators in FP16 included). MMA-Sim's own results were recorded for
{recorded:,} sums, which `tests/ops/test_matrix_units.py` compares.

"""
RECORDED_SUMS = 7280  # in tests/ops/matrix_units.npz
BETWEEN = """
## Largest errors over K

Each cell is the largest error of 256 dot products, relative to the sum of the magnitudes of their
terms (to the dot product itself for positive operands, which is the same). The operands are
rounded to the unit's format first, so that only the accumulation differs from exact arithmetic.
The least error that a float32 result can have is 6e-8.

"""
TAIL = """
## Two devices compared

A recording of an emulated program has one result for each product of a matrix unit, called
`matrix_unit`. Two recordings, compared, name the lines on which the devices part, in program order.
*bits* is how many of the last bits of a sampled number differ, at most.

```python
import jax


def loss_of(w, x):
    h = jnp.tanh(x @ w["up"])
    return jnp.mean((h @ w["down"]) ** 2)


w = {"up": jnp.asarray(rng.normal(size=(512, 64)), jnp.float32), "down": jnp.ones((64, 1))}
x = jnp.asarray(rng.normal(size=(32, 512)), jnp.float32)
runs = [
    sw.auditing.record(sw.autoscale(jax.grad(loss_of), "fp8", emulate=device))(w, x)
    for device in ("h100", "b200")
]
found = sw.auditing.compare(*runs)
print(found.verdict)  # first matrix_unit at the first line of loss_of
for pair in found.pairs:
    if pair.a.primitive == "matrix_unit":
        print(pair.a.where, pair.a.direction, f"{pair.difference:.0e}", pair.bits)
```

After the first of these lines the operands differ, too. `sw.audit(f, "fp8",
device="h100")` measures each product by itself: what its unit loses, with the same operands,
relative to an exact sum ([Audit](../guides/audit.md)).

## DeepSeek's measurement

DeepSeek-V3's authors report a maximum relative error of nearly 2 % for K = 4096 and random
operands on an H100 ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437), 3.3.2). The
distribution isn't stated. The model gives more for positive operands, where every cut goes in one
direction and the running sum grows with K, and far less for operands of both signs. Promotion
after 128 terms, as they propose, bounds the error by that of 128 terms.
"""


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


def page(found: dict[str, dict[str, list[float]]]) -> str:
    """Returns the page as Markdown."""
    exact = json.loads(sums.COUNTS.read_text())[sums.EXACT].values()
    counts = {"all": sum(x["sums"] for x in exact), "differ": sum(x["differ"] for x in exact)}
    parts = [HEAD, COMPARED.format(**counts, recorded=RECORDED_SUMS), units_table(), BETWEEN]
    for name, schedules in found.items():
        rows = [[s, *(f"{e:.1e}" for e in errors)] for s, errors in schedules.items()]
        parts += [f"Operands {name}:\n\n", table(["K", *map(str, LENGTHS)], rows), "\n"]
    return "".join([*parts[:-1], TAIL])


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        RECORD.write_text(json.dumps(measure(), indent=1) + "\n")
    (HERE / "concepts" / "matrix-units.md").write_text(page(json.loads(RECORD.read_text())))
