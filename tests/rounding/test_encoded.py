"""decode compared with NumPy's decode for all codes, and arrays stored as codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arrays import normal
from cases import nightly, refused
from scalewise import Format, cast, round_to
from scalewise.formats import CATALOGUE, p3109
from scalewise.rounding import EncodedArray, decode, encode

FORMATS = [
    *(f for f in CATALOGUE.values() if f.bits <= 19),
    *(p3109(8, p) for p in range(1, 8)),
    p3109(12, 4),
    p3109(16, 8, extended=False),
    p3109(12, 5, signed=False),
    Format("e8m3b130", 8, 3, bias=130),
    Format("e3m0", 3, 0, nan="all_ones"),
    Format("e1m3", 1, 3, infinities=False, nan="none"),
    Format("e5m2n", 5, 2, subnormals=False),
    Format("e6m9", 6, 9),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_decode_matches_numpys_decode_for_every_code(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint32)
    got = np.asarray(jax.jit(lambda c: decode(c, fmt))(codes))
    want = fmt.decode(codes).astype(np.float32)
    same = got.view(np.uint32) == want.view(np.uint32)
    assert (same | (np.isnan(got) & np.isnan(want))).all()


@pytest.mark.parametrize(
    "name", ["e2m3fn", "e4m3fn", *nightly(["e2m1fn", "e3m2fn", "dlfloat16", "tf32"])]
)
def test_encode_and_astype_match_round_to(name):
    x = normal(0, (3, 7))
    stored = jax.jit(lambda x: encode(x, name))(x)
    assert stored.shape == x.shape
    np.testing.assert_array_equal(stored.astype(jnp.float32), round_to(x, name))
    if isinstance(stored, EncodedArray):
        assert (stored.ndim, stored.size, stored.dtype) == (2, 21, np.float32)
        rows = jax.vmap(lambda row: row.astype(jnp.float32))(stored)
        np.testing.assert_array_equal(rows, round_to(x, name))
        np.testing.assert_array_equal(np.asarray(stored), round_to(x, name))


def test_packed_arrays_have_the_expected_size():
    x = jnp.ones((5, 64))
    assert encode(x, "e2m1fn").nbytes == 5 * 32
    assert encode(x, "e2m3fn").nbytes == 5 * 48
    assert encode(x, "dlfloat16").nbytes == 5 * 128


test_invalid_arguments_are_rejected = refused(
    (lambda: decode(jnp.ones(3), "fp16"), TypeError, "codes of fp16 are float32; expected in"),
    (lambda: decode([3, 300], "e4m3fn"), "from 3 to 300; expected 0 to 255"),
    (lambda: decode(jnp.uint8([16]), "e2m1fn"), "from 16 to 16; expected 0 to 15"),
    (lambda: decode(-1, "fp32"), "from -1 to -1; expected 0 to 4294967295"),
    (lambda: decode(jnp.ones(3, jnp.uint32), "fp64"), "represent all numbers of fp64"),
    *(
        (lambda f=f: EncodedArray(jnp.zeros(3, jnp.uint16), f, 0), "float32 doesn't represent all")
        for f in (Format("low", 6, 9, bias=142), Format("high", 9, 3))
    ),
    (lambda: cast(jnp.ones(3), Format("long", 11, 40)),
     "cast: codes of long have 52 bits; pass x as float64"),
    (lambda: encode(jnp.float32(1), "e2m1fn"), "encode: x is a scalar; expected"),
)  # fmt: skip


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1fn", "fp16"])
def test_codes_in_a_jax_array_are_decoded_outside_of_jit_too(fmt):
    fmt = CATALOGUE[fmt]
    codes = np.arange(0, 2**fmt.bits, 7, np.uint8 if fmt.bits <= 8 else np.uint16)
    np.testing.assert_array_equal(decode(jnp.asarray(codes), fmt), fmt.decode(codes))


def test_codes_of_more_bits_than_the_numbers_are_those_of_the_same_numbers():
    fmt, x = Format("long", 11, 40), normal(0, (5,))
    with jax.enable_x64(True):
        got = cast(x, fmt)
    np.testing.assert_array_equal(fmt.decode(np.asarray(got)), np.asarray(x))
