"""Elementary functions on narrow types, computed in a wider one: ``functions.exp(x)`` and so on.

Each is correct to the wider type's own error and one rounding, whatever the storage type. Which
type computes for which is ``COMPUTE``; ``compute=`` overrides it. ``FUNCTIONS`` lists them all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy.special import erf, erfc

from .._check import checked
from ..formats import CATALOGUE, FloatDType
from ..formats import format as format_
from ..rounding import round_to


class _Dtypes(dict[np.dtype, np.dtype]):
    def __missing__(self, dtype: object) -> np.dtype:
        raise TypeError(f"COMPUTE[{dtype!r}]: expected one of {', '.join(map(str, self))}")


# The dtype in which a storage dtype's numbers are computed: at least float32.
COMPUTE = _Dtypes(
    (np.dtype(f.dtype), np.dtype(np.float32) if f.bits < 32 else np.dtype(f.dtype))
    for f in CATALOGUE.values()
    if f.dtype is not None
)


def float_array(x: ArrayLike, name: str) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} takes real floating-point arrays, not {x.dtype}")
    return x


Mpmath: TypeAlias = Any
"""The module mpmath, an extra that type checkers may not find."""

Mpf: TypeAlias = Any
"""A number of mpmath, of any precision."""


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

        Args:
            x: float array.
            compute: dtype to compute in. Default: ``COMPUTE`` of x's.

        Raises:
            TypeError: x isn't a float array.
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


_ELU = lambda m, x: x if x > 0 else m.expm1(x), lambda x: np.where(x > 0, x, np.expm1(x))
_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _clip(x: Mpf, low: float, high: float) -> Mpf:
    return min(max(x, low), high)


def _floor_based(rounding: Callable[[Mpf], int]) -> Callable[[Mpmath, Mpf], Mpf]:
    return lambda m, x: m.mpf(int(rounding(x)))


_TABLE = (
    Elementary("sin", jnp.sin, "sin", np.sin),
    Elementary("cos", jnp.cos, "cos", np.cos),
    Elementary("tan", jnp.tan, "tan", np.tan),
    Elementary("asin", jnp.arcsin, "asin", np.arcsin),
    Elementary("acos", jnp.arccos, "acos", np.arccos),
    Elementary("atan", jnp.arctan, "atan", np.arctan),
    Elementary("sinh", jnp.sinh, "sinh", np.sinh),
    Elementary("cosh", jnp.cosh, "cosh", np.cosh),
    Elementary("tanh", jnp.tanh, "tanh", np.tanh),
    Elementary("asinh", jnp.arcsinh, "asinh", np.arcsinh),
    Elementary("acosh", jnp.arccosh, "acosh", np.arccosh),
    Elementary("atanh", jnp.arctanh, "atanh", np.arctanh),
    Elementary("exp", jnp.exp, "exp", np.exp),
    Elementary("exp2", jnp.exp2, lambda m, x: m.mpf(2) ** x, np.exp2),
    Elementary("expm1", jnp.expm1, "expm1", np.expm1),
    Elementary("log", jnp.log, "log", np.log),
    Elementary("log2", jnp.log2, lambda m, x: m.log(x, 2), np.log2),
    Elementary("log10", jnp.log10, "log10", np.log10),
    Elementary("log1p", jnp.log1p, "log1p", np.log1p),
    Elementary("sqrt", jnp.sqrt, "sqrt", np.sqrt),
    Elementary("rsqrt", jax.lax.rsqrt, lambda m, x: 1 / m.sqrt(x), lambda x: 1 / np.sqrt(x)),
    Elementary("cbrt", jnp.cbrt, lambda m, x: m.sign(x) * m.cbrt(abs(x)), np.cbrt),
    Elementary("square", jnp.square, lambda m, x: x * x, np.square),
    Elementary("reciprocal", jnp.reciprocal, lambda m, x: 1 / x, lambda x: 1 / x),
    Elementary("negative", jnp.negative, lambda m, x: -x, np.negative),
    Elementary("abs", jnp.abs, lambda m, x: abs(x), np.abs),
    Elementary("sign", jnp.sign, lambda m, x: m.sign(x), np.sign),
    Elementary("floor", jnp.floor, _floor_based(math.floor), np.floor),
    Elementary("ceil", jnp.ceil, _floor_based(math.ceil), np.ceil),
    Elementary("trunc", jnp.trunc, _floor_based(int), np.trunc),
    Elementary("round", jnp.round, _floor_based(lambda x: round(float(x))), np.rint),
    Elementary("relu", jax.nn.relu, lambda m, x: max(x, m.mpf(0)), lambda x: np.maximum(x, 0)),
    Elementary("relu6", jax.nn.relu6, lambda m, x: _clip(x, 0, 6), lambda x: np.clip(x, 0, 6)),
    Elementary(
        "hard_tanh", jax.nn.hard_tanh, lambda m, x: _clip(x, -1, 1), lambda x: np.clip(x, -1, 1)
    ),
    Elementary(
        "hard_sigmoid",
        jax.nn.hard_sigmoid,
        lambda m, x: _clip(x + 3, 0, 6) / m.mpf(6),
        lambda x: np.clip(x + 3, 0, 6) / 6,
    ),
    Elementary(
        "hard_swish",
        jax.nn.hard_swish,
        lambda m, x: x * _clip(x + 3, 0, 6) / m.mpf(6),
        lambda x: x * (np.clip(x + 3, 0, 6) / 6),
    ),
    Elementary(
        "leaky_relu",
        jax.nn.leaky_relu,
        lambda m, x: x if x >= 0 else x * m.mpf("0.01"),
        lambda x: np.where(x < 0, x * 0.01, x),
    ),
    Elementary(
        "sigmoid", jax.nn.sigmoid, lambda m, x: 1 / (1 + m.exp(-x)), lambda x: 1 / (1 + np.exp(-x))
    ),
    Elementary(
        "log_sigmoid",
        jax.nn.log_sigmoid,
        lambda m, x: -m.log1p(m.exp(-x)),
        lambda x: -np.logaddexp(0, -x),
    ),
    Elementary(
        "silu", jax.nn.silu, lambda m, x: x / (1 + m.exp(-x)), lambda x: x / (1 + np.exp(-x))
    ),
    Elementary(
        "softplus", jax.nn.softplus, lambda m, x: m.log1p(m.exp(x)), lambda x: np.logaddexp(0, x)
    ),
    Elementary(
        "softsign", jax.nn.soft_sign, lambda m, x: x / (1 + abs(x)), lambda x: x / (1 + np.abs(x))
    ),
    Elementary(
        "squareplus", jax.nn.squareplus, lambda m, x: (x + m.sqrt(x * x + 4)) / 2, _squareplus
    ),
    Elementary("tanh_shrink", lambda x: x - jnp.tanh(x), lambda m, x: x - m.tanh(x)),
    Elementary(
        "mish",
        jax.nn.mish,
        lambda m, x: x * m.tanh(m.log1p(m.exp(x))),
        lambda x: x * np.tanh(np.logaddexp(0, x)),
    ),
    Elementary(
        "gelu",
        lambda x: jax.nn.gelu(x, approximate=False),
        lambda m, x: x * m.erfc(-x / m.sqrt(2)) / 2,
        lambda x: x * erfc(-x / np.sqrt(2)) / 2,
    ),
    Elementary("gelu_tanh", jax.nn.gelu, _gelu_tanh, _gelu_tanh_library),
    Elementary("elu", jax.nn.elu, *_ELU),
    Elementary("celu", jax.nn.celu, *_ELU),
    Elementary(
        "selu",
        jax.nn.selu,
        lambda m, x: m.mpf(_SELU[1]) * (x if x > 0 else m.mpf(_SELU[0]) * m.expm1(x)),
        lambda x: _SELU[1] * np.where(x > 0, x, _SELU[0] * np.expm1(x)),
    ),
    Elementary("erf", jax.scipy.special.erf, "erf", erf),
    Elementary("erfc", jax.scipy.special.erfc, "erfc", erfc),
    Elementary("sinc", jnp.sinc, lambda m, x: m.sincpi(x)),
    Elementary("deg2rad", jnp.deg2rad, lambda m, x: x * m.pi / 180, np.deg2rad),
    Elementary("rad2deg", jnp.rad2deg, lambda m, x: x * 180 / m.pi, np.rad2deg),
)
FUNCTIONS: dict[str, Elementary] = {f.name: f for f in _TABLE}
__all__ = ["COMPUTE", "FUNCTIONS", "Elementary", "isinf_sign", *FUNCTIONS]  # pyright: ignore


def __getattr__(name: str) -> Elementary:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    raise AttributeError(f"{__name__} has no {name!r}; there are {', '.join(FUNCTIONS)}")
