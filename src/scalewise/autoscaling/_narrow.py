"""Rounds to a narrow format with one power-of-two scale, and stores the result."""

from __future__ import annotations

import dataclasses
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._check import checked
from .._types import PyTree
from ..formats import BlockFormat, Format
from ..interpret import outlined
from ..rounding import EncodedArray, StoredArray, encode
from ..scaled import ScaledArray, quantize
from ._recipe import RecipeLike, Storage
from ._value import ScaledValue, StoredValue
from .recipes import recipe as recipe_


def store_value(value: ScaledValue, fmt: Format) -> StoredValue:
    memo = value.memo
    if fmt not in memo.stored:
        if fmt not in memo.copies:
            memo.copies[fmt] = outlined(_one_scale, fmt, value.data)
        copy = memo.copies[fmt]
        assert isinstance(copy, ScaledArray)
        assert isinstance(copy.data, jax.Array)
        assert isinstance(copy.scale, jax.Array)
        data = lax.optimization_barrier(copy.data)
        known = value.data.dtype, value.narrowed, value.role
        memo.stored[fmt] = StoredValue(data, copy.scale, value.exponent, *known)
    return memo.stored[fmt]


def _one_scale(fmt: Format, x: jax.Array) -> ScaledArray:
    return quantize(x, fmt)


def holds(dtype: DTypeLike, fmt: Format) -> bool:
    """Returns whether an array of ``dtype`` takes no more memory than one in ``fmt``."""
    return jnp.dtype(dtype).itemsize * 8 <= fmt.bits


@dataclasses.dataclass(frozen=True, eq=False)
class SqrtStored(StoredArray):
    """An array stored as its square root: ``value = root.value() ** 2``.

    A second moment spans twice the exponents of the gradients that it is made of; its root spans
    theirs. Non-negative arrays only.
    """

    root: ScaledArray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.root.shape

    @property
    def dtype(self) -> np.dtype:
        return self.root.dtype

    def value(self) -> jax.Array:
        """Returns the plain array."""
        return jnp.square(self.root.value())

    def __repr__(self) -> str:
        return f"SqrtStored({self.root!r})"


def store_array(x: jax.Array, storage: Storage) -> ScaledArray | SqrtStored:
    """Returns ``x`` stored as ``storage`` says."""
    x = jnp.sqrt(x) if storage.root == 2 else x
    fmt = storage.format
    if isinstance(fmt, BlockFormat):
        stored = quantize(x, fmt if x.ndim else fmt.element)
    else:
        stored = quantize(x, fmt, axis=storage.axis)
    if storage.nonzero or storage.root == 2:
        element = fmt.element if isinstance(fmt, BlockFormat) else fmt
        stored = dataclasses.replace(stored, data=_nonzero(stored.data, x, element))
    return SqrtStored(stored) if storage.root == 2 else stored


def _nonzero(data: jax.Array | EncodedArray, x: jax.Array, fmt: Format) -> jax.Array | EncodedArray:
    wide = data.astype(jnp.float32)
    tiny = jnp.copysign(jnp.asarray(float(fmt.smallest), jnp.float32), wide)
    return encode(jnp.where((wide == 0) & (x != 0), tiny, wide), fmt)


@checked
def store(tree: PyTree, recipe: RecipeLike) -> PyTree:
    """A pytree with the leaves that the recipe's ``state`` names stored narrow.

    Args:
        tree: a training state, say; leaves are arrays.
        recipe: a recipe, or the name of one that stores some of the state; its ``state`` patterns
            are matched against each leaf's path within ``tree``.

    Returns:
        The same tree; leaves whose path matches are :class:`ScaledArray` or :class:`SqrtStored`.
        Leaves that are no float arrays, or are stored already, stay as they are.

    Raises:
        ValueError: the name of a recipe without ``state``, under which nothing would be stored.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> recipe = sw.Recipe(state=((r"\\['w'\\]", sw.Storage("fp16")),))
        >>> sw.store({"w": jnp.ones(3), "n": jnp.int32(1)}, recipe)["w"].data.dtype
        dtype('float16')
    """
    named, recipe = recipe, recipe_(recipe)
    if isinstance(named, str) and not recipe.state:
        raise ValueError(
            f"store: the recipe {named!r} has no state patterns, so nothing would be stored; set "
            f"them by dataclasses.replace(recipes.{named}, state=...)"
        )

    def leaf(path, x):
        if is_stored(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        storage = recipe.state_storage(jax.tree_util.keystr(path), jnp.size(x))
        return x if storage is None else store_array(jnp.asarray(x), storage)

    return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_stored)


def is_stored(x: object) -> TypeGuard[ScaledArray | SqrtStored]:
    """Returns whether a node of a pytree is one array, stored by :func:`store`."""
    return isinstance(x, ScaledArray | SqrtStored)


def has_exponent(x: object) -> bool:
    """Returns True if an argument has one exponent, which then follows it to the outputs."""
    return isinstance(x, ScaledArray) and x.exponent is not None and x.exponent.ndim == 0


def has_scale(x: object) -> bool:
    if not isinstance(x, ScaledArray) or isinstance(x.data, EncodedArray) or x.block is not None:
        return False
    return isinstance(x.scale, jax.Array) and x.scale.ndim == 0
