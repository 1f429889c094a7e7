"""Sums of ScaledArrays, whose scales `_operations.py` explains: reductions, softmax, products."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._check import checked, checked_axes
from .._jax import Tracer
from ..formats import FormatLike
from ._array import ScaledArray
from ._operations import Operand
from ._rules import (
    FACTORS,
    KEPT,
    RULES,
    ScaledOperand,
    apart,
    applied,
    as_factor,
    combined,
    common_dtype,
    operands,
    scaled_result,
    static_scale,
)

Axis = int | Sequence[int] | None


def _static_of(name: str, a: Operand, axis: Axis) -> float:
    shape = jnp.shape(a.data if isinstance(a, ScaledArray) else a)  # pyright: ignore
    return static_scale(math.prod(shape[i] for i in checked_axes(name, axis, len(shape))))


def _reduction(
    name: str, reduce: Callable[[jax.Array, dict[str, Any], float], jax.Array], returns: str
) -> Callable[..., ScaledArray]:
    """Returns a reduction over axes; ``reduce`` is given the data, options and the static scale."""
    rule = RULES[name]

    def reduction(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> ScaledArray:
        s = _static_of(name, a, axis)
        over = {"axis": tuple(axis) if isinstance(axis, Sequence) else axis, "keepdims": keepdims}
        return applied(name, lambda x: reduce(x, over, s), a, static=() if rule is KEPT else (s,))

    reduction.__name__ = reduction.__qualname__ = name
    reduction.__doc__ = f"Returns {returns} over axes with the scale ``{rule.formula}``."
    if rule is not KEPT:
        reduction.__doc__ += """

    s is sqrt(n), rounded to a power of two, for n terms, the size of a sum of n independent numbers
    of unit size."""
    return checked(reduction)


sum = _reduction("sum", lambda x, over, s: jnp.sum(x, **over) / s, "the sum")
mean = _reduction("mean", lambda x, over, s: jnp.mean(x, **over) * s, "the mean")
max = _reduction("max", lambda x, over, _: jnp.max(x, **over), "the largest element")
min = _reduction("min", lambda x, over, _: jnp.min(x, **over), "the smallest element")


@checked
def cumsum(a: Operand, axis: int = -1) -> ScaledArray:
    """Returns running sums along an axis with the scale ``sA s`` of the last sum, s as for
    :func:`sum`.
    """
    s = _static_of("cumsum", a, axis)
    return applied("cumsum", lambda x: jnp.cumsum(x, axis=axis) / s, a, static=(s,))


@checked
def softmax(a: Operand, axis: int = -1) -> ScaledArray:
    """Returns the softmax along an axis with the scale ``1 / sum(data)``, one for each row.

    The data are ``exp((data - max) sA)``, from 0 to 1.
    """
    x, below = _below_largest("softmax", a, axis)
    data = jnp.exp(below.value())
    total = jnp.sum(data, axis=axis, keepdims=True)
    scale = RULES["softmax"].scale(FACTORS, as_factor(total))
    return scaled_result(data, scale, x.dtype)


@checked
def log_softmax(a: Operand, axis: int = -1) -> ScaledArray:
    """Returns the logarithm of the softmax along an axis, with the scale ``max(sA, 1)``.

    It is ``value - max - log(sum(exp(value - max)))``; its first part is of the size of the
    operand, its second at most the logarithm of the number of terms.
    """
    x, below = _below_largest("log_softmax", a, axis)
    total = jnp.log(jnp.sum(jnp.exp(below.value()), axis=axis, keepdims=True))
    scale = RULES["log_softmax"].scale(FACTORS, x.scale)
    total = ScaledOperand(total, FACTORS.one, x.dtype)
    return scaled_result(below.at(scale) - total.at(scale), scale, x.dtype)


def _below_largest(name: str, a: Operand, axis: int) -> tuple[ScaledOperand, ScaledOperand]:
    (x,) = operands(name, a)
    checked_axes(name, axis, x.data.ndim)
    top = jnp.max(x.data, axis=axis, keepdims=True)
    return x, dataclasses.replace(x, data=x.data - top)


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
    # JAX refuses shapes that don't fit each other
    jax.eval_shape(product, *(jax.ShapeDtypeStruct(z.data.shape, np.float32) for z in (x, y)))
    if static is None:
        s = static_scale(terms(x.data.shape, y.data.shape))
    else:
        s = _static(name, static(a, b) if callable(static) else static)
    data, scale = combined(RULES[name], FACTORS, [x, y], s)
    wide = np.result_type(*(d.dtype for d in data))
    own = common_dtype(x, y)
    own = np.dtype(np.float16) if own.itemsize == 1 else own  # sums of 8-bit numbers need more bits
    out = product(*(d.astype(wide) for d in data)) / s
    for factor in factors:
        out = out if factor is None else out * factor.astype(out.dtype)
    return scaled_result(out, scale, own if dtype is None else dtype)


def _static(name: str, s: object) -> float:
    """Returns a known, positive and finite number."""
    known = isinstance(s, int | float | np.number | np.ndarray | jax.Array)
    if not known or isinstance(s, bool | Tracer) or np.ndim(s):
        raise TypeError(
            f"{name}: static is {s!r}; expected a number, or a function of the operands that "
            "returns one, known from their shapes alone"
        )
    number = float(s)
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: static is {number!r}; expected a positive, finite number")
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
        ValueError: static isn't positive and finite.

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
        if len(window_strides) != x.ndim - 2:  # JAX's words are NumPy's, about broadcasting
            raise ValueError(
                f"conv: window_strides={window_strides!r}; expected {x.ndim - 2} numbers, one for "
                f"each axis of {x.shape} besides those of batch and features"
            )
        return lax.conv_general_dilated(x, y, window_strides, padding, **options)

    return _contraction("conv", a, kernel, terms, product, static, dtype)
