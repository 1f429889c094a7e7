"""torch's promotion of dtypes and ranks, for rules of several operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._types import PyTree
from .._convert import jax_dtype, torch_dtype
from .._torch import torch

KINDS = (
    (bool, jnp.bool_),
    (int, jnp.integer),
    (float, jnp.floating),
    (complex, jnp.complexfloating),
)


def _category(dtype: Any) -> int:
    return next(i for i, (_, kind) in enumerate(KINDS) if jnp.issubdtype(dtype, kind))


def result_dtype(*operands: Any) -> np.dtype:
    """Returns the dtype of torch's result."""
    like = [
        torch.empty((0,) * x.ndim, dtype=torch_dtype(x.dtype), device="meta")
        if isinstance(x, jax.Array | np.ndarray)
        else x
        for x in operands
    ]
    kind = torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    return jax_dtype(torch._prims_common.elementwise_dtypes(*like, type_promotion_kind=kind)[1])


def ranked(*operands: Any) -> list[Any]:
    """Returns arrays with leading axes of size 1, so that all but 0-d arrays have one rank."""
    rank = max((np.ndim(x) for x in operands), default=0)
    return [x.reshape((1,) * (rank - x.ndim) + x.shape) if np.ndim(x) else x for x in operands]


def promoted(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    @functools.wraps(function)
    def call(x: Any, y: Any, **options: Any) -> Any:
        return function(*common(x, y), **options)

    return call


def common(*operands: Any, floating: bool = False) -> list[Any]:
    """Returns operands in torch's common dtype and of one rank; Python numbers stay such."""
    dtype = result_dtype(*operands)
    if floating and _category(dtype) < 2:
        dtype = jnp.dtype(jnp.float32)
    cast = [
        x.astype(dtype) if isinstance(x, jax.Array | np.ndarray) else np_number(x, dtype)
        for x in operands
    ]
    return ranked(*cast)


def np_number(x: Any, dtype: np.dtype) -> Any:
    return KINDS[_category(dtype)][0](x)


def as_float(x: jax.Array) -> jax.Array:
    return x if _category(x.dtype) >= 2 else x.astype(jnp.float32)


def as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array in one of torch's dtypes; unchanged for None.

    A float isn't narrowed: that is left to the caller of a rule, who rounds its results once.
    """
    if dtype is None:
        return x
    target = jax_dtype(dtype)
    floats = _category(x.dtype) == _category(target) == 2
    return x if floats and target.itemsize <= x.dtype.itemsize else x.astype(target)


def as_array(x: Any, like: jax.Array) -> jax.Array:
    return jnp.asarray(x, like.dtype)


def axes_of(x: jax.Array, dims: Any) -> tuple[int, ...]:
    """Returns axes as non-negative numbers; None, () and [] stand for all."""
    if dims is None or dims == ():
        return tuple(range(x.ndim))
    dims = dims if isinstance(dims, tuple | list) else (dims,)
    return tuple(d % max(x.ndim, 1) for d in dims if x.ndim)
