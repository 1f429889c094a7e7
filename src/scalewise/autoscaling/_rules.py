"""The table of rules: what each primitive does to (data, exponent) pairs, and which contraction
of floats an equation is.

Where an operation of :mod:`scalewise.scaled` has the same rule, its scale is the same function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._check import checked
from .._jax import jex
from ..interpret import Equation, Value
from ..primitives import PRIMITIVES, Family, names, params
from ..scaled import INVERSE_ROOT
from . import _families as families
from ._families import Function, fallback
from ._value import ScaledValue, materialize, per_slice, wide_dtype


class Contraction(NamedTuple):
    """A contraction of two values, ``finish`` of whose result is the equation's."""

    equation: Equation
    values: Sequence[ScaledValue]
    finish: Callable[[Value], ScaledValue] | None = None


def contraction_of(equation: Equation, inputs: Sequence[Value]) -> Contraction | None:
    """Returns the contraction of floats that an equation is; None for one on plain numbers.

    Operands of a ``scaled_dot`` in 8 bits keep their own scales; wider ones are those of a
    ``dot_general``.
    """
    finish = None
    match equation.name:
        case "ragged_dot" | "ragged_dot_general":
            a, b, *sizes = inputs
            equation, inputs = equation.bind_last(*sizes), [a, b]
        case "scaled_dot":
            if all(a.dtype.itemsize == 1 for a in equation.in_avals[:2]):
                return None
            a, b, *scales = [materialize(x).astype(jnp.float32) for x in inputs]
            pairs = zip((a, b), scales, strict=True)
            inputs = [ScaledValue(x * _blockwise(scale, x.shape)) for x, scale in pairs]
            changed = {"precision": None, "out_sharding": None, **equation.params}
            equation = equation.with_primitive(lax.dot_general_p, changed).with_operands(0, 1)
        case "symmetric_product":
            equation, inputs, finish = _gram(equation, inputs)
    values = [_materialize_stack(x) for x in with_integers(equation, inputs)]
    if not all(isinstance(x, ScaledValue) for x in values):
        return None
    return Contraction(equation, values, finish)


def _gram(equation: Equation, inputs: Sequence[Value]) -> tuple[Equation, list[Value], Callable]:
    """Returns A A^T of ``lax.linalg.symmetric_product``, alpha A A^T + beta C, and the rest."""
    dtype = wide_dtype(equation.out_avals[0].dtype)
    a, c = (dataclasses.replace(x, data=x.data.astype(dtype)) for x in inputs)
    batch, last = tuple(range(len(a.shape) - 2)), (len(a.shape) - 1,)
    changed = {
        "dimension_numbers": ((last, last), (batch, batch)),
        "precision": None,
        "preferred_element_type": equation.out_avals[0].dtype,
        "out_sharding": None,
    }
    square = equation.with_primitive(lax.dot_general_p, changed).with_operands(0, 0)
    alpha, beta = params.symmetric_factors(equation)

    def finish(product: Value) -> ScaledValue:
        return ScaledValue(alpha * materialize(product.load()) + beta * materialize(c))

    return square, [a, a], finish


def with_integers(equation: Equation, inputs: Sequence[Value]) -> Sequence[Value]:
    """Returns integers beside floats as floats, which are never rounded."""
    avals = equation.in_avals[: len(inputs)]
    real = [jnp.issubdtype(a.dtype, jnp.integer) or a.dtype == bool for a in avals]
    if not any(isinstance(x, ScaledValue) for x in inputs) or not any(real):
        return inputs

    def as_float(x: jax.Array) -> ScaledValue:  # bfloat16 holds all integers of 8 bits
        dtype = jnp.bfloat16 if x.dtype.itemsize == 1 else jnp.float32
        return ScaledValue(jnp.asarray(x).astype(dtype), integers=True)

    return [as_float(x) if exact else x for x, exact in zip(inputs, real, strict=True)]


def _blockwise(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    for axis, (n, blocks) in enumerate(zip(shape, scale.shape, strict=True)):
        scale = jnp.repeat(scale, n // blocks, axis)
    return scale


def features(equation: Equation) -> int:
    """Returns how many features a contraction sums over; a convolution's fewer, in or out."""
    shape = equation.in_avals[1].shape
    if equation.name == "conv_general_dilated":
        return min(shape[a] for a in params.conv_dimensions(equation).rhs_spec[:2])
    return math.prod(shape[a] for a in params.contracted_axes(equation)[1])


def mixes_freely(equation: Equation) -> bool:
    if equation.name == "conv_general_dilated":
        return params.conv_groups(equation) == (1, 1)
    return equation.name == "dot_general" and bool(params.contracted_axes(equation)[0])


def _materialize_stack(x: Value) -> Value:
    if not isinstance(x, ScaledValue) or not per_slice(x):
        return x
    return dataclasses.replace(x, data=materialize(x), exponent=0)


@dataclasses.dataclass(frozen=True)
class PrimitiveRule:
    family: Family
    rule: Function


FALLBACK = PrimitiveRule(Family.FALLBACK, fallback)


class RuleTable(dict[str, PrimitiveRule]):
    def __missing__(self, name: str) -> PrimitiveRule:
        return FALLBACK


# Rules that serve a whole family.
FAMILIES: dict[Family, Function] = {
    Family.STRUCTURAL: families.structural,
    Family.ALIGNED: families.aligned,
    Family.HOMOGENEOUS: families.homogeneous,
    Family.COMPARISON: families.aligned,
    Family.INVARIANT: families.invariant,
    Family.ORDERED: families.ordered,
    Family.CONTRACTION: fallback,  # unless it is a contraction_of floats
    Family.SPARSE: fallback,
}
# Rules of single primitives, which precede their family's.
PARTICULAR: dict[str, Function] = {
    "convert_element_type": families.convert,
    "rem": families.remainder,
    "select_n": families.select_n,
    "mul": families.product("mul"),
    "div": families.product("div"),
    "integer_pow": families.power,
    "square": families.power,
    "sqrt": families.root(2),
    "rsqrt": families.root(2, INVERSE_ROOT),
    "cbrt": families.root(3),
    "reduce_prod": families.product_of_all,
    "sin": families.contractive(1.0),
    "asinh": families.contractive(1.0),
    "tanh": families.contractive(1.0, bounded=True),
    "atan": families.contractive(1.0, bounded=True),
    "erf": families.contractive(2 / math.sqrt(math.pi), bounded=True),
}


def _rules() -> RuleTable:
    table = RuleTable()
    for name, row in PRIMITIVES.items():
        rule = PARTICULAR.get(name) or FAMILIES.get(row.family)
        if rule is not None:
            counts_as = Family.FALLBACK if row.family is Family.SPARSE else row.family
            table[name] = PrimitiveRule(counts_as, rule)
    return table


RULES = _rules()
MULTIPLIES = names(lambda row: row.family is Family.CONTRACTION)
# and operations that contain a contraction
CONTRACTS = MULTIPLIES | {
    "scaled_dot",
    "symmetric_product",
}


@checked
def register(primitive: jex.Primitive, family: Family) -> None:
    """Gives a primitive of your own the rule of a family, for ``autoscale`` and the audit.

    Without one, a primitive gets plain numbers in float32, which is always right, and its results
    begin with a scale of 1. With one, ``autoscale`` computes it on the data alone and finds the
    result's scale by the family's rule, and the audit knows how a loss scale passes through it.

    Args:
        primitive: any primitive that JAX doesn't define. Its lowering and its derivatives are
            your own.
        family: a family with a rule: ``Family.HOMOGENEOUS`` for ``f(c x) = c f(x)``, c > 0;
            ``STRUCTURAL`` for moved elements of one operand; ``ALIGNED`` for elements or sums of
            several operands; ``INVARIANT`` for ``f(c x) = f(x)``; ``COMPARISON`` for operands at
            one scale, without float results; ``ORDERED`` for sorts.

    Raises:
        ValueError: a family without a rule of its own, or a primitive of JAX.
    """
    if primitive.name in PRIMITIVES:
        raise ValueError(f"register: {primitive.name!r} is a primitive of JAX, which has its rule")
    allowed = [f for f in FAMILIES if f not in (Family.CONTRACTION, Family.SPARSE)]
    if family not in allowed:
        names = ", ".join(f"Family.{f.name}" for f in allowed)
        raise ValueError(f"register: no rule serves all of Family.{family.name}; expected {names}")
    RULES[primitive.name] = PrimitiveRule(family, FAMILIES[family])
