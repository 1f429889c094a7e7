"""Marks where scales that are only propagated are found from the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..interpret import Equation

SCOPE = "scalewise.rescale"


@jax.custom_jvp
def rescale(x: jax.Array) -> jax.Array:
    """Returns ``x``; under :func:`scalify`, finds its scale from data in the forward pass.

    Where scales are only propagated and a program's numbers leave unit size, for example after many
    products. The scale is found by the measure that ``rescale`` names, or by the root mean square.
    The gradient passes unchanged.

    Args:
        x: an array of floats.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> float(sw.scalify(lambda x: rescale(x * x))(jnp.float32(3)))
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
