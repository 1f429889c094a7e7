"""The rules by which operations choose the scale of their result from those of their operands.

They are those of the Scalify design (arXiv 2407.17353, docs/design.md of graphcore-research/
jax-scalify). The operations of :mod:`scalewise.scaled` and the rules of
:func:`scalewise.autoscale` are both made from them (:func:`combined`). An operation's operands are
wide data with one scale each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .. import rounding
from ..formats import FormatLike, Saturation
from ..formats import format as format_
from ._array import ScaledArray
from ._power import ZERO_EXPONENT, exponent_of, ldexp, split_power

Scale: TypeAlias = float | jax.Array
"""A number that data are multiplied by, or a float array of them."""

Exponent: TypeAlias = int | jax.Array
"""An exponent of 2: an integer if the program alone determines it, else an int32 array."""

S = TypeVar("S", Scale, Exponent)


@dataclasses.dataclass(frozen=True)
class Algebra(Generic[S]):
    """How scales of one kind are combined.

    Attributes:
        one: the scale of a plain array.
        times, over, larger: of two scales.
        beside: of two scales, the size of a sum of two independent numbers, a power of two.
        power, root: of a scale and a Python integer. A root of an exponent is rounded down; what is
            left remains with the data.
        static: returns the scale that a Python float is, a power of two.
    """

    one: S
    times: Callable[[S, S], S]
    over: Callable[[S, S], S]
    larger: Callable[[S, S], S]
    beside: Callable[[S, S], S]
    power: Callable[[S, int], S]
    root: Callable[[S, int], S]
    static: Callable[[float], S]


def _larger_exponent(a: Exponent, b: Exponent) -> Exponent:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return lax.max(jnp.int32(a), jnp.int32(b))


def _norm_of_scales(a: Scale, b: Scale) -> jax.Array:
    scale = jnp.maximum(a, b)
    low = jnp.minimum(a, b) / jnp.where(scale == 0, 1, scale)
    size = jnp.where(scale == 0, 1, scale * jnp.sqrt(1 + low * low))
    return jnp.where(scale == 0, scale, split_power(size)[1])


FACTORS: Algebra[Scale] = Algebra(
    one=1.0,
    times=lambda a, b: a * b,
    over=lambda a, b: a / b,
    larger=jnp.maximum,
    beside=_norm_of_scales,
    power=lambda a, n: a**n,
    root=lambda a, n: a ** (1 / n),
    static=float,
)
"""Scales are numbers that the data are multiplied by."""

EXPONENTS: Algebra[Exponent] = Algebra(
    one=0,
    times=lambda a, b: a + b,
    over=lambda a, b: a - b,
    larger=_larger_exponent,
    beside=_larger_exponent,  # sqrt(2) is rounded down to 1
    power=lambda a, n: a * n,
    root=lambda a, n: a // n,
    static=lambda s: math.frexp(s)[1] - 1,
)
"""Scales are exponents of two: Python integers or int32 arrays."""


Reads = Literal["data", "aligned", "rooted", "value"]


@dataclasses.dataclass(frozen=True)
class ScaleRule:
    """The operands that an operation reads, and the scale of its result.

    Attributes:
        formula: the scale of the result in terms of the operands' (sA, sB), n (a degree) and s (a
            number known from shapes alone).
        scale: the same as a function of an :class:`Algebra`, the operands' scales, and n or s.
        reads: what the operation is computed on: ``"data"``; ``"aligned"``, the data that all
            operands have at the result's scale; ``"rooted"``, those at a scale that has an n-th
            root; ``"value"``, the plain numbers.

    Example:
        >>> RULES["mul"].formula, RULES["mul"].scale(EXPONENTS, 3, -5)
        ('sA sB', -2)
    """

    formula: str
    scale: Callable[..., Any]
    reads: Reads = "data"


KEPT = ScaleRule("sA", lambda k, a: a)
UNSCALED = ScaleRule("1", lambda k, *_: k.one)
ONE = dataclasses.replace(UNSCALED, reads="value")
PRODUCT = ScaleRule("sA sB", lambda k, a, b: k.times(a, b))
QUOTIENT = ScaleRule("sA / sB", lambda k, a, b: k.over(a, b))
LARGER = ScaleRule("max(sA, sB)", lambda k, a, b: k.larger(a, b), "aligned")
BESIDE = ScaleRule("sqrt(sA^2 + sB^2)", lambda k, a, b: k.beside(a, b), "aligned")
POWER = ScaleRule("sA^n", lambda k, a, n: k.power(a, n))
ROOT = ScaleRule("sA^(1/n)", lambda k, a, n: k.root(a, n), "rooted")
INVERSE_ROOT = ScaleRule("1 / sA^(1/n)", lambda k, a, n: k.over(k.one, k.root(a, n)), "rooted")
CONTRACTION = ScaleRule("sA sB s", lambda k, a, b, s: k.times(k.times(a, b), k.static(s)))
TOTAL = ScaleRule("sA s", lambda k, a, s: k.times(a, k.static(s)))
MEAN = ScaleRule("sA / s", lambda k, a, s: k.over(a, k.static(s)))
AT_LEAST_ONE = ScaleRule("max(sA, 1)", lambda k, a: k.larger(a, k.one))
NORMALISED = ScaleRule("1 / sum of the data", lambda k, total: 1 / total)

RULES: dict[str, ScaleRule] = {
    **dict.fromkeys(("add", "sub", "maximum", "minimum", "where", "concatenate", "clip"), LARGER),
    "mul": PRODUCT,
    "div": QUOTIENT,
    "integer_pow": POWER,
    "square": POWER,
    "sqrt": ROOT,
    "rsqrt": INVERSE_ROOT,
    **dict.fromkeys(("matmul", "dot_general", "conv"), CONTRACTION),
    **dict.fromkeys(("sum", "cumsum"), TOTAL),
    "mean": MEAN,
    **dict.fromkeys(("max", "min", "neg", "abs", "relu", "gelu", "cast_data"), KEPT),
    **dict.fromkeys(("exp", "log", "tanh", "sigmoid", "sin", "cos", "erf"), ONE),
    "softmax": NORMALISED,
    "log_softmax": AT_LEAST_ONE,
}
"""The rule of each operation of :mod:`scalewise.scaled`."""


class HasScale(Protocol):
    """An operand: data and one scale, or one for each of the first axes of the data."""

    @property
    def data(self) -> jax.Array: ...

    @property
    def scale(self) -> Any: ...

    @property
    def takes_scale(self) -> bool:
        """Whether the operand has no scale of its own beside others, as constants."""
        ...

    def at(self, scale: Any, /) -> jax.Array: ...

    def value(self) -> jax.Array: ...


def combined(
    rule: ScaleRule, algebra: Algebra[S], operands: Sequence[HasScale], *static: float
) -> tuple[list[jax.Array], S]:
    """Returns what an operation is computed on for each operand, and the scale of its result.

    ``static`` is the rule's n or s.
    """
    scales = [x.scale for x in operands]
    match rule.reads:
        case "value":
            return [x.value() for x in operands], algebra.one
        case "aligned":
            own = [x.scale for x in operands if not x.takes_scale] or [algebra.one]
            scale = functools.reduce(functools.partial(rule.scale, algebra), own)
            return [x.at(scale) for x in operands], scale
        case "rooted" if algebra is EXPONENTS:  # what the root leaves remains with the data
            (n,) = static
            data = [x.at(algebra.power(algebra.root(x.scale, int(n)), int(n))) for x in operands]
            return data, rule.scale(algebra, *scales, n)
    return [x.data for x in operands], rule.scale(algebra, *scales, *static)


def static_scale(terms: int) -> float:
    """Returns ``sqrt(terms)``, rounded to a power of two: the static scale of a sum of so many."""
    return 2.0 ** round(math.log2(max(1, terms)) / 2)


@dataclasses.dataclass(frozen=True)
class ScaledOperand:
    """``data * scale``, or ``data * 2**scale``, as ``algebra`` says; stored before in ``dtype``."""

    data: jax.Array
    scale: jax.Array
    algebra: Algebra
    dtype: np.dtype

    @property
    def takes_scale(self) -> bool:
        return False

    def value(self) -> jax.Array:
        return times(self.data, self.scale, self.algebra)

    def at(self, scale: Scale) -> jax.Array:
        if self.algebra is EXPONENTS:
            return ldexp(self.data, jnp.int32(self.scale) - jnp.int32(scale))
        ratio = jnp.where(scale == 0, 0, self.scale / jnp.where(scale == 0, 1, scale))
        return self.data * ratio.astype(self.data.dtype)


def times(data: jax.Array, scale: Scale, algebra: Algebra) -> jax.Array:
    if algebra is EXPONENTS:
        return ldexp(data, jnp.asarray(scale, jnp.int32))
    return data * jnp.asarray(scale, data.dtype)


def operands(name: str, *xs: ScaledArray | ArrayLike) -> list[ScaledOperand]:
    """Returns operands whose scales are of one kind: exponents if one of them has an exponent."""
    found = [_operand(name, x) for x in xs]
    if all(x.algebra is FACTORS for x in found):
        return found
    return [_with_exponent(x) for x in found]


def _operand(name: str, x: ScaledArray | ArrayLike) -> ScaledOperand:
    # computed in float32 (float64), whichever dtype the array stands for
    x = dataclasses.replace(x, value_dtype=None) if isinstance(x, ScaledArray) else _plain(name, x)
    data = x.data.astype(x.dtype)
    kept = isinstance(x.data, jax.Array) and jnp.issubdtype(x.data.dtype, jnp.floating)
    dtype = np.dtype(x.data.dtype if kept else x.dtype)  # results of codes and integers are wide
    if x.exponent is not None:
        if x.block is None and x.exponent.ndim == 0:
            return ScaledOperand(data, x.exponent, EXPONENTS, dtype)
        top = jnp.max(x.exponent, initial=ZERO_EXPONENT)
        below = dataclasses.replace(x, data=data, exponent=x.exponent - top)
        return ScaledOperand(below.value(), top, EXPONENTS, dtype)
    if x.scale is None:
        return ScaledOperand(data, jnp.asarray(1, x.dtype), FACTORS, dtype)
    scale = x.scale.value() if isinstance(x.scale, ScaledArray) else x.scale.astype(x.dtype)
    top, rest = _one_scale(scale)
    below = dataclasses.replace(x, data=data, scale=rest)
    return ScaledOperand(below.value(), top, FACTORS, dtype)


def _one_scale(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scale that remains, finite and not negative, and what data take of it.

    Rules take roots of scales, compare and invert them. Data behind a scale of zero are zeros.
    """
    top = jnp.max(jnp.where(jnp.isfinite(scale), jnp.abs(scale), 0), initial=0)
    top = jnp.where((top > 0) | jnp.all(scale == 0), top, 1)
    return top, scale / jnp.where(top == 0, 1, top)


def apart(
    x: ScaledArray | ArrayLike, axis: int
) -> tuple[ScaledArray | ArrayLike, jax.Array | None]:
    """Returns an operand with one scale, and factors that are constant along an axis, if any.

    A sum along the axis commutes with them, so that a matrix unit takes the data as they are.
    """
    if not isinstance(x, ScaledArray) or x.block is not None or not isinstance(x.scale, jax.Array):
        return x, None
    constant = x.scale.ndim == len(x.shape) > 1 and x.scale.shape[axis] == 1
    if not constant or x.scale.size == 1:
        return x, None
    top, rest = _one_scale(x.scale.astype(x.dtype))
    return ScaledArray(x.data, top), rest


def _plain(name: str, x: ArrayLike) -> ScaledArray:
    number = isinstance(x, int | float)
    x = jnp.asarray(x, jnp.float32 if number else None)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} takes ScaledArrays and real floating-point arrays, not {x.dtype}")
    if x.ndim:
        return ScaledArray(x)
    mantissa, power = split_power(x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32))
    return ScaledArray(mantissa.astype(x.dtype), jnp.where(x == 0, 0, power))


def _with_exponent(x: ScaledOperand) -> ScaledOperand:
    if x.algebra is EXPONENTS:
        return x
    mantissa, power = split_power(x.scale)
    exponent = jnp.where(x.scale == 0, ZERO_EXPONENT, exponent_of(power))
    return dataclasses.replace(x, data=x.data * mantissa, scale=exponent, algebra=EXPONENTS)


def common_dtype(*xs: ScaledOperand) -> np.dtype:
    """Returns the widest dtype of the operands', of numbers without axes if there are no others.

    FP16 for two of 8 bits that differ, float32 for FP16 and BF16.
    """
    dtypes = {x.dtype for x in xs if x.data.ndim} or {x.dtype for x in xs}
    size = max(d.itemsize for d in dtypes)
    widest = [d for d in dtypes if d.itemsize == size]
    if len(widest) == 1:
        return widest[0]
    return np.dtype(np.float16 if size == 1 else np.float32)


def stored(
    data: jax.Array, dtype: FormatLike, *, saturate: Saturation = False
) -> jax.Array | rounding.EncodedArray:
    fmt = format_(dtype)
    if fmt.dtype is None or fmt.bits <= 8 or saturate:
        return rounding.encode(data, fmt, saturate=saturate)
    return data.astype(fmt.dtype)


def applied(
    rule: str | ScaleRule,
    f: Callable[..., jax.Array],
    *xs: ScaledArray | ArrayLike,
    name: str = "",
    static: tuple[float, ...] = (),
) -> ScaledArray:
    found = operands(name or str(rule), *xs)
    rule = RULES[rule] if isinstance(rule, str) else rule
    data, scale = combined(rule, found[0].algebra, found, *static)
    return scaled_result(f(*data), scale, found[0].algebra, common_dtype(*found))


def scaled_result(
    data: jax.Array, scale: jax.Array, algebra: Algebra, dtype: FormatLike
) -> ScaledArray:
    kept = stored(data, dtype)
    if algebra is EXPONENTS:
        return ScaledArray.from_exponent(kept, scale)
    return ScaledArray(kept, scale)
