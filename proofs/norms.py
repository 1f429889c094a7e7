"""Compares every method of ``l2_norm`` with exact sums on vectors chosen to break it.

``python -m proofs.norms`` writes ``docs/norms.csv`` (the torture set) and ``docs/norms_sweep.csv``
(error against magnitude), in minutes; names of formats restrict it to those and print only.
``python -m proofs.norms dominated`` proves that no method of ours fails where epsilon is most of
the sum.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from scalewise.formats import CATALOGUE, Format, ulp
from scalewise.formats import format as format_
from scalewise.ops import NORM_METHODS, l2_norm, ulp_bound

FORMATS = ("fp16", "bf16", "e5m2", "e4m3", "dlfloat16")
LENGTHS = (1, 2, 3, 16, 256, 4096, 65536)
SEEDS = 3
DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = (
    "format", "n", "case", "method", "worst", "mean", "overflows", "flushes", "failures", "count",
)  # fmt: skip
OURS = ("auto", "power_of_two", "two_segment_overflow_corrected", "two_segment_underflow_corrected")
SWEEP = ("format", "n", "log2", "method", "worst")


def rounded(fmt: Format, x: np.ndarray) -> np.ndarray:
    """Rounds numbers to the format, in float64."""
    return fmt.decode(fmt.encode(x, saturate=True))


def cases(fmt: Format, n: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns vectors (seeds, n) of numbers of the format, and an epsilon each, by name.

    Their norms are in the range of the format, so any overflow or underflow is the method's fault.
    """
    rng = np.random.default_rng(n)
    shape = (SEEDS, n)
    small, top = float(fmt.smallest), float(fmt.max) / 2 / math.sqrt(n)
    normal = float(fmt.smallest_normal)
    low, high = math.log2(small), max(math.log2(top), math.log2(small) + 1)
    wide = 2.0 ** rng.uniform(low, high, shape)
    giant = np.full(shape, top / 4) * rng.uniform(0.5, 1, shape)
    giant[:, n // 2] = float(fmt.max) / 4
    plain: dict[str, np.ndarray] = {
        "constant": np.resize([min(1.0, top), top, min(3 * normal, top)], SEEDS)[:, None]
        + 0 * wide,
        "normal": rng.standard_normal(shape) * min(1.0, top / 8),
        "log-uniform": wide,
        "one giant": giant,
        "all subnormal": small * rng.integers(1, max(2, round(normal / small)) + 1, shape),
        "alternating": np.where(np.arange(n) % 2 == 0, min(top, 64.0), normal) + 0 * wide,
        "sorted up": np.sort(wide, axis=-1),
        "sorted down": -np.sort(-wide, axis=-1),
    }
    out = {name: (rounded(fmt, x), np.zeros(SEEDS)) for name, x in plain.items()}
    # an epsilon of the sum's own size, of either sign: the sum must be a number of the format
    x = rounded(fmt, rng.uniform(0.7, 1.4, shape) * min(1.0, math.sqrt(float(fmt.max) / 8 / n)))
    sums = np.array([math.fsum(r * r) for r in x])
    near = rounded(fmt, sums)
    below = np.where(near < sums, near, rounded(fmt, near - np.array([ulp(fmt, s) for s in near])))
    out["ε near Σx²"] = x, near
    out["ε near -Σx²"] = x, -below
    out |= dominated(fmt, rng, shape)
    return out


def dominated(
    fmt: Format, rng: np.random.Generator, shape: tuple[int, int]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns large, medium and small vectors whose epsilon is most of the sum."""
    top, normal = float(fmt.max), float(fmt.smallest_normal)
    eps = rounded(fmt, np.resize([top, math.sqrt(top * normal), normal], SEEDS))
    base = rng.standard_normal(shape) / math.sqrt(shape[1])
    tiny = float(fmt.smallest) * rng.integers(0, 3, shape)
    return {
        "ε of 4 Σx²": (rounded(fmt, base * np.sqrt(eps / 4)[:, None]), eps),
        "ε of 1000 Σx²": (rounded(fmt, base * np.sqrt(eps / 1000)[:, None]), eps),
        "ε beside tiny x": (tiny, eps),
        "ε alone": (0 * base, eps),
        "ε beyond half the largest": (
            rounded(fmt, base * math.sqrt(top / 2)),
            rounded(fmt, np.resize([top, 0.75 * top, 0.5 * top], SEEDS)),
        ),
    }


def exact_norm(x: np.ndarray, eps: float) -> float:
    """By a sum without error; its root errs by 2^-53, next to nothing of an ulp of ours."""
    return math.sqrt(math.fsum([*(x * x), eps]))


def errors(fmt: Format, got: np.ndarray, want: list[float]) -> list[float]:
    """Returns errors in ulps of the exact norm, infinite where a result isn't finite."""
    return [
        abs(g - w) / ulp(fmt, w) if math.isfinite(g) else math.inf
        for g, w in zip(got, want, strict=True)
    ]


def fails(fmt: Format, error: float, want: float) -> bool:
    """Returns True if an error in ulps isn't finite, or is above 1 % and 2 ulps."""
    return not error <= max(2.0, 0.01 * want / ulp(fmt, want))


def run(fmt: Format, method: str, x: np.ndarray, eps: np.ndarray) -> np.ndarray:
    """Returns the norms of rows of float64 numbers as float64."""
    with jax.enable_x64(True):
        norm = jax.jit(lambda v, e: l2_norm(v, e, axis=-1, method=method, arithmetic=fmt))
        return np.asarray(norm(jnp.asarray(x), jnp.asarray(eps)))


def torture(fmt: Format, n: int, methods: tuple[str, ...] = NORM_METHODS) -> Iterator[dict]:
    """Returns a record for each case and method."""
    table = cases(fmt, n)
    x = np.concatenate([v for v, _ in table.values()])
    eps = np.concatenate([e for _, e in table.values()])
    want = [exact_norm(v, e) for v, e in zip(x, eps, strict=True)]
    for method in methods:
        got = run(fmt, method, x, eps)
        each = errors(fmt, got, want)
        for i, name in enumerate(table):
            rows = slice(i * SEEDS, (i + 1) * SEEDS)
            finite = [e for e in each[rows] if math.isfinite(e)]
            yield {
                "format": fmt.name,
                "n": n,
                "case": name,
                "method": method,
                "worst": f"{max(finite, default=math.nan):.4g}",
                "mean": f"{sum(finite) / max(len(finite), 1):.4g}",
                "overflows": SEEDS - len(finite),
                "flushes": sum(g == 0 < w for g, w in zip(got[rows], want[rows], strict=True)),
                "failures": sum(map(partial(fails, fmt), each[rows], want[rows])),
                "count": SEEDS,
            }


def sweep(fmt: Format, n: int, methods: tuple[str, ...] = NORM_METHODS) -> Iterator[dict]:
    """Returns a record for normal vectors of each magnitude whose norm the format represents."""
    low = math.floor(math.log2(float(fmt.smallest)))
    high = math.floor(math.log2(float(fmt.max) / math.sqrt(n))) - 1
    scales = np.unique(np.linspace(low, max(high, low + 1), 41).round(1))
    base = np.random.default_rng(n).standard_normal((4, n))
    x = rounded(fmt, (base[None] * 2.0 ** scales[:, None, None]).reshape(-1, n))
    want = [exact_norm(v, 0.0) for v in x]
    for method in methods:
        each = np.reshape(errors(fmt, run(fmt, method, x, np.zeros(len(x))), want), (-1, 4))
        for scale, worst in zip(scales, each.max(axis=1), strict=True):
            yield {
                "format": fmt.name,
                "n": n,
                "log2": scale,
                "method": method,
                "worst": f"{worst:.4g}",
            }


def pairs(fmt: Format, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of n numbers and an epsilon each, of every magnitude, that is most of the sum."""
    rng = np.random.default_rng(n)
    low = max(2 * math.ceil(fmt.min_exponent / 2), 2 * fmt.min_exponent)
    exponents = np.arange(max(low, fmt.min_exponent - fmt.mantissa_bits), fmt.max_exponent + 1)
    exponents = exponents[:: max(1, len(exponents) // 40)]
    last = 2 - float(fmt.eps)
    eps = rounded(fmt, np.outer([1.0, rng.uniform(1, last), last], 2.0**exponents).ravel())
    eps = np.unique(eps[eps > 0])
    share = np.concatenate([[0, 0.25, 0.5], 2.0 ** np.arange(-60.0, -2, 6)])
    base = rng.standard_normal((len(eps), len(share), n))
    base /= np.sqrt(np.square(base).sum(-1, keepdims=True))
    x = rounded(fmt, base * np.sqrt(eps[:, None] * share)[..., None])
    eps = np.broadcast_to(eps[:, None], x.shape[:2]).ravel()
    x = x.reshape(-1, n)
    kept = np.square(x).sum(-1) <= eps
    return x[kept], eps[kept]


def bound(fmt: Format, method: str, n: int) -> float:
    """Returns the allowed error in ulps of a norm whose epsilon is most of the sum."""
    if method == "auto":
        return ulp_bound(fmt, n)
    if method != "power_of_two":  # may flush squares that count, or a subnormal root
        return math.inf
    # additions one upon the other and the root; and what falls off below, of x and of its square
    lost = 2 * n * float(fmt.smallest) * 2.0 ** (fmt.precision - fmt.max_exponent + 2)
    return 2 + max(n - 1, 0).bit_length() / 2 + lost


def prove(fmt: Format, lengths: tuple[int, ...] = (1, 17)) -> tuple[int, list[str]]:
    """Compares our methods where epsilon dominates; returns the count and the mismatches."""
    compared, wrong = 0, []
    for n in lengths:
        x, eps = pairs(fmt, n)
        want = [exact_norm(*row) for row in zip(x, eps, strict=True)]
        for method in OURS:
            both = run(fmt, method, np.concatenate([x, x]), np.concatenate([eps, -eps]))
            got, negative = both[: len(x)], both[len(x) :]
            each, sums = errors(fmt, got, want), np.square(x).sum(-1)
            compared += 2 * len(x)
            wrong += [
                f"{fmt.name} {method}(|x| <= {abs(v).max():g}, {e:g}) is {g:g}, not {w:g}"
                for v, e, g, w, error in zip(x, eps, got, want, each, strict=True)
                if not error <= bound(fmt, method, n) or not g > 0
            ]
            wrong += [
                f"{fmt.name} {method}(|x| <= {abs(v).max():g}, {-e:g}) is {g:g}, not NaN"
                for v, e, g, s in zip(x, eps, negative, sums, strict=True)
                if s < e and not math.isnan(g)
            ]
    return compared, wrong


def dominated_everywhere() -> None:
    """Runs ``prove`` for every signed format of the catalogue of up to 25 significant bits."""
    total, mismatches = 0, 0
    for fmt in CATALOGUE.values():
        if not (fmt.zero and fmt.signed and fmt.precision <= 25):
            continue
        compared, wrong = prove(fmt)
        total, mismatches = total + compared, mismatches + len(wrong)
        print(f"{fmt.name:<12} {compared:6,} norms with a dominating epsilon", flush=True)
        print("\n".join(wrong[:3]), end="\n" * bool(wrong))
    print(f"{total:,} norms with a dominating epsilon: {mismatches} mismatches")
    sys.exit(mismatches > 0)


def write(path: Path, columns: tuple[str, ...], records: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def main() -> None:
    names = sys.argv[1:]
    if names == ["dominated"]:
        dominated_everywhere()
    records, curves = [], []
    for name in names or FORMATS:
        fmt = format_(name)
        for n in LENGTHS:
            new = list(torture(fmt, n))
            records += new
            for method in NORM_METHODS:
                mine = [r for r in new if r["method"] == method]
                worst = max((float(r["worst"]) for r in mine), default=math.nan)
                lost = sum(r["overflows"] for r in mine), sum(r["flushes"] for r in mine)
                print(
                    f"{name:<10} n={n:<6} {method:<30} {worst:10.4g} ulp, lost {lost}", flush=True
                )
            if n in (16, 4096):
                curves += sweep(fmt, n)
    if not names:
        write(DOCS / "norms.csv", COLUMNS, records)
        write(DOCS / "norms_sweep.csv", SWEEP, curves)


if __name__ == "__main__":
    main()
