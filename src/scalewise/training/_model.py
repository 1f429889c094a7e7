"""What is trained and what is not, in a bare pytree, a Flax NNX module or an Equinox module.

Neither library is imported: a module of one of them can only be here if its library is.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@dataclasses.dataclass(frozen=True)
class Structure:
    """How a model is put together from its parts, and taken apart again.

    Attributes:
        key: what is static in the model; two structures with equal keys are equal.
        merge: (params, rest) to the model that the user's loss is called with.
        rest: a model, after that call, to what else is in it: statistics, counters, keys.
    """

    key: Hashable
    merge: Callable[[Tree, Tree], Any] = dataclasses.field(compare=False)
    rest: Callable[[Any], Tree] = dataclasses.field(compare=False)


def split(model: Any) -> tuple[Tree, Tree, Structure]:
    """A model's trained floats, the arrays in it that aren't trained, and its structure.

    Args:
        model: a ``flax.nnx.Module`` (``nnx.Param`` is trained), an ``equinox.Module`` (inexact
            arrays are trained), or any other pytree, all of whose leaves are trained.

    Raises:
        TypeError: something to be trained isn't a real float array; its path is named.
    """
    nnx, eqx = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(model, nnx.Module):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        structure = Structure(
            key=graph,
            # copies: a loss may change variables only at its own level of tracing
            merge=lambda p, r: nnx.merge(graph, p, r, copy=True),
            rest=lambda m: nnx.split(m, nnx.Param, ...)[2],
        )
    elif eqx is not None and isinstance(model, eqx.Module):
        params, others = eqx.partition(model, eqx.is_inexact_array)
        rest, static = eqx.partition(others, eqx.is_array)

        def others_of(module: Any) -> Tree:
            return eqx.filter(eqx.filter(module, eqx.is_inexact_array, inverse=True), eqx.is_array)

        leaves, treedef = jax.tree.flatten(static)
        structure = Structure(
            key=(tuple(leaves), treedef),
            merge=lambda p, r: eqx.combine(p, r, static),
            rest=others_of,
        )
    else:
        params, rest = model, ()
        structure = Structure("bare", merge=lambda p, r: p, rest=lambda m: ())
    check_floats(params)
    return params, rest, structure


def check_floats(params: Tree) -> None:
    """Refuses what no gradient can train."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise TypeError("training.step: there is nothing to train: the params hold no array")
    for path, x in leaves:
        dtype = getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            kind = f"a {type(x).__name__}" if dtype is None else f"{dtype}{list(x.shape)}"
            raise TypeError(
                f"training.step: params{jax.tree_util.keystr(path)} is {kind}; trained are real "
                "float arrays: keep anything else out of params (in the batch, or closed over)"
            )
