"""Casts to FP8 by integer operations and by XLA's convert give the same codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.formats import SATURATE
from scalewise.rounding import CONVERTED, converted, nearest_codes


def numbers(fmt):
    """Returns the format's numbers, their midpoints, neighbours of both, and special values."""
    values = np.unique(np.abs(fmt.values()[np.isfinite(fmt.values())])).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    beyond = values[-1] + (values[-1] - values[-2]) / 2
    edges = np.concatenate([values, middles, [beyond, 3e38, 1e-45, 1e-40]]).astype(np.float32)
    near = np.concatenate([np.nextafter(edges, np.float32(d)) for d in (-np.inf, np.inf)])
    x = np.concatenate([edges, near, np.float32([np.inf, np.nan])])
    return np.concatenate([x, -x])


@pytest.mark.parametrize("saturate", SATURATE)
@pytest.mark.parametrize("name", sorted(CONVERTED))
def test_converted_matches_nearest_codes(name, saturate):
    fmt = sw.format(name)
    x = jnp.asarray(numbers(fmt))
    got = np.asarray(jax.jit(converted, static_argnums=(1, 2))(x, fmt, saturate))
    want = np.asarray(jax.jit(nearest_codes, static_argnums=(1, 2))(x, fmt, saturate))
    want = want.view(fmt.dtype)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint8)[finite], want.view(np.uint8)[finite])


def test_only_gpu_and_tpu_programs_contain_the_convert():
    lowered = jax.jit(lambda x: sw.cast(x, "e4m3fn", saturate=True)).trace(jnp.ones(8))
    texts = [lowered.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")]
    convert = [("(tensor<8xf32>) -> tensor<8xf8E4M3FN>" in t) for t in texts]
    assert convert == [False, True, True]
