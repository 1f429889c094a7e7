"""round_to and cast for families of formats, on both sides of every threshold of every rounding.

A rounding is monotone, so its results just below and at each threshold determine all others. The
thresholds are those of ``proofs/oracle.py``, which shares no code with the casts.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proofs import oracle

from scalewise.formats import SATURATE, TF32, Format, p3109
from scalewise.rounding import cast, round_to

FORMATS = [
    p3109(3, 1),
    p3109(6, 1),
    p3109(8, 3),
    p3109(8, 6, signed=False),
    p3109(9, 1),
    p3109(12, 4),
    Format("e8m3b130", 8, 3, bias=130),
    Format("e3m0", 3, 0, nan="all_ones"),
    Format("e1m3", 1, 3, infinities=False, nan="none"),
    Format("e5m2n", 5, 2, subnormals=False),
]
SUBNORMAL = [  # their smallest numbers are subnormals of float32
    Format("gapped", 8, 2, subnormals=False),
    Format("flat", 8, 0, bias=130, subnormals=False, nan="all_ones"),
]
CASES = [
    *itertools.product(FORMATS, oracle.DETERMINISTIC),
    *itertools.product(SUBNORMAL, ("away_from_zero", "to_odd")),
]


@pytest.mark.parametrize(("fmt", "rounding"), CASES, ids=lambda v: getattr(v, "name", v))
def test_round_to_on_both_sides_of_every_threshold(fmt, rounding):
    for saturate in SATURATE if rounding == "nearest_even" else (False,):
        both = oracle.edges(fmt, rounding, saturate)
        bits, want = (np.concatenate(parts) for parts in zip(*both, strict=True))
        x = jnp.asarray(bits.view(np.float32))
        got = np.asarray(
            jax.jit(lambda x, s=saturate: round_to(x, fmt, rounding=rounding, saturate=s))(x)
        )
        got = np.where(np.isnan(got), np.uint32(oracle.NAN), got.view(np.uint32))
        wrong = np.flatnonzero(got != want)
        assert not wrong.size, [
            (x[i].item(), got[i : i + 1].view(np.float32), want[i : i + 1].view(np.float32))
            for i in wrong[:3]
        ]


@pytest.mark.parametrize("fmt", [*FORMATS, TF32], ids=lambda f: f.name)
def test_cast_returns_the_codes_of_the_formats_numbers(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint32)
    numbers = fmt.decode(codes)
    keep = ~np.isnan(numbers)
    got = np.asarray(cast(jnp.asarray(numbers[keep].astype(np.float32)), fmt))
    want = codes[keep]
    if not fmt.negative_zero:
        want = np.where(numbers[keep] == 0, 0, want)
    np.testing.assert_array_equal(got, want)
