"""Every FP16 and BF16 number, cast to every format in every deterministic rounding and saturation.

All 2^16 codes of both dtypes by ``cast`` and ``round_to``, compared with ``Format.encode``, for
every format of up to 32 bits in the catalogue. Names of formats or roundings restrict it.
"""

from __future__ import annotations

import itertools
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from proofs import records
from proofs.oracle import DETERMINISTIC
from scalewise.formats import CATALOGUE, SATURATE, Format
from scalewise.formats._roundings import SCALE_ROUNDINGS
from scalewise.rounding import cast, round_to

FORMATS = {name: fmt for name, fmt in CATALOGUE.items() if fmt.bits <= 32}
DTYPES = (jnp.float16, jnp.bfloat16)
CASES = [
    (name, rounding)
    for name, fmt in FORMATS.items()
    for rounding in (*DETERMINISTIC, *(() if fmt.zero else SCALE_ROUNDINGS))
]


def sources(dtype: Any) -> np.ndarray:
    """Returns every number of a 16-bit dtype in the order of codes."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _both(x: jax.Array, fmt: Format, rounding: str, saturate: Any) -> tuple[jax.Array, jax.Array]:
    options = {"rounding": rounding, "saturate": saturate}
    return cast(x, fmt, **options), round_to(x, fmt, **options)


def check(fmt: Format, rounding: str, saturate: Any, dtype: Any) -> tuple[int, list[str]]:
    """Compares the casts of all numbers of a dtype; returns counts and the first mismatches."""
    x = sources(dtype)
    stored, values = (np.asarray(y) for y in _both(jnp.asarray(x), fmt, rounding, saturate))
    codes = stored if stored.dtype == fmt.code_dtype else stored.view(fmt.code_dtype)
    want_codes = fmt.encode(x, rounding=rounding, saturate=saturate)
    want = fmt.decode(want_codes)
    same = (codes == want_codes) | (np.isnan(fmt.decode(codes)) & np.isnan(want))
    # NaN stays NaN in a format without NaN
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide, got = x.astype(np.float64), values.astype(np.float64)
    want = np.where(np.isnan(wide), np.nan, want)
    alike = (got == want) & (np.signbit(got) == np.signbit(want))
    alike |= np.isnan(got) & np.isnan(want)
    what = f"{np.dtype(dtype)} to {fmt.name}, {rounding}, saturate={saturate}"
    wrong = [
        f"cast of {what}: {wide[i]!r} has code {codes[i]:#x} for {want_codes[i]:#x}"
        for i in np.flatnonzero(~same)[:3]
    ]
    wrong += [
        f"round_to of {what}: {wide[i]!r} is {got[i]!r} for {want[i]!r}"
        for i in np.flatnonzero(~alike)[:3]
    ]
    return 2 * len(x), wrong


def prove(case: tuple[str, str]) -> dict[str, Any]:
    """Checks one format and rounding for all saturations and both dtypes."""
    began, compared, wrong = time.monotonic(), 0, []
    for saturate, dtype in itertools.product(SATURATE, DTYPES):
        count, differ = check(FORMATS[case[0]], case[1], saturate, dtype)
        compared, wrong = compared + count, wrong + differ
    seconds = round(time.monotonic() - began, 1)
    return {"case": "-".join(case), "compared": compared, "wrong": wrong, "seconds": seconds}


def main() -> int:
    known = {word for case in CASES for word in case}
    if unknown := [a for a in sys.argv[1:] if a not in known]:
        sys.exit(f"unknown {unknown}: expected some of {', '.join(sorted(known))}")
    names, roundings = (
        [c[i] for c in CASES if c[i] in sys.argv[1:]] or [c[i] for c in CASES] for i in (0, 1)
    )
    cases = [c for c in CASES if c[0] in names and c[1] in roundings]
    return records.run(Path(__file__), cases, prove, "-".join)


if __name__ == "__main__":
    sys.exit(main())
