"""Products of ScaledArrays: matmul, dot_general and convolutions, with unit scaling's factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._check import checked
from .._jax import Tracer
from ..formats import FormatLike
from ._array import ScaledArray
from ._operand import apart, common_dtype, operands, scaled_result
from ._operations import Operand
from ._rules import EXPONENTS, RULES, Algebra, combined, static_scale

Static = float | Callable[[Operand, Operand], float]
"""A number that the data of a product are divided by, or a function of the operands' shapes."""

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def _contraction(
    name: str,
    a: Operand,
    b: Operand,
    terms: Callable[[Sequence[int], Sequence[int]], int],
    product: Callable[[jax.Array, jax.Array], jax.Array],
    static: Static | None,
    dtype: FormatLike | None,
    factors: Sequence[jax.Array | None] = (),
) -> ScaledArray:
    x, y = operands(name, a, b)
    if not (x.data.ndim and y.data.ndim):
        raise ValueError(f"{name}: shapes are {x.data.shape} and {y.data.shape}; expected axes")
    if static is None:
        s = static_scale(terms(x.data.shape, y.data.shape))
    else:
        s = _static(name, static(a, b) if callable(static) else static, x.algebra)
    data, scale = combined(RULES[name], x.algebra, [x, y], s)
    wide = max((d.dtype for d in data), key=lambda dtype: dtype.itemsize)
    own = common_dtype(x, y)
    own = np.dtype(np.float16) if own.itemsize == 1 else own  # sums of 8-bit numbers need more bits
    out = product(*(d.astype(wide) for d in data)) / s
    for factor in factors:
        out = out if factor is None else out * factor.astype(out.dtype)
    return scaled_result(out, scale, x.algebra, own if dtype is None else dtype)


def _static(name: str, s: object, algebra: Algebra) -> float:
    """Returns a known, positive and finite number; beside exponents it has to be a power of two."""
    known = isinstance(s, int | float | np.number | np.ndarray | jax.Array)
    if not known or isinstance(s, bool | Tracer) or np.ndim(s):
        raise TypeError(
            f"{name}: static is {s!r}; expected a number, or a function of the operands that "
            "returns one, known from their shapes alone"
        )
    number = float(s)
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: static is {number!r}; expected a positive, finite number")
    if algebra is EXPONENTS and math.frexp(number)[0] != 0.5:
        raise ValueError(
            f"{name}: static is {number!r}; expected a power of two, since an operand's scale is "
            "an exponent"
        )
    return number


@checked
def matmul(
    a: Operand, b: Operand, *, static: Static | None = None, dtype: FormatLike | None = None
) -> ScaledArray:
    """Returns ``a @ b`` with the scale ``sA sB s``: the data are ``(a.data @ b.data) / s``.

    Sums are accumulated in float32, divided by s and rounded once. Scales of a's rows and b's
    columns multiply the sums: FP8 data go to the matrix unit as they are stored.

    Args:
        a, b: operands with shapes as for ``jnp.matmul``.
        static: s, or a function of a and b that returns it from their shapes; by default sqrt(K),
            rounded to a power of two, for K contracted numbers (unit scaling), so that unit data
            give unit data.
        dtype: of the result's data; by default the operands', FP16 for two of 8 bits.

    Raises:
        TypeError: static isn't a number known from shapes.
        ValueError: static isn't positive and finite, or no power of two beside exponents.

    Example:
        >>> a = ScaledArray(jnp.ones((4, 64), jnp.float16), 2.0**20)
        >>> y = matmul(a, ScaledArray(jnp.ones((64, 4), jnp.float16), 2.0**-30))
        >>> y.data.dtype.name, float(y.data[0, 0]), float(y.scale) == 2.0**-7
        ('float16', 8.0, True)
    """
    (a, rows), (b, columns) = apart(a, -1), apart(b, -2)
    return _contraction("matmul", a, b, lambda m, n: m[-1], jnp.matmul, static, dtype,
                        (rows, columns))  # fmt: skip


@checked
def dot_general(
    a: Operand,
    b: Operand,
    dimension_numbers: DimensionNumbers,
    *,
    static: Static | None = None,
    dtype: FormatLike | None = None,
) -> ScaledArray:
    """Returns ``lax.dot_general`` with the scale ``sA sB s``; see :func:`matmul`.

    Args:
        a, b, dimension_numbers: as for ``lax.dot_general``.
        static, dtype: as for :func:`matmul`.
    """
    (contracted, _), _ = dimension_numbers

    def terms(m: Sequence[int], _: Sequence[int]) -> int:
        return math.prod(m[i] for i in contracted)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, dimension_numbers)

    return _contraction("dot_general", a, b, terms, product, static, dtype)


@checked
def conv(
    a: Operand,
    kernel: Operand,
    window_strides: Sequence[int],
    padding: Literal["SAME", "VALID", "SAME_LOWER"] | Sequence[tuple[int, int]],
    *,
    static: Static | None = None,
    dtype: FormatLike | None = None,
    **options: Any,
) -> ScaledArray:
    """Returns ``lax.conv_general_dilated`` with the scale ``sA sB s``; see :func:`matmul`.

    Args:
        a, kernel, window_strides, padding: as for ``lax.conv_general_dilated``.
        static: as for :func:`matmul`; by default from the number of products in each sum, the
            kernel's size over its output features.
        dtype: as for :func:`matmul`.
        options: of ``lax.conv_general_dilated``, such as ``dimension_numbers``.
    """

    def terms(m: Sequence[int], n: Sequence[int]) -> int:
        numbers = lax.conv_dimension_numbers(m, n, options.get("dimension_numbers"))
        return math.prod(n) // n[numbers.rhs_spec[0]]

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, y, window_strides, padding, **options)

    return _contraction("conv", a, kernel, terms, product, static, dtype)
