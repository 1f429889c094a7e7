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
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .. import rounding
from ..formats import FormatLike, Saturation
from ..formats import format as format_
from ._array import ScaledArray
from ._power import ZERO_EXPONENT, exponent_of, layout, ldexp, power_of_two, split_power


class Factor(NamedTuple):
    """``mantissa * 2**exponent``: a number that data are multiplied by, of any magnitude.

    The mantissa's magnitude is from 1 to 2, or it is 0, or not finite.
    """

    mantissa: float | jax.Array
    exponent: int | jax.Array


Exponent: TypeAlias = int | jax.Array
"""An exponent of 2: an integer if the program alone determines it, else an int32 array."""

S = TypeVar("S", Factor, Exponent)


@dataclasses.dataclass(frozen=True)
class Algebra(Generic[S]):
    """How scales of one kind are combined.

    Attributes:
        one: the scale of a plain array.
        times, over, larger, smaller: of two scales.
        power, root: of a scale and a Python integer. A root of an exponent is rounded down; what is
            left remains with the data.
        static: returns the scale that a Python float is, a power of two.
    """

    one: S
    times: Callable[[S, S], S]
    over: Callable[[S, S], S]
    larger: Callable[[S, S], S]
    smaller: Callable[[S, S], S]
    power: Callable[[S, int], S]
    root: Callable[[S, int], S]
    static: Callable[[float], S]


def _of_exponents(
    known: Callable[[int, int], int], traced: Callable[..., jax.Array]
) -> Callable[[Exponent, Exponent], Exponent]:
    def chosen(a: Exponent, b: Exponent) -> Exponent:
        if isinstance(a, int) and isinstance(b, int):
            return known(a, b)
        return traced(jnp.int32(a), jnp.int32(b))

    return chosen


def as_factor(x: jax.Array, exponent: int | jax.Array = 0) -> Factor:
    """Returns ``x * 2**exponent``; zeros have the exponent below all others."""
    mantissa, power = split_power(x)
    return Factor(mantissa, jnp.where(x == 0, ZERO_EXPONENT, exponent + exponent_of(power)))


def _of_python(s: float) -> Factor:
    mantissa, exponent = math.frexp(s)
    return Factor(2 * mantissa, exponent - 1)


def _larger_factor(a: Factor, b: Factor) -> Factor:
    higher = (a.exponent > b.exponent) | (
        jnp.equal(a.exponent, b.exponent) & (a.mantissa > b.mantissa)
    )
    return Factor(*(jnp.where(higher, x, y) for x, y in zip(a, b, strict=True)))


def _smaller_factor(a: Factor, b: Factor) -> Factor:
    larger = _larger_factor(a, b)
    is_a = jnp.equal(larger.exponent, a.exponent) & jnp.equal(larger.mantissa, a.mantissa)
    return Factor(*(jnp.where(is_a, y, x) for x, y in zip(a, b, strict=True)))


def _nonzero(x: float | jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1, x)


def _product_of_factors(a: Factor, b: Factor) -> Factor:
    return as_factor(jnp.asarray(a.mantissa * b.mantissa), a.exponent + b.exponent)


def _quotient_of_factors(a: Factor, b: Factor) -> Factor:
    return as_factor(jnp.asarray(a.mantissa / b.mantissa), a.exponent - b.exponent)


def _power_of_factor(a: Factor, n: int) -> Factor:
    if n < 0:
        return _quotient_of_factors(FACTORS.one, _power_of_factor(a, -n))
    if n < 2:
        return a if n else FACTORS.one
    square = _power_of_factor(_product_of_factors(a, a), n // 2)
    return _product_of_factors(square, a) if n % 2 else square


def _root_of_factor(a: Factor, n: int) -> Factor:
    whole = ldexp(jnp.asarray(a.mantissa), a.exponent % n)
    root = jnp.sqrt(whole) if n == 2 else whole ** (1 / n)
    return as_factor(root, a.exponent // n)


FACTORS: Algebra[Factor] = Algebra(
    one=Factor(1.0, 0),
    times=_product_of_factors,
    over=_quotient_of_factors,
    larger=_larger_factor,
    smaller=_smaller_factor,
    power=_power_of_factor,
    root=_root_of_factor,
    static=_of_python,
)
"""Scales are numbers that the data are multiplied by, positive or 0."""

EXPONENTS: Algebra[Exponent] = Algebra(
    one=0,
    times=lambda a, b: a + b,
    over=lambda a, b: a - b,
    larger=_of_exponents(max, lax.max),
    smaller=_of_exponents(min, lax.min),
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
CLIPPED = ScaleRule("min(sA, sB)", lambda k, a, b: k.smaller(a, b), "aligned")  # around 0
POWER = ScaleRule("sA^n", lambda k, a, n: k.power(a, n))
ROOT = ScaleRule("sA^(1/n)", lambda k, a, n: k.root(a, n), "rooted")
INVERSE_ROOT = ScaleRule("1 / sA^(1/n)", lambda k, a, n: k.over(k.one, k.root(a, n)), "rooted")
CONTRACTION = ScaleRule("sA sB s", lambda k, a, b, s: k.times(k.times(a, b), k.static(s)))
TOTAL = ScaleRule("sA s", lambda k, a, s: k.times(a, k.static(s)))
MEAN = ScaleRule("sA / s", lambda k, a, s: k.over(a, k.static(s)))
AT_LEAST_ONE = ScaleRule("max(sA, 1)", lambda k, a: k.larger(a, k.one))
NORMALISED = ScaleRule("1 / sum of the data", lambda k, total: k.over(k.one, total))
# Odd functions that are at most 1, and near 0 at most once or twice their argument.
SMALL = ScaleRule("min(sA, 1)", lambda k, a: k.smaller(a, k.one), "value")
SMALL_TWICE = ScaleRule(
    "min(2 sA, 1)", lambda k, a: k.smaller(k.times(a, k.static(2.0)), k.one), "value"
)

RULES: dict[str, ScaleRule] = {
    **dict.fromkeys(("add", "sub", "maximum", "minimum", "where", "concatenate"), LARGER),
    "clip": CLIPPED,
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
    **dict.fromkeys(("exp", "log", "sigmoid", "cos"), ONE),
    **dict.fromkeys(("tanh", "sin"), SMALL),
    "erf": SMALL_TWICE,
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
            return [x.value() for x in operands], rule.scale(algebra, *scales, *static)
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
    """``data * scale``; stored before in ``dtype``."""

    data: jax.Array
    scale: Factor
    dtype: np.dtype

    @property
    def takes_scale(self) -> bool:
        return False

    def value(self) -> jax.Array:
        return self.at(FACTORS.one)

    def at(self, scale: Factor) -> jax.Array:
        """Returns the data behind another scale; zeros behind 0."""
        ratio = jnp.asarray(self.scale.mantissa / _nonzero(scale.mantissa), self.data.dtype)
        ratio = jnp.where(jnp.equal(scale.mantissa, 0), 0, ratio)
        return ldexp(self.data * ratio, self.scale.exponent - scale.exponent)


def operands(name: str, *xs: ScaledArray | ArrayLike) -> list[ScaledOperand]:
    return [_operand(name, x) for x in xs]


def _operand(name: str, x: ScaledArray | ArrayLike) -> ScaledOperand:
    # computed in float32 (float64), whichever dtype the array stands for
    x = dataclasses.replace(x, value_dtype=None) if isinstance(x, ScaledArray) else _plain(name, x)
    data = x.data.astype(x.dtype)
    kept = isinstance(x.data, jax.Array) and jnp.issubdtype(x.data.dtype, jnp.floating)
    dtype = np.dtype(x.data.dtype if kept else x.dtype)  # results of codes and integers are wide
    if x.scale is None:
        return ScaledOperand(data, as_factor(jnp.asarray(1, x.dtype)), dtype)
    scale = x.scale.value() if isinstance(x.scale, ScaledArray) else x.scale.astype(x.dtype)
    top, rest = _one_scale(scale)
    below = dataclasses.replace(x, data=data, scale=rest)
    return ScaledOperand(below.value(), as_factor(top), dtype)


def into_scale(x: ScaledOperand, beside: ScaledOperand, number: bool) -> ScaledOperand:
    """Returns a number, or an array without axes beside one that has some, as a scale alone.

    Its data are then 1 or -1; a zero, and what isn't finite, stay data.
    """
    if x.data.ndim or not (number or beside.data.ndim):
        return x
    usable = jnp.isfinite(x.data) & (x.data != 0)
    size = as_factor(jnp.where(usable, jnp.abs(x.data), 1))
    sign = jnp.where(usable, jnp.sign(x.data), x.data)
    return dataclasses.replace(x, data=sign, scale=FACTORS.times(size, x.scale))


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
    data, scale = combined(rule, FACTORS, found, *static)
    return scaled_result(f(*data), scale, common_dtype(*found))


def scaled_result(data: jax.Array, scale: Factor, dtype: FormatLike) -> ScaledArray:
    """Returns data behind a scale; what of it leaves the range of float32 moves to the data."""
    mantissa, exponent = scale
    _, _, bias = layout(data.dtype)
    kept = jnp.clip(exponent, 1 - bias, bias - 1)
    beyond = jnp.where(jnp.equal(mantissa, 0), 0, exponent - kept)
    within = jnp.asarray(mantissa, data.dtype) * power_of_two(kept, data.dtype)
    return ScaledArray(stored(ldexp(data, beyond), dtype), within)
