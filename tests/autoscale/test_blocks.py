"""Operands in blocks: a CPU's program rounds in steps of its own, and has the same numbers."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import normal
from tests.cases import nightly

import scalewise as sw
from scalewise.autoscaling._blocks import in_blocks
from scalewise.autoscaling._keys import operand_key, random_bits
from scalewise.autoscaling.recipes import FP8_BLOCKS
from scalewise.formats import MXFP4, NVFP4

STRATEGIES = {
    "nvfp4": (NVFP4, None, "nearest_even", 1),
    "nvfp4 squares": (NVFP4, None, "nearest_even", 16),
    "nvfp4 stochastic": (NVFP4, sw.Amax(False, 17 / 16), "stochastic", 1),
    "four over six": (NVFP4, sw.FourOverSix(), "nearest_even", 1),
    "ms eden": (NVFP4, sw.MsEden(), "nearest_even", 1),
    "mxfp4 stochastic": (MXFP4, sw.Mx("rceil"), "stochastic", 1),
    "quest": (MXFP4, sw.Quest(), "nearest_even", 1),
    "fp8 squares": (FP8_BLOCKS, None, "nearest_even", 128),
}


def cases():
    for i, (shape, axis) in enumerate([((6, 40), 1), ((40, 6), 0)]):
        x = np.asarray(normal(i, shape)) * np.exp2(
            np.random.default_rng(i).integers(-30, 30, shape)
        )
        y, z = x.copy(), x * np.float32(1e-37)
        y.flat[3], y.flat[50] = np.inf, np.nan
        for a in (x, y, z, 0 * x):
            yield jnp.asarray(a, jnp.float32), axis


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *nightly([jnp.float32])])
@pytest.mark.parametrize("name", nightly(STRATEGIES, but=["nvfp4 squares", "mxfp4 stochastic"]))
def test_a_jitted_program_has_the_numbers_of_the_copy(name, dtype):
    fmt, scaling, rounding, rows = STRATEGIES[name]
    draws = rounding == "stochastic" or (scaling is not None and scaling.draws)
    key = jax.random.key(3) if draws else None

    def rounded(x, axis):
        tile = (1 - axis, rows) if rows > 1 else None
        return in_blocks(x.astype(dtype), fmt, scaling, axis, rounding, tile, key)

    jitted = jax.jit(lambda x, axis: rounded(x, axis).value(jnp.float32), static_argnums=1)
    for x, axis in cases():
        exact = np.asarray(rounded(x, axis).copy.value(), np.float64)  # from codes and scales
        own = exact.astype(jnp.bfloat16) if dtype == jnp.bfloat16 else exact
        np.testing.assert_array_equal(jitted(x, axis), np.asarray(own, np.float32))


def test_random_numbers_are_those_of_jax():
    key, (first, second) = jax.random.key(7), jax.random.key_data(jax.random.key(7))
    np.testing.assert_array_equal(
        random_bits(first, second, jnp.arange(99, dtype=jnp.uint32)),
        jax.random.bits(key, (99,), jnp.uint32),
    )
    x = jnp.asarray(normal(0, (4, 5)))
    place = jax.random.fold_in(key, zlib.crc32(b"1/0"))
    summed = np.asarray(x).view(np.uint32).sum(dtype=np.uint32)
    expected = jax.random.fold_in(place, summed)
    assert (jax.random.key_data(operand_key(key, "1/0", x)) == jax.random.key_data(expected)).all()
