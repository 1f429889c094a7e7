"""Arrays kept flat and padded to one of few sizes, so that many shapes share compiled code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

SMALL = (1024, 65536)

# What acts on each number by itself: it may be computed flat, padding and all.
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh", "cbrt",
    "ceil", "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expm1", "floor", "integer_pow", "lgamma", "log", "log1p", "logistic",
    "mul", "neg", "pow", "rem", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "sub",
    "tan", "tanh",
})  # fmt: skip
# The same numbers in the same order.
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient"})


def room(size: int) -> int:
    """The padded size: at most a quarter more than needed, but for what is small anyway."""
    for small in SMALL:
        if size <= small:
            return small
    step = 1 << (size - 1).bit_length() - 3
    return -(-size // step) * step


def flat(x: Any, length: int) -> Any:
    """``x`` in one dimension, zeros behind it; on the host where it is known: nothing compiles."""
    if x.shape == (length,):
        return x
    if isinstance(x, Tracer):
        x = x.reshape(-1)
        return x if x.size == length else jnp.pad(x, (0, length - x.size))
    x = np.asarray(x).reshape(-1)
    return jax.device_put(x if x.size == length else np.pad(x, (0, length - x.size)))


def is_flat(x: Any, shape: Sequence[int]) -> bool:
    """Whether an array of ``shape`` is kept flat (or is of one dimension anyway)."""
    return isinstance(x, jax.Array) and x.shape == (room(math.prod(shape)),)


def unflat(x: Any, shape: Sequence[int]) -> Any:
    """The array itself again."""
    if x.shape == tuple(shape):
        return x
    return x[: math.prod(shape)].reshape(shape)
