"""The rules by which operations choose the scale of their result from those of their operands.

They are those of the Scalify design (arXiv 2407.17353, docs/design.md of graphcore-research/
jax-scalify). The operations of :mod:`scalewise.scaled` and the rules of
:func:`scalewise.autoscale` are both made from them (:func:`combined`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ._power import split_power

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
    **dict.fromkeys(("max", "min", "neg", "abs", "relu", "gelu", "cast"), KEPT),
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
