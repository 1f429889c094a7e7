"""Optimizer states stored in narrow formats, around any optax optimizer."""

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

# Three bytes a parameter for Adam's two moments. The second one's square root has the exponents of
# the gradients, as the first has; E4M3 would flush what is 2^18 under the largest, FP16 2^40.
NARROW_ADAM: Mapping[str, Storage] = {
    r"\.mu\b": Storage(E4M3FN),
    r"\.nu\b": Storage(FP16, root=2),
}


def store_state(
    optimizer: optax.GradientTransformation,
    storages: Mapping[str, Storage | Any] = NARROW_ADAM,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state lies narrow between two steps, behind scales of its own.

    Each update widens the stored leaves to float32, lets the optimizer work, and stores them
    again: each is rounded once a step, to nearest. A second moment (``root=2``, or ``nonzero``)
    never becomes zero where it isn't, so that no first moment is divided by an epsilon alone.

    Args:
        optimizer: any optax transformation.
        storages: a regular expression to a :class:`~scalewise.Storage`, or to a format for
            ``Storage(format)``. It is searched for in the path of each float leaf within the
            optimizer's state, as ``jax.tree_util.keystr`` prints it (``"[0].mu['w']"``); the first
            that is found decides. By default E4M3 first moments and FP16 roots of second moments.

    Returns:
        A transformation whose state holds :class:`~scalewise.ScaledArray` and
        :class:`~scalewise.SqrtStored` leaves: plain pytrees, jittable, checkpointed as they are.

    Raises:
        ValueError: no such format or regular expression; or, at ``init``, one that names no leaf.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = store_state(optax.adam(1e-3), {"mu": "bf16", "nu": "mxfp8_e4m3"})
        >>> state = optimizer.init({"w": jnp.ones((4, 64))})
        >>> state[0].mu["w"].data.dtype.name, state[0].nu["w"].scale.shape
        ('bfloat16', (4, 2))
    """
    recipe = Recipe(
        state=tuple(
            (pattern, s if isinstance(s, Storage) else Storage(s))
            for pattern, s in storages.items()
        )
    )
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        state = inner.init(params)
        _all_used(recipe, state)
        return store(state, recipe)

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any):
        updates, after = inner.update(updates, widen(state), params, **extra)
        return updates, store(after, recipe)

    return optax.GradientTransformationExtraArgs(init, update)


def widen(tree: Tree) -> Tree:
    """A pytree with its stored leaves (ScaledArray, SqrtStored) as plain arrays."""
    return jax.tree.map(lambda x: x.value() if is_stored(x) else x, tree, is_leaf=is_stored)


def _all_used(recipe: Recipe, state: Tree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = [jax.tree_util.keystr(p) for p, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    for pattern, _ in recipe.state:
        if not any(re.search(pattern, path) for path in paths):
            shown = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
            raise ValueError(
                f"store_state: {pattern!r} names no float leaf of the optimizer's state; it has: "
                f"{shown or 'none at all'}"
            )
