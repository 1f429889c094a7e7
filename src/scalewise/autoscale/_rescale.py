"""Points, set by hand, at which a scale is found anew from the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..interpret import Equation

SCOPE = "scalewise.rescale"


@jax.custom_jvp
def rescale(x: jax.Array) -> jax.Array:
    """``x`` itself; under ``store="every_op"`` with its scale found anew from the data, forward.

    For recipes that only propagate scales (``recipes.scalify``): where a program's numbers leave
    unit size, after a long chain of products say. By the recipe's ``rescale``, or the root mean
    square. The gradient passes as it is.

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
    """``x`` itself; its gradient's scale is found anew from the data, as :func:`rescale` does."""
    return x


rescale_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (_marked(gradient),))


def _marked(x: jax.Array) -> jax.Array:
    with jax.named_scope(SCOPE):
        return jnp.copy(x)


def is_rescale(equation: Equation) -> bool:
    """Whether an equation is such a point."""
    return equation.name.startswith("copy") and SCOPE in equation.scope
