"""``autoscale``: runs any JAX function on (data, scale) pairs, stored as a recipe says."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from .._types import RecipeLike
from ..interpret import check_callable, transform
from ._boundaries import Boundaries
from ._delayed import WithHistory
from ._every_op import EveryOp
from ._exempt import EveryOpWithOverrides
from ._narrow import has_exponent, is_stored
from ._overrides import FormatOverrides
from ._recipe import Recipe
from .recipes import fp16
from .recipes import recipe as recipe_


def autoscale(f: Callable, recipe: RecipeLike = fp16) -> Callable:
    """Returns a function of the same signature that computes with narrow formats.

    Wrap the whole training step, with forward pass, backward pass and optimizer. Values in flight
    keep a wide dtype (``Recipe.flight``). Stored values (operands of contractions, values that the
    backward pass reads, the parts of the state that the recipe names) are rounded to their narrow
    format with a power-of-two scale found from the tensor itself, so that nothing overflows or
    saturates.

    Args:
        f: any function of pytrees made of JAX primitives. Float leaves of arguments may be plain
            arrays of any float dtype or ScaledArrays; leaves that aren't arrays are passed on.
        recipe: a :class:`Recipe`, or the name of one (``"fp16"``, ``"bf16"``, ``"fp8"``).

    Returns:
        The transformed function. It composes with ``jit``, ``grad`` (reverse mode from outside,
        any mode inside) and ``vmap``. Float outputs have ``f``'s own dtypes, with two exceptions.
        Outputs that ``recipe.state`` names are ScaledArrays (or SqrtStored). If an argument is a
        ScaledArray with one exponent, outputs are ScaledArrays whose exponents follow it.
        With delayed scaling (``recipes.fp8_delayed``) it is a :class:`WithHistory`, whose ``init``
        and ``step`` take the history as an argument.

    Raises:
        TypeError: ``f`` isn't callable, or returns an object that hides arrays (no pytree);
            ``recipe`` isn't a recipe.
        ValueError: no recipe has that name; floats pass through a Python function
            (``jax.pure_callback``, ``io_callback``) that the recipe's ``keep`` doesn't name.

    Example:
        >>> import jax, jax.numpy as jnp, scalewise as sw
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.square(x @ w))
        >>> w, x = jnp.full((4, 4), 256.0), jnp.full((8, 4), 1e3)
        >>> float(loss(w.astype(jnp.float16), x.astype(jnp.float16)))
        inf
        >>> float(sw.autoscale(loss, sw.recipes.fp16)(w, x))
        1048576000000.0
    """
    recipe = recipe_(recipe)
    check_callable(f, "autoscale")
    if recipe.scaling.source == "history":
        return WithHistory(f, recipe)

    @functools.wraps(f)
    def scaled(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_stored)
        chosen = interpretation(recipe, traced=any(has_exponent(x) for x in leaves))
        outs = transform(f, chosen, name="autoscale")(*args, **kwargs)
        if isinstance(chosen, Boundaries | EveryOpWithOverrides):
            chosen.overrides.check("autoscale")
        return outs

    return scaled


def interpretation(recipe: Recipe, *, traced: bool = False) -> Boundaries | EveryOp:
    """Returns the interpretation that :func:`autoscale` applies to a function.

    Args:
        recipe: with either value of ``store``.
        traced: whether an argument has an integer exponent of its own.
    """
    overrides = FormatOverrides(recipe.keep)
    if recipe.store != "every_op":
        return Boundaries(recipe, traced, overrides)
    return EveryOpWithOverrides(recipe, overrides=overrides) if recipe.keep else EveryOp(recipe)
