"""Finds scales from data and rounds, for ``rounds="every_op"``, also where users ask for it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..interpret import Equation
from ..scaled import ZERO_EXPONENT, is_known, scaled_down
from ._value import Exponent

TOP = 15  # log2 of the largest data: FP16 ends just below 2^16


def rescaled(options: tuple, data: jax.Array, exponent: jax.Array) -> list[jax.Array]:
    """Returns data with an exponent found from them; in float32, unless they are rounded, once."""
    measure, fmt, rounds = options
    down, found = scaled_down(data, measure, fmt)
    exponent = jnp.where(found == ZERO_EXPONENT, found, found + exponent)
    if not rounds:
        return [down, exponent]
    clip = bound_of(measure, data.size) > TOP
    return [to_format(down, data.astype(jnp.float32), fmt, clip=clip), exponent]


def rounded(options: tuple, data: jax.Array) -> list[jax.Array]:
    fmt, clip = options
    return [to_format(data, data, fmt, clip=clip)]


def bound_of(measure: str, size: int) -> int:
    """Returns log2 of the largest magnitude of ``size`` data after :func:`scaled_down`."""
    if measure == "l2" and is_known(size):  # one element may hold the whole sum of squares
        return 1 + math.ceil(math.log2(max(1, size)) / 2)
    return TOP if measure == "max" else TOP + 1


def to_format(data: jax.Array, signs: jax.Array, fmt: Format, *, clip: bool) -> jax.Array:
    """Rounds float32 data to the nearest numbers of FP16 or BF16, in its dtype.

    FP16's subnormals are kept. A number too small for them becomes the smallest one rather than
    zero, since it may be a divisor or the argument of a logarithm; ``signs`` are the numbers
    before they were scaled down, which may have made some of them zero. Rounds by
    ``reduce_precision``, which flushes subnormals, since XLA drops a convert there and back.
    With ``clip``, finite data may exceed the format's largest number, and become that.
    """
    if clip:
        data = clipped(data, float(fmt.max))
    whole = lax.reduce_precision(data, fmt.exponent_bits, fmt.mantissa_bits)
    if fmt.exponent_bits == 8:
        return whole.astype(fmt.dtype)
    size, unit = lax.abs(data), np.float32(float(fmt.smallest))
    few = lax.round(data * np.float32(1 / unit), lax.RoundingMethod.TO_NEAREST_EVEN) * unit
    few = lax.select(size < unit, lax.sign(signs).astype(jnp.float32) * unit, few)
    return lax.select(size < np.float32(float(fmt.smallest_normal)), few, whole).astype(fmt.dtype)


def clipped(data: jax.Array, top: float) -> jax.Array:
    limit = data.dtype.type(top)
    infinite = lax.abs(data) == data.dtype.type(np.inf)
    return lax.select(infinite, data, lax.clamp(-limit, data, limit))


def zeros_exponent(exponent: Exponent) -> jax.Array:
    """Returns :data:`ZERO_EXPONENT` for an exponent that roots or powers have made of it."""
    beyond = lax.abs(jnp.int32(exponent)) > -ZERO_EXPONENT // 4
    return jnp.where(beyond, np.int32(ZERO_EXPONENT), jnp.int32(exponent))


SCOPE = "scalewise.rescale"


@jax.custom_jvp
def rescale(x: jax.Array) -> jax.Array:
    """Returns ``x``; under ``rounds="every_op"``, finds its scale from data in the forward pass.

    For recipes that only propagate scales (``recipes.scalify``), where a program's numbers leave
    unit size, for example after many products. The scale is found by the recipe's ``rescale``, or
    by the root mean square. The gradient passes unchanged.

    Args:
        x: an array of floats.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> float(sw.autoscale(lambda x: rescale(x * x), "scalify")(jnp.float32(3)))
        9.0
    """
    return _marked(x)


@rescale.defjvp
def _(primals, tangents):
    return _marked(primals[0]), tangents[0]


@jax.custom_vjp
def rescale_gradient(x: jax.Array) -> jax.Array:
    """Returns ``x``; the scale of its gradient is found from the data, as by :func:`rescale`."""
    return x


rescale_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (_marked(gradient),))


def _marked(x: jax.Array) -> jax.Array:
    with jax.named_scope(SCOPE):
        return jnp.copy(x)


def is_rescale(equation: Equation) -> bool:
    return equation.name.startswith("copy") and SCOPE in equation.scope
