"""The rules by which operations choose the scale of their result from those of their operands.

They are those of the Scalify design (arXiv 2407.17353, docs/design.md of graphcore-research/
jax-scalify). :func:`scalewise.autoscale` applies the same functions to exponents of two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

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
        power, root: of a scale and a Python integer. A root of an exponent is rounded down; what is
            left remains with the data.
        static: returns the scale that a Python float is, a power of two.
    """

    one: S
    times: Callable[[S, S], S]
    over: Callable[[S, S], S]
    larger: Callable[[S, S], S]
    power: Callable[[S, int], S]
    root: Callable[[S, int], S]
    static: Callable[[float], S]


def _larger_exponent(a: Exponent, b: Exponent) -> Exponent:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return lax.max(jnp.int32(a), jnp.int32(b))


FACTORS: Algebra[Scale] = Algebra(
    one=1.0,
    times=lambda a, b: a * b,
    over=lambda a, b: a / b,
    larger=jnp.maximum,
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
    power=lambda a, n: a * n,
    root=lambda a, n: a // n,
    static=lambda s: math.frexp(s)[1] - 1,
)
"""Scales are exponents of two: Python integers or int32 arrays."""


@dataclasses.dataclass(frozen=True)
class ScaleRule:
    """How an operation's result gets its scale.

    Attributes:
        formula: the scale of the result in terms of the operands' (sA, sB), n (a degree) and s (a
            number known from shapes alone).
        scale: the same as a function of an :class:`Algebra`, the operands' scales, and n or s.

    Example:
        >>> RULES["mul"].formula, RULES["mul"].scale(EXPONENTS, 3, -5)
        ('sA sB', -2)
    """

    formula: str
    scale: Callable[..., Any]


KEPT = ScaleRule("sA", lambda k, a: a)
ONE = ScaleRule("1", lambda k, *_: k.one)
PRODUCT = ScaleRule("sA sB", lambda k, a, b: k.times(a, b))
QUOTIENT = ScaleRule("sA / sB", lambda k, a, b: k.over(a, b))
LARGER = ScaleRule("max(sA, sB)", lambda k, a, b: k.larger(a, b))
POWER = ScaleRule("sA^n", lambda k, a, n: k.power(a, n))
ROOT = ScaleRule("sA^(1/n)", lambda k, a, n: k.root(a, n))
INVERSE_ROOT = ScaleRule("1 / sA^(1/n)", lambda k, a, n: k.over(k.one, k.root(a, n)))
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


def static_scale(terms: int) -> float:
    """Returns ``sqrt(terms)``, rounded to a power of two: the static scale of a sum of so many."""
    return 2.0 ** round(math.log2(max(1, terms)) / 2)
