"""Measures layer norm and RMS norm, values and gradients, on the torture set of the norms.

``python -m proofs.normalise`` writes ``docs/normalise.csv``, from which ``docs/norms_page.py``
makes a table. Errors are in ulps of the format, against NumPy's longdouble. A difference from the
mean, and a gradient, is a difference of terms that may cancel: their errors are in ulps of the
largest term.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from proofs.norms import DOCS, cases, write
from scalewise.formats import Format
from scalewise.formats import format as format_
from scalewise.ops import layer_norm, rms_norm
from scalewise.rounding import round_to

FORMATS = ("fp16", "bf16", "e5m2", "e4m3")
LENGTHS = (2, 3, 16, 256, 4096)
COLUMNS = ("format", "n", "function", "case", "value", "gradient", "count")
FUNCTIONS = {"rms_norm": rms_norm, "layer_norm": layer_norm}
EPS = 1e-6
BOUND = 4.0  # ulps, of values and of gradients


def exact(
    x: np.ndarray, t: np.ndarray, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns values and gradients of rows, and the largest term of each."""
    x, t = x.astype(np.longdouble), t.astype(np.longdouble)
    top = np.abs(x).max(-1, keepdims=True)
    if centred:
        for _ in range(2):  # the second time, what the first mean has left
            x = x - x.mean(-1, keepdims=True)
        x = np.where(np.abs(x) < 1e-17 * top, 0, x)
    rms = np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    y = x / rms
    t = t - t.mean(-1, keepdims=True) if centred else t
    along = y * (y * t).mean(-1, keepdims=True)
    terms = np.maximum(np.abs(t), np.abs(along)).max(-1, keepdims=True)
    term = np.abs(y).max(-1, keepdims=True) if centred else np.abs(y)
    return y, (t - along) / rms, term + 0 * y, terms / rms + 0 * y


def ulps(fmt: Format, got: np.ndarray, want: np.ndarray, term: np.ndarray) -> np.ndarray:
    """Returns errors in spacings of the format at a term; 0 where ``want`` may overflow it."""
    exponent = np.floor(np.log2(np.maximum(term.astype(np.float64), 1e-300)))
    spacing = np.exp2(np.maximum(exponent, fmt.min_exponent) - fmt.mantissa_bits)
    held = np.abs(want) + BOUND * spacing <= float(fmt.max)
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.longdouble) - want) / spacing
    return np.where(held, np.where(np.isfinite(got), error, np.inf), 0).astype(np.float64)


def torture(fmt: Format, n: int) -> Iterator[dict[str, str]]:
    """Yields a record for each function and case: the largest errors of value and gradient."""
    table = {name: x for name, (x, _) in cases(fmt, n).items() if "ε" not in name}
    x = np.concatenate(list(table.values()))
    t = fmt.decode(fmt.encode(np.random.default_rng(n).standard_normal(x.shape)))
    rows = len(x) // len(table)
    for name, f in FUNCTIONS.items():
        with jax.enable_x64(True):

            def both(x, t, f=f):
                y, pull = jax.vjp(lambda x: f(x, eps=EPS, arithmetic=fmt), x)
                return y, round_to(pull(t)[0], fmt)

            got = [np.asarray(v) for v in jax.jit(both)(jnp.asarray(x), jnp.asarray(t))]
        y, g, y_term, g_term = exact(x, t, name == "layer_norm")
        errors = ulps(fmt, got[0], y, y_term), ulps(fmt, got[1], g, g_term)
        for i, case in enumerate(table):
            part = slice(i * rows, (i + 1) * rows)
            worst = [f"{float(e[part].max()):.3g}" for e in errors]
            yield dict(zip(COLUMNS, (fmt.name, str(n), name, case, *worst, str(rows)), strict=True))


def main() -> None:
    records = []
    for name in sys.argv[1:] or FORMATS:
        for n in LENGTHS:
            records += (new := list(torture(format_(name), n)))
            for f in FUNCTIONS:
                mine = [r for r in new if r["function"] == f]
                worst = [max(float(r[k]) for r in mine) for k in ("value", "gradient")]
                print(f"{name:<6} n={n:<6} {f:<12} value {worst[0]:8.3g}, gradient {worst[1]:8.3g}")
    if not sys.argv[1:]:
        write(DOCS / "normalise.csv", COLUMNS, records)


def read() -> list[dict[str, str]]:
    with (DOCS / "normalise.csv").open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
