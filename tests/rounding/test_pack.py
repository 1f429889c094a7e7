"""pack and unpack compared with NumPy's packbits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly
from scalewise.formats import E2M1FN, E2M3FN, E3M2FN, p3109
from scalewise.rounding import cast, pack, unpack

FORMATS = [E2M1FN, E2M3FN, E3M2FN, p3109(3, 2), p3109(4, 2), p3109(6, 3)]


def by_bits(codes, width):
    """Returns the packed bytes of a row of codes, by NumPy."""
    bits = ((codes[:, None] >> np.arange(width)) & 1).astype(np.uint8)
    return np.packbits(bits.ravel(), bitorder="little")


@pytest.mark.parametrize("fmt", nightly(FORMATS, but=["e2m1fn", "e2m3fn"]))
@pytest.mark.parametrize("length", [5, *nightly([0, 1, 3, 4, 33])])
def test_pack_matches_packbits_and_unpack_inverts_it(fmt, length):
    codes = np.random.default_rng(length).integers(0, 2**fmt.bits, (3, length), np.uint8)
    got = pack(codes, fmt)
    assert got.dtype == jnp.uint8
    want = np.stack([by_bits(row, fmt.bits) for row in codes])
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(unpack(got, fmt, length), codes)
    np.testing.assert_array_equal(jax.jit(lambda c: pack(c, fmt))(codes), want)


@pytest.mark.parametrize("shape", [(3, 0), *nightly([((0, 7),), ((2, 0, 5),)])])
def test_empty_arrays_keep_their_shapes(shape):
    codes = np.zeros(shape, np.uint8)
    packed = pack(codes, "e2m1fn")
    assert packed.shape == (*shape[:-1], -(-shape[-1] // 2))
    assert unpack(packed, "e2m1fn", shape[-1]).shape == shape
    for fmt in ("e2m1fn", "mxfp4", "nvfp4"):
        assert sw.quantize(jnp.zeros(shape), fmt).value().shape == shape


def test_pack_accepts_the_formats_own_dtype():
    x = np.array([0.5, -6.0, 1.5], np.float32)
    codes = cast(jnp.asarray(x), E2M1FN)
    want = pack(codes, E2M1FN)
    for data in (x.astype(E2M1FN.dtype), jnp.asarray(x).astype(E2M1FN.dtype)):
        np.testing.assert_array_equal(pack(data, "e2m1fn"), want)


def test_pack_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="pack: fp16 has 16 bits; expected a format of 3, 4"):
        pack(np.zeros(3, np.uint8), "fp16")
    with pytest.raises(ValueError, match="e2m1fn are from 1 to 16; expected 0 to 15"):
        pack(np.array([1, 16]), E2M1FN)
    with pytest.raises(TypeError, match="codes are float32; expected integers or float4"):
        pack(np.zeros(3, np.float32), E2M1FN)
    with pytest.raises(ValueError, match="no dimension"):
        pack(np.uint8(1), E2M1FN)
    with pytest.raises(ValueError, match=r"shape \(2,\); expected 3 bytes"):
        unpack(np.zeros(2, np.uint8), E2M3FN, 4)
    with pytest.raises(TypeError, match="packed is int32; expected uint8"):
        unpack(np.zeros(2, np.int32), E2M1FN, 4)
