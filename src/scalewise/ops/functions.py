"""Elementary functions on narrow types, computed in a wider one: ``functions.exp(x)`` and so on.

Each is correct to the wider type's own error and one rounding, whatever the storage type. Which
type computes for which is ``COMPUTE``; ``compute=`` overrides it. ``FUNCTIONS`` lists them all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy.special import erf, erfc

from .._check import checked
from ..formats import CATALOGUE, FloatDType
from ..formats import format as format_
from ..rounding import float_array, round_to


class _Dtypes(dict[np.dtype, np.dtype]):
    def __missing__(self, dtype: object) -> np.dtype:
        raise TypeError(f"COMPUTE[{dtype!r}]: expected one of {', '.join(map(str, self))}")


# The dtype in which a storage dtype's numbers are computed: at least float32.
COMPUTE = _Dtypes(
    (np.dtype(f.dtype), np.dtype(np.float32) if f.bits < 32 else np.dtype(f.dtype))
    for f in CATALOGUE.values()
    if f.dtype is not None
)


Mpmath: TypeAlias = Any  # the module mpmath, an extra that type checkers may not find
Mpf: TypeAlias = Any  # a number of mpmath, of any precision


@dataclasses.dataclass(frozen=True)
class Elementary:
    """A function of one real number, computed in a wider type and rounded once.

    Attributes:
        name: as in ``FUNCTIONS``.
        definition: on arrays of the computing type.
        exact: the name of the function in mpmath, or the function itself, given mpmath.
        library: the same in NumPy on float64, where its error is known to be a few ulps.

    Example:
        >>> import jax.numpy as jnp
        >>> FUNCTIONS["exp"](jnp.asarray([0.0, 11.0], jnp.float16)).tolist()
        [1.0, 59872.0]
    """

    name: str
    definition: Callable[[jax.Array], jax.Array]
    exact: str | Callable[[Mpmath, Mpf], Mpf]
    library: Callable[[np.ndarray], np.ndarray] | None = None

    @checked
    def __call__(self, x: ArrayLike, *, compute: FloatDType | None = None) -> jax.Array:
        """Returns the function's values in x's dtype; overflow gives infinity, or NaN without one.

        ``compute`` is the dtype to compute in, by default ``COMPUTE`` of x's.
        """
        x = float_array(x, self.name)
        wide = np.dtype(COMPUTE[x.dtype] if compute is None else compute)
        y = self.definition(x.astype(wide))
        if wide == x.dtype:
            return y
        if wide.itemsize < 4:  # its numbers are rounded by the cast itself
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


def _gelu_tanh(m: Mpmath, x: Mpf) -> Mpf:
    # x (1 + tanh z) / 2, without the cancellation at very negative z
    z = m.sqrt(2 / m.pi) * (x + m.mpf("0.044715") * x**3)
    return x / (1 + m.exp(-2 * z))


def _gelu_tanh_library(x: np.ndarray) -> np.ndarray:
    z = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return x / (1 + np.exp(-2 * z))


def _squareplus(x: np.ndarray) -> np.ndarray:
    root = np.hypot(x, 2)  # without the cancellation where x is negative, or the overflow
    return np.where(x < 0, 2 / (root + np.abs(x)), (x + root) / 2)


def _clip(x: Mpf, low: float, high: float) -> Mpf:
    return min(max(x, low), high)


def _floor_based(rounding: Callable[[Mpf], int]) -> Callable[[Mpmath, Mpf], Mpf]:
    return lambda m, x: m.mpf(int(rounding(x)))


def _of_all(names: str) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of functions that JAX, mpmath and NumPy have under one name."""
    for name in names.split():
        own = name.replace("a", "arc", 1) if name.startswith("a") else name
        yield name, getattr(jnp, own), name, getattr(np, own)


_ELU = lambda m, x: x if x > 0 else m.expm1(x), lambda x: np.where(x > 0, x, np.expm1(x))
_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
_ROWS: tuple[tuple[Any, ...], ...] = (
    *_of_all("sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp"),
    ("exp2", jnp.exp2, lambda m, x: m.mpf(2) ** x, np.exp2),
    *_of_all("expm1 log"),
    ("log2", jnp.log2, lambda m, x: m.log(x, 2), np.log2),
    *_of_all("log10 log1p sqrt"),
    ("rsqrt", jax.lax.rsqrt, lambda m, x: 1 / m.sqrt(x), lambda x: 1 / np.sqrt(x)),
    ("cbrt", jnp.cbrt, lambda m, x: m.sign(x) * m.cbrt(abs(x)), np.cbrt),
    ("square", jnp.square, lambda m, x: x * x, np.square),
    ("reciprocal", jnp.reciprocal, lambda m, x: 1 / x, lambda x: 1 / x),
    ("negative", jnp.negative, lambda m, x: -x, np.negative),
    ("abs", jnp.abs, lambda m, x: abs(x), np.abs),
    ("sign", jnp.sign, lambda m, x: m.sign(x), np.sign),
    ("floor", jnp.floor, _floor_based(math.floor), np.floor),
    ("ceil", jnp.ceil, _floor_based(math.ceil), np.ceil),
    ("trunc", jnp.trunc, _floor_based(int), np.trunc),
    ("round", jnp.round, _floor_based(lambda x: round(float(x))), np.rint),
    ("relu", jax.nn.relu, lambda m, x: max(x, m.mpf(0)), lambda x: np.maximum(x, 0)),
    ("relu6", jax.nn.relu6, lambda m, x: _clip(x, 0, 6), lambda x: np.clip(x, 0, 6)),
    ("hard_tanh", jax.nn.hard_tanh, lambda m, x: _clip(x, -1, 1), lambda x: np.clip(x, -1, 1)),
    ("hard_sigmoid", jax.nn.hard_sigmoid,
     lambda m, x: _clip(x + 3, 0, 6) / m.mpf(6), lambda x: np.clip(x + 3, 0, 6) / 6),
    ("hard_swish", jax.nn.hard_swish,
     lambda m, x: x * _clip(x + 3, 0, 6) / m.mpf(6), lambda x: x * (np.clip(x + 3, 0, 6) / 6)),
    ("leaky_relu", jax.nn.leaky_relu,
     lambda m, x: x if x >= 0 else x * m.mpf("0.01"), lambda x: np.where(x < 0, x * 0.01, x)),
    ("sigmoid", jax.nn.sigmoid, lambda m, x: 1 / (1 + m.exp(-x)), lambda x: 1 / (1 + np.exp(-x))),
    ("log_sigmoid", jax.nn.log_sigmoid,
     lambda m, x: -m.log1p(m.exp(-x)), lambda x: -np.logaddexp(0, -x)),
    ("silu", jax.nn.silu, lambda m, x: x / (1 + m.exp(-x)), lambda x: x / (1 + np.exp(-x))),
    ("softplus", jax.nn.softplus, lambda m, x: m.log1p(m.exp(x)), lambda x: np.logaddexp(0, x)),
    ("softsign", jax.nn.soft_sign, lambda m, x: x / (1 + abs(x)), lambda x: x / (1 + np.abs(x))),
    ("squareplus", jax.nn.squareplus, lambda m, x: (x + m.sqrt(x * x + 4)) / 2, _squareplus),
    ("tanh_shrink", lambda x: x - jnp.tanh(x), lambda m, x: x - m.tanh(x)),
    ("mish", jax.nn.mish,
     lambda m, x: x * m.tanh(m.log1p(m.exp(x))), lambda x: x * np.tanh(np.logaddexp(0, x))),
    ("gelu", lambda x: jax.nn.gelu(x, approximate=False),
     lambda m, x: x * m.erfc(-x / m.sqrt(2)) / 2, lambda x: x * erfc(-x / np.sqrt(2)) / 2),
    ("gelu_tanh", jax.nn.gelu, _gelu_tanh, _gelu_tanh_library),
    ("elu", jax.nn.elu, *_ELU),
    ("celu", jax.nn.celu, *_ELU),
    ("selu", jax.nn.selu,
     lambda m, x: m.mpf(_SELU[1]) * (x if x > 0 else m.mpf(_SELU[0]) * m.expm1(x)),
     lambda x: _SELU[1] * np.where(x > 0, x, _SELU[0] * np.expm1(x))),
    ("erf", jax.scipy.special.erf, "erf", erf),
    ("erfc", jax.scipy.special.erfc, "erfc", erfc),
    ("sinc", jnp.sinc, lambda m, x: m.sincpi(x)),
    ("deg2rad", jnp.deg2rad, lambda m, x: x * m.pi / 180, np.deg2rad),
    ("rad2deg", jnp.rad2deg, lambda m, x: x * 180 / m.pi, np.rad2deg),
)  # fmt: skip
FUNCTIONS: dict[str, Elementary] = {row[0]: Elementary(*row) for row in _ROWS}
__all__ = ["COMPUTE", "FUNCTIONS", "Elementary", "isinf_sign", *FUNCTIONS]  # pyright: ignore


def __getattr__(name: str) -> Elementary:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    raise AttributeError(f"{__name__} has no {name!r}; there are {', '.join(FUNCTIONS)}")
