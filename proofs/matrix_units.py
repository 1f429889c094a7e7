"""Compares products of matrix units with exact rational arithmetic and with MMA-Sim, bit by bit.

    python -m proofs.matrix_units                    # exact rational arithmetic, 2,000 dots a unit
    python -m proofs.matrix_units --mmasim FOLDER    # a checkout of microsoft/MMA-Sim; needs torch
    python -m proofs.matrix_units --mmasim FOLDER --record 64   # writes the tests' recorded numbers

Both are evaluated one dot product after the other, by code that shares nothing with ours. MMA-Sim
was compared with the devices by its authors (arXiv 2511.10909). It has no FP6 and FP4 operands
without block scales; the others are compared in both ways.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from scalewise.devices import UNITS, MatrixUnit, matrix_unit
from scalewise.formats import FP16, FP32, FP64, TF32, BlockFormat, Format
from scalewise.ops import unit_product

RECORDED = Path(__file__).parents[1] / "tests" / "ops" / "matrix_units.npz"
MODES = ("codes", "normal", "spread", "cancelling", "sparse", "special", "huge")


def all_units() -> Iterator[MatrixUnit]:
    """Yields every unit of the table, those with an accumulator in FP16 as well."""
    for unit in UNITS:
        yield unit
        if unit.architecture != "ada" and unit.left.name in ("fp16", "e4m3fn", "e5m2"):
            try:
                yield matrix_unit(unit.architecture, unit.left, unit.right, result="fp16")
            except ValueError:
                continue


def label(unit: MatrixUnit) -> str:
    return f"{unit.architecture}|{unit.left.name}|{unit.right.name}|{unit.result.name}"


# -- operands ------------------------------------------------------------------------------------


def _numbers(fmt: Format, shape: tuple[int, ...], mode: str, rng: np.random.Generator):
    """Numbers of a format in one mode, as float64."""
    if mode == "codes" and fmt.bits <= 16:
        x = fmt.values()[rng.integers(0, 2**fmt.bits, shape)]
        x = np.where(np.isfinite(x), x, 1.0)
    elif mode in ("codes", "spread"):
        reach = min(fmt.max_exponent, 30)
        x = rng.normal(size=shape) * 2.0 ** rng.integers(-reach, reach // 2 + 1, shape)
    elif mode == "huge":
        x = float(fmt.max) * rng.choice([1, -1, 0.5, 0.01], shape)
    else:
        x = rng.normal(size=shape)
    if mode == "sparse":
        x = x * (rng.random(shape) < 0.3)
    return fmt.decode(fmt.encode(x, saturate=True))


def operands(unit: MatrixUnit, mode: str, count: int, rng: np.random.Generator):
    """Operands ``[count, K]`` of two steps, the accumulator ``[count]``, and scales or None."""
    steps = 2 if unit.terms > 1 else 4
    shape = (count, steps * unit.terms)
    left, right = unit.left.element, unit.right.element
    wide = {TF32: FP32}  # units cut off float32 operands
    a = _numbers(wide.get(left, left), shape, mode, rng)
    b = _numbers(wide.get(right, right), shape, mode, rng)
    if mode == "cancelling":
        half = shape[1] // 2
        a[:, half:], b[:, half:] = -a[:, :half], b[:, :half]
    result = FP32 if unit.result.name == "e8m13" else unit.result
    size = np.minimum(np.abs(a * b).max(axis=1), float(result.max)) * 2.0 ** rng.integers(
        -30, 6, count
    )
    c = result.decode(result.encode(rng.normal(size=count) * size, saturate=True))
    c = np.where(rng.random(count) < 0.2, 0.0, c)
    if mode == "special":
        for x, fmt in ((a, left), (b, right)):
            some = rng.random(shape) < 0.03
            kinds = [np.nan] * (fmt.nan_code is not None) + [np.inf, -np.inf] * fmt.infinities
            if kinds:
                x[some] = rng.choice(kinds, some.sum())
        c = np.where(rng.random(count) < 0.1, rng.choice([np.inf, -np.inf, np.nan], count), c)
    scales = None
    if isinstance(unit.left, BlockFormat):
        if mode == "special":
            c = np.where(np.isfinite(c), c, 1.0)  # MMA-Sim refuses infinite accumulators here
        scales = tuple(
            _scales(fmt.scale, (count, shape[1] // fmt.size), mode, rng)
            for fmt in (unit.left, unit.right)
        )
    return a, b, c, scales


def _scales(fmt: Format, shape: tuple[int, ...], mode: str, rng: np.random.Generator):
    x = 2.0 ** rng.integers(-20, 20, shape) * (1 + rng.integers(0, 8, shape) / 8)
    if fmt.name == "e8m0":
        x = 2.0 ** np.floor(np.log2(x))
    elif mode == "codes":
        x = np.abs(np.nan_to_num(fmt.values()[rng.integers(0, 127, shape)]))
    return fmt.decode(fmt.encode(x, saturate=True))


# -- ours ----------------------------------------------------------------------------------------


@functools.cache
def _compiled(unit: MatrixUnit) -> Callable:
    def one(a, b, c, scales):
        of = None if scales is None else (scales[0][None], scales[1][:, None])
        return unit_product(unit, a[None], b[:, None], of, c[None, None])[0, 0]

    return jax.jit(jax.vmap(one))


def ours(unit: MatrixUnit, a, b, c, scales) -> np.ndarray:
    """One dot product for each row, as float64."""
    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, (a, b, c, scales))
        return np.asarray(_compiled(unit)(*arrays))


# -- exact rational arithmetic -------------------------------------------------------------------


@functools.lru_cache(1 << 18)  # of 8-bit operands there are fewer
def _product(x: float, y: float) -> Fraction:
    return Fraction(x) * Fraction(y)


@functools.cache
def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def _exponent(x: Fraction | float, smallest: int) -> int:
    if x == 0:
        return -126
    if isinstance(x, float):
        return max(math.frexp(x)[1] - 1, smallest)
    x = abs(x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e -= _power(e) > x
    return max(e, smallest)


def _cut_off(terms: list[Fraction], exponent: int) -> Fraction:
    """Returns the sum of numbers that are cut off, toward zero, below a power of two."""
    total = 0
    for x in terms:
        n, d = x.numerator, x.denominator
        units = (abs(n) << -exponent) // d if exponent < 0 else abs(n) // (d << exponent)
        total += units if n >= 0 else -units
    return total * _power(exponent)


def _nearest(x: Fraction, bits: int, smallest: int, largest: int) -> float:
    if x == 0:
        return 0.0
    unit = _power(_exponent(x, smallest) - bits)
    y = round(x / unit) * unit  # ties to even
    infinite = abs(y) >= _power(largest + 1)
    return (math.inf if y > 0 else -math.inf) if infinite else float(y)


def _rounded32(x: Fraction) -> float:
    return _nearest(x, 23, -126, 127)


def exact_step(unit: MatrixUnit, a, b, c: float, scales=None) -> float:
    """One step by the definition in MatrixUnit's docstring, in rational numbers."""
    of = scales or ([1.0] * len(a), [1.0] * len(b))
    if unit.method == "fma" and np.isfinite([*a, *b, c]).all():
        for x, y in zip(a, b, strict=True):
            s = Fraction(x) * Fraction(y) + Fraction(c)
            c = _nearest(s, 52, -1022, 1023) if unit.result == FP64 else _rounded32(s)
        return c
    if unit.method == "pairwise":
        return _pairwise(unit, a, b, c)
    with np.errstate(all="ignore"):
        # an infinite accumulator stays so if a finite product overflows
        kept = np.isinf(c) & (unit.method == "fma") & np.isfinite(a)
        products = np.where(kept, np.sign(a), a) * b * of[0] * of[1]
        plain = float(np.sum(products) + c)
    if not math.isfinite(plain):
        return plain
    terms = _terms(unit, a, b, of)
    if unit.method == "fused":
        terms.append((Fraction(c), _exponent(c, -14 if unit.result == FP16 else -126)))
        top = max(e for _, e in terms)
        s = _cut_off([x for x, _ in terms], top - unit.fraction_bits)
        if unit.result == FP16:
            return _nearest(s, 10, -14, 15)
        bits = unit.result.mantissa_bits
        y = _cut_off([s], _exponent(s, -126) - bits) if s else Fraction(0)
        return (math.inf if y > 0 else -math.inf) if abs(y) >= 2**128 else float(y)
    return _two_stage(unit, terms, c)


def _pairwise(unit: MatrixUnit, a, b, c: float) -> float:
    def flushed(x: float) -> float:
        return 0.0 if unit.flush and abs(x) < 2.0**-126 else x

    def added(x: float, y: float) -> float:
        finite = math.isfinite(x) and math.isfinite(y)
        return flushed(_rounded32(Fraction(x) + Fraction(y))) if finite else x + y

    def multiplied(x: float, y: float) -> float:
        finite = math.isfinite(x) and math.isfinite(y)
        return flushed(_rounded32(Fraction(x) * Fraction(y))) if finite else x * y

    least = float(unit.left.element.smallest_normal)
    a, b = ([0.0 if unit.flush and abs(v) < least else v for v in x] for x in (a, b))
    sums = [multiplied(x, y) for x, y in zip(a, b, strict=True)]
    while len(sums) > 1:
        sums = [added(x, y) for x, y in zip(sums[::2], sums[1::2], strict=True)]
    return added(flushed(c), sums[0])


def _terms(unit, a, b, of) -> list[tuple[Fraction, int]]:
    left, right = unit.left.element, unit.right.element
    found = []
    for x, y, s, t in zip(a, b, *of, strict=True):
        e = _exponent(x, left.min_exponent) + _exponent(y, right.min_exponent)
        shift = 0
        if isinstance(unit.left, BlockFormat):
            shift = sum(_exponent(v, unit.left.scale.min_exponent) for v in (s, t))
        product = _product(x, y)
        if shift or s != 1 or t != 1:
            product *= Fraction(s) * Fraction(t)
        found.append((product, shift if unit.terms == 64 else e + shift))
    if unit.terms == 64:
        groups = [found[i : i + 16] for i in range(0, 64, 16)]
        found = [(sum(x for x, _ in g), g[0][1]) for g in groups]
    return found


def _two_stage(unit: MatrixUnit, terms: list[tuple[Fraction, int]], c: float) -> float:
    over = {x > 0 for x, _ in terms if abs(x) >= 2**128}
    if over:
        return math.nan if len(over) == 2 else math.inf if over.pop() else -math.inf
    fp8 = unit.method == "two_stage_fp8"
    groups = [terms[0::2], terms[1::2]] if fp8 else [terms]
    tops = [max(e for _, e in g) for g in groups]
    sums = [_cut_off([x for x, _ in g], top - 24) for g, top in zip(groups, tops, strict=True)]
    top = max(tops)
    if fp8:
        unit24 = _power(top - 24)
        sums = [math.floor(s / unit24) * unit24 for s in sums]
    own = _exponent(c, -126)
    most = max(top, own)
    fine, coarse = _power(most - 31), _power(most - 24)
    kept = math.floor(Fraction(c) / coarse) * coarse if not fp8 or own >= most - 25 else 0
    return _rounded32(math.floor(sum(sums) / fine) * fine + kept)


def exact(unit: MatrixUnit, a, b, c, scales) -> np.ndarray:
    found = []
    for i in range(len(a)):
        total, x, y = float(c[i]), a[i], b[i]
        if unit.left.element == TF32:
            x, y = (
                (v.astype(np.float32).view(np.int32) & np.int32(-1 << 13)).view(np.float32)
                for v in (x, y)
            )
        of = None
        if scales is not None:
            repeated = zip(scales, (unit.left, unit.right), strict=True)
            of = [np.repeat(np.abs(s[i]), f.size) for s, f in repeated]
        for k in range(0, len(x), unit.terms):
            part = slice(k, k + unit.terms)
            step = None if of is None else [s[part] for s in of]
            total = exact_step(unit, [float(v) for v in x[part]], [float(v) for v in y[part]],
                               total, step)  # fmt: skip
        found.append(total)
    return np.array(found)


# -- MMA-Sim -------------------------------------------------------------------------------------


def mmasim(unit: MatrixUnit, a, b, c, scales) -> np.ndarray | None:
    """The same by MMA-Sim; None for operands that it doesn't have."""
    import torch

    arithmetic = importlib.import_module("mmasim.simulator.arithmetic")
    dtypes = {
        "fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32,
        "fp32": torch.float32, "fp64": torch.float64, "e4m3fn": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz,
        "e5m2fnuz": torch.float8_e5m2fnuz,
    }  # fmt: skip
    left, right = unit.left.element.name, unit.right.element.name
    grouped = unit.terms == 64
    if not grouped and not {left, right} <= dtypes.keys():
        return None
    kinds = (torch.float32, torch.float32) if grouped else (dtypes[left], dtypes[right])
    scale_type = torch.float8_e8m0fnu
    if grouped and unit.left.scale.name == "e4m3fn":
        scale_type = torch.float8_e4m3fn
    of_result = {"fp16": torch.float16, "fp64": torch.float64}.get(unit.result.name, torch.float32)
    output = {"fp16": "f16", "e8m13": "f32_e8m13"}.get(unit.result.name, "f32")
    found = []
    for i in range(len(a)):
        x, y = (torch.tensor(v[i]).to(kind) for v, kind in zip((a, b), kinds, strict=True))
        total = torch.tensor(c[i]).to(of_result)
        if left == "tf32":
            x, y = arithmetic.truncate_to_tf32(x), arithmetic.truncate_to_tf32(y)
        if unit.flush:
            x, y, total = (arithmetic.flush_denormal(v) for v in (x, y, total))
        for k in range(0, len(x), unit.terms):
            xs, ys = x[k : k + unit.terms], y[k : k + unit.terms]
            if unit.method == "fma":
                total = arithmetic.fma(xs[0], ys[0], total)
            elif unit.method == "pairwise":
                s = arithmetic.pairwise_dot(xs.float(), ys.float(), unit.flush)
                total = total + s
                if unit.flush:
                    total = arithmetic.flush_denormal(total, keep_sign=True)
            elif unit.method == "fused" and scales is None:
                total = arithmetic.nv_fused_dot_add(xs, ys, total, unit.fraction_bits, output)
            elif unit.method == "fused":
                size = unit.left.size
                own = [
                    torch.tensor(s[i][k // size : (k + unit.terms) // size]).to(scale_type)
                    for s in scales
                ]
                if grouped:
                    total = arithmetic.nv_fused_dot_add_with_block_scale(
                        xs, ys, total, *own, unit.fraction_bits
                    )
                else:
                    total = arithmetic.nv_fused_dot_add(
                        xs, ys, total, unit.fraction_bits, output, own[0][0], own[1][0]
                    )
            else:
                fp8 = unit.method == "two_stage_fp8"
                total = torch.tensor(
                    arithmetic.amd_fused_dot_rd_add(xs, ys, total, 24, fp8), dtype=torch.float32
                )
        found.append(total.item())
    return np.array(found)


# -- the proof -----------------------------------------------------------------------------------


def differing(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Indices where numbers differ in value, sign of zero apart, or one of them is NaN."""
    return np.flatnonzero(~((got == want) | (np.isnan(got) & np.isnan(want))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="dot products for each unit")
    parser.add_argument("--mmasim", type=Path, help="a checkout of microsoft/MMA-Sim")
    parser.add_argument("--record", type=int, help="record so many dot products for each mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--units", default="", help="only units whose label has this text")
    options = parser.parse_args()
    if options.mmasim:
        sys.path.insert(0, str(options.mmasim))
    recorded, wrong = {}, 0
    chosen = [u for u in all_units() if options.units in label(u)]
    if options.record:
        chosen = [u for u in chosen if u.architecture != "rtx blackwell"]
    for unit in chosen:
        rng = np.random.default_rng(options.seed)
        compared = dict.fromkeys(("exact", "MMA-Sim"), 0)
        failed = []
        for mode in MODES:
            count = options.record or max(1, options.count // len(MODES))
            given = operands(unit, mode, count, rng)
            got = ours(unit, *given)
            routes = {} if options.record else {"exact": exact(unit, *given)}
            if options.mmasim and (theirs := mmasim(unit, *given)) is not None:
                routes["MMA-Sim"] = theirs
            for route, want in routes.items():
                compared[route] += count
                for i in differing(got, want)[:1]:
                    failed.append(f"{mode}, {route}: row {i}: {got[i]!r}, expected {want[i]!r}")
            if options.record and "MMA-Sim" in routes:
                recorded |= _named(unit, mode, given, routes["MMA-Sim"])
        wrong += bool(failed)
        counts = ", ".join(f"{n} by {route}" for route, n in compared.items() if n)
        print(
            f"{label(unit)}: {counts}: {'equal' if not failed else '; '.join(failed)}", flush=True
        )
    if options.record and not wrong and not options.units:
        np.savez_compressed(RECORDED, **recorded)
    print(f"{wrong} units differ")
    return 1 if wrong else 0


def _named(unit: MatrixUnit, mode: str, given, want: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays to record, in the narrowest dtypes that hold them."""
    a, b, c, scales = given
    arrays = {"a": a, "b": b, "c": c, "want": want}
    if scales is not None:
        arrays |= {"left": scales[0], "right": scales[1]}
    small = {}
    for name, x in arrays.items():
        for dtype in (np.float16, np.float32):
            with np.errstate(all="ignore"):
                y = x.astype(dtype)
            if not differing(y.astype(np.float64), x).size:
                break
        else:
            y = x
        small[f"{label(unit)}|{mode}|{name}"] = y
    return small


if __name__ == "__main__":
    sys.exit(main())
