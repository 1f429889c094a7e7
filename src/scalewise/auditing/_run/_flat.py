"""Arrays kept flat and padded to one of few sizes, so that many shapes share compiled code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import Tracer, split_as
from ...primitives import having

SMALL = (1024, 65536)

# Primitives that act on each number separately, so that they may be computed on padded arrays.
ELEMENTWISE = having("elementwise") - having("chooses") - having("series") - having("own_dtype")
# Primitives that return their operand's numbers in the same order.
RESHAPES = having("same_order")


def padded_size(size: int) -> int:
    """Returns the padded length of an array of ``size`` numbers.

    At most a quarter is padding, except below 65,536 numbers, where two sizes serve all.
    """
    for small in SMALL:
        if size <= small:
            return small
    step = 1 << (size - 1).bit_length() - 3
    return -(-size // step) * step


def flat(x: jax.Array, length: int) -> jax.Array:
    """Returns ``x`` in one dimension, padded with zeros to ``length``.

    A concrete array is padded by NumPy on the host, so that nothing is compiled. One that a mesh
    splits becomes whole on each device.
    """
    x = split_as(x, None)
    if x.shape == (length,):
        return uncommitted(x)
    if isinstance(x, Tracer):
        x = x.reshape(-1)
        return x if x.size == length else jnp.pad(x, (0, length - x.size))
    row = np.asarray(x).reshape(-1)
    return jax.device_put(row if row.size == length else np.pad(row, (0, length - row.size)))


def uncommitted(x: Any) -> Any:
    """Returns an array without the device that it is bound to, if that is one.

    An array made by DLPack or ``jax.device_put`` is bound to its device. JAX compiles a program
    for it apart from one for arrays that aren't, which :mod:`._precompile` has compiled.
    """
    bound = isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed
    if not bound or len(x.devices()) > 1 or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jax.device_put(np.asarray(x))


def is_flat(x: jax.Array, shape: Sequence[int]) -> bool:
    """Returns True if ``x`` is the flat, padded form of an array of ``shape``."""
    return isinstance(x, jax.Array) and x.shape == (padded_size(math.prod(shape)),)


def unflat(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns the array of ``shape`` that ``x`` holds flat and padded."""
    if x.shape == tuple(shape):
        return x
    return x[: math.prod(shape)].reshape(shape)
