"""Stores an optax optimizer's state in narrow formats between steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..autoscale import Recipe, Storage, is_stored, store
from ..formats import E4M3FN, FP16

Tree = Any

# Three bytes per parameter for Adam's two moments. Like the first moment, the square root of the
# second has the gradients' exponents; E4M3 would flush what is 2^18 below the maximum, FP16 2^40.
NARROW_ADAM: Mapping[str, Storage] = {
    r"\.mu\b": Storage(E4M3FN),
    r"\.nu\b": Storage(FP16, root=2),
}


def store_state(
    optimizer: optax.GradientTransformation,
    storages: Mapping[str, Storage | Any] = NARROW_ADAM,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its state is stored in narrow formats, with scales.

    Each update widens the stored leaves to float32, applies the optimizer, and stores the new
    leaves, rounded once to nearest. With ``root=2`` or ``nonzero`` a nonzero second moment is never
    stored as zero, so that no first moment is divided by epsilon alone.

    Args:
        optimizer: any optax transformation.
        storages: maps regular expressions to a :class:`~scalewise.Storage`, or to a format, which
            means ``Storage(format)``. Each float leaf of the optimizer's state is stored by the
            first expression that is found in its path, written as by ``jax.tree_util.keystr``
            (``"[0].mu['w']"``). By default E4M3 first moments and FP16 roots of second moments.

    Returns:
        A transformation whose state holds :class:`~scalewise.ScaledArray` and
        :class:`~scalewise.SqrtStored` leaves: pytrees that can be jitted and checkpointed.

    Raises:
        ValueError: a format or regular expression is invalid; or, in ``init``, an expression is
            found in no path.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = store_state(optax.adam(1e-3), {"mu": "bf16", "nu": "mxfp8_e4m3"})
        >>> state = optimizer.init({"w": jnp.ones((4, 64))})
        >>> state[0].mu["w"].data.dtype.name, state[0].nu["w"].scale.shape
        ('bfloat16', (4, 2))
    """
    pairs = storages.items()
    recipe = Recipe(state=tuple((p, s if isinstance(s, Storage) else Storage(s)) for p, s in pairs))
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        state = inner.init(params)
        _check_patterns(recipe, state)
        return store(state, recipe)

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any):
        updates, after = inner.update(updates, widen(state), params, **extra)
        return updates, store(after, recipe)

    return optax.GradientTransformationExtraArgs(init, update)


def widen(tree: Tree) -> Tree:
    """Returns a pytree with its stored leaves (ScaledArray, SqrtStored) as plain arrays."""
    return jax.tree.map(lambda x: x.value() if is_stored(x) else x, tree, is_leaf=is_stored)


def _check_patterns(recipe: Recipe, state: Tree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = [jax.tree_util.keystr(p) for p, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    for pattern, _ in recipe.state:
        if not any(re.search(pattern, path) for path in paths):
            shown = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
            raise ValueError(
                f"store_state: {pattern!r} is in no float leaf's path; the optimizer's state has: "
                f"{shown or 'none at all'}"
            )
