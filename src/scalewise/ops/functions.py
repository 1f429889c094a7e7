"""Elementary functions on narrow types, computed in a wider one: ``functions.exp(x)`` and so on.

Each is correct to the wider type's own error and one rounding, whatever the storage type. Which
type computes for which is ``COMPUTE``; ``compute=`` overrides it. ``FUNCTIONS`` lists them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._check import checked
from ..formats import CATALOGUE, FloatDType
from ..formats import format as format_
from ..rounding import float_array, round_to
from ._operation import operation


class _Dtypes(dict[np.dtype, np.dtype]):
    def __missing__(self, dtype: object) -> np.dtype:
        with contextlib.suppress(TypeError, ValueError):  # a name, a scalar type or a format
            known = format_(dtype).dtype
            if known is not None and known in self:
                return self[known]
        raise TypeError(f"COMPUTE[{dtype!r}]: expected one of {', '.join(map(str, self))}")


# The dtype in which a storage dtype's numbers are computed: at least float32.
COMPUTE = _Dtypes(
    (np.dtype(f.dtype), np.dtype(np.float32) if f.bits < 32 else np.dtype(f.dtype))
    for f in CATALOGUE.values()
    if f.dtype is not None
)


@dataclasses.dataclass(frozen=True)
class Elementary:
    """A function of one real number, computed in a wider type and rounded once.

    Attributes:
        name: as in ``FUNCTIONS``.
        definition: on arrays of the computing type.

    Example:
        >>> import jax.numpy as jnp
        >>> FUNCTIONS["exp"](jnp.asarray([0.0, 11.0], jnp.float16)).tolist()
        [1.0, 59872.0]
    """

    name: str
    definition: Callable[[jax.Array], jax.Array]

    def __call__(self, x: ArrayLike, *, compute: FloatDType | None = None) -> jax.Array:
        """Returns the function's values in x's dtype; overflow gives infinity, or NaN without one.

        ``compute`` is the dtype to compute in, by default ``COMPUTE`` of x's.
        """
        x = float_array(x, self.name)
        own = None if compute is None else np.dtype(compute)
        return operation(self.name, rounded_once, x, of=self.definition, compute=own)


def rounded_once(
    x: jax.Array,
    *,
    of: Callable[..., jax.Array],
    compute: np.dtype | None = None,
    **options: Hashable,
) -> jax.Array:
    """Returns a function's values, computed in a wider dtype, in x's dtype."""
    y = of(x.astype(COMPUTE[x.dtype] if compute is None else compute), **options)
    if y.dtype == x.dtype or y.dtype.itemsize < 4:  # narrow numbers are rounded by the cast itself
        return y.astype(x.dtype)
    return round_to(y, format_(x.dtype)).astype(x.dtype)


@checked
def isinf_sign(x: ArrayLike) -> jax.Array:
    """1 for infinity, -1 for minus infinity, else 0, as int32, NaN and all formats included.

    Example:
        >>> isinf_sign(jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 2.0], jnp.bfloat16)).tolist()
        [1, -1, 0, 0]
    """
    x = jnp.asarray(x)
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    return jnp.where(jnp.isinf(x), jnp.where(x > 0, 1, -1), 0).astype(jnp.int32)


_NAMES = (
    "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp exp2 expm1 log log2 log10 "
    "log1p sqrt rsqrt cbrt square reciprocal negative abs sign floor ceil trunc round relu relu6 "
    "hard_tanh hard_sigmoid hard_swish leaky_relu sigmoid log_sigmoid silu softplus softsign "
    "squareplus tanh_shrink mish gelu gelu_tanh elu celu selu erf erfc sinc deg2rad rad2deg"
)
_DEFINED: dict[str, Callable[[jax.Array], jax.Array]] = {  # others are jax.numpy's or jax.nn's
    "rsqrt": jax.lax.rsqrt,
    "softsign": jax.nn.soft_sign,
    "tanh_shrink": lambda x: x - jnp.tanh(x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
}
FUNCTIONS: dict[str, Elementary] = {
    name: Elementary(name, _DEFINED.get(name) or getattr(jnp, name, None) or getattr(jax.nn, name))
    for name in _NAMES.split()
}
__all__ = ["COMPUTE", "FUNCTIONS", "Elementary"]


def __getattr__(name: str) -> Elementary:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    raise AttributeError(f"{__name__} has no {name!r}; there are {', '.join(FUNCTIONS)}")


def __dir__() -> list[str]:
    return [*__all__, *FUNCTIONS]
