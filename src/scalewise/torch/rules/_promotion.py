"""torch's promotion of dtypes and ranks, for rules of several operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


def _scalar_dtype(x: Any) -> np.dtype:
    kind = next(k for k, _ in KINDS if isinstance(x, k))
    default = {bool: jnp.bool_, int: jnp.int64, float: jnp.float32, complex: jnp.complex64}[kind]
    return jax.dtypes.canonicalize_dtype(default)


def _promoted_types(a: np.dtype, b: np.dtype) -> np.dtype:
    return jax_dtype(torch.promote_types(torch_dtype(a), torch_dtype(b)))


def result_dtype(*operands: Any) -> np.dtype:
    """Returns the dtype of torch's result: arrays decide, then 0-d arrays, then Python numbers.

    A later group counts only if its category (bool, integer, float, complex) is higher.
    """
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in operands]
    groups: Sequence[list[np.dtype]] = ([], [], [])
    for x, array in zip(operands, is_array, strict=True):
        dtype = np.dtype(x.dtype) if array else _scalar_dtype(x)
        groups[0 if array and x.ndim else 1 if array else 2].append(dtype)
    found: np.dtype | None = None
    for group in groups:
        if group:
            own = functools.reduce(_promoted_types, group)
            if found is None or _category(own) > _category(found):
                found = own
    assert found is not None
    return found


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
