"""Random arrays without a compilation for each shape."""

import math

import jax
import numpy as np

FEW = 2**15


def normal(key: int | jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
    """Returns ``jax.random.normal`` of a key, or of the key made from a seed.

    JAX compiles that function once for each shape, which takes up to 1.5 seconds. A number
    depends only on the key and its place, so arrays of at most ``FEW`` are cut from one shape.
    """
    key = jax.random.key(key) if isinstance(key, int) else key
    size = math.prod(shape)
    drawn = np.asarray(jax.random.normal(key, (max(size, FEW),)))
    return jax.device_put(drawn[:size].reshape(shape))
