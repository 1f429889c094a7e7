"""What each family of primitives does to (data, exponent) pairs.

A primitive gets a rule by its family; one that has none is computed on plain numbers in the
compute dtype (``Family.FALLBACK``), which is always right within that dtype's range.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..interpret import Equation, gather_invariant, is_float, rebind
from ..primitives import PRIMITIVES, Family, params
from ..scaled import is_known
from ._products import DeferredProduct, is_narrow
from ._value import (
    ScaledValue,
    at_exponent,
    common_exponent,
    materialize,
    normalised,
    per_slice,
    shift,
    wide_dtype,
)

INFINITE = 120  # log2 of the least constant that is taken for an infinity


Function = Callable[[Any, Equation, Sequence[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Rule:
    family: Family
    rule: Function


def compute_dtype(aval: Any) -> Any:
    """float64 for a float64 type, float32 for all other floats."""
    return wide_dtype(aval.dtype)


def _bind(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """The primitive on plain arrays: floats go in and come out in ``by``'s flight dtypes."""
    own = [a for a in equation.in_avals + equation.out_avals if is_float(a)]
    if all(by.flight_dtype(a) == a.dtype for a in own):
        wanted = zip(inputs, equation.in_avals, strict=True)
        return equation.bind(*[_as(x, a.dtype) for x, a in wanted])
    wide = any(a.dtype == jnp.float64 for a in own)
    dtype = jnp.float64 if wide else jnp.float32
    outs = rebind(equation, [_as(x, dtype) for x in inputs], dtype)
    return [
        _as(y, by.flight_dtype(a)) if is_float(a) else y
        for y, a in zip(outs, equation.out_avals, strict=True)
    ]


def _as(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if is_float(x) and x.dtype != dtype else x


def _floats(inputs: Sequence[Any]) -> list[ScaledValue]:
    return [x for x in inputs if isinstance(x, ScaledValue)]


def _wrap(equation: Equation, outs: Sequence[Any], exponent: Any = 0, **fields: Any) -> list[Any]:
    return [
        ScaledValue(y, exponent, **fields) if is_float(a) else y
        for y, a in zip(outs, equation.out_avals, strict=True)
    ]


def fallback(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    plain = [materialize(x) if isinstance(x, ScaledValue) else x for x in inputs]
    return _wrap(equation, _bind(by, equation, plain))


def structural(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    floats = _floats(inputs)
    if len(floats) != 1 or per_slice(floats[0]):
        return fallback(by, equation, inputs)
    (x,) = floats
    outs = _bind(by, equation, [i.data if isinstance(i, ScaledValue) else i for i in inputs])
    return _wrap(equation, outs, x.exponent, constant_value=x.constant_value)


def homogeneous(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    floats = _floats(inputs)
    if len(floats) != 1 or per_slice(floats[0]):
        return fallback(by, equation, inputs)
    outs = _bind(by, equation, [i.data if isinstance(i, ScaledValue) else i for i in inputs])
    return _wrap(equation, outs, floats[0].exponent)


def _align(inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    exponent = common_exponent(_floats(inputs))
    return [at_exponent(x, exponent) if isinstance(x, ScaledValue) else x for x in inputs], exponent


def aligned(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    operands, exponent = _align(inputs)
    return _wrap(equation, _bind(by, equation, operands), exponent)


def remainder(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Of a divisor too small to be seen beside the dividend, there is nothing left to say: 0."""
    operands, exponent = _align(inputs)
    (out,) = _bind(by, equation, operands)
    divisor = inputs[1].data if isinstance(inputs[1], ScaledValue) else inputs[1]
    unseen = (operands[1] == 0) & (divisor != 0) & jnp.isfinite(operands[0])
    return _wrap(equation, [jnp.where(unseen, jnp.zeros_like(out), out)], exponent)


def comparison(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    return _bind(by, equation, _align(inputs)[0])


def invariant(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    outs = _bind(by, equation, [x.data if isinstance(x, ScaledValue) else x for x in inputs])
    return _wrap(equation, outs)


def _normalised(x: ScaledValue) -> ScaledValue:
    """A constant's power of two moves to the exponent where it would cost range in the data.

    What is meant as an infinity (``finfo.min`` times a mask) stays what it is: as an exponent it
    would take from its neighbours all that they have.
    """
    if x.constant_value is None or x.constant_value == 0 or not math.isfinite(x.constant_value):
        return x
    mantissa, exponent = math.frexp(x.constant_value)
    if -24 <= exponent <= 24 or exponent > INFINITE:
        return x
    return ScaledValue(jnp.full(x.shape, mantissa, x.data.dtype), exponent)


def _product(sign: int) -> Function:
    def rule(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
        a, b = (_normalised(x) for x in inputs)
        if per_slice(a) or per_slice(b):
            return fallback(by, equation, inputs)
        return _wrap(
            equation, _bind(by, equation, [a.data, b.data]), a.exponent + sign * b.exponent
        )

    return rule


def power(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    (x,) = inputs
    if per_slice(x):
        return fallback(by, equation, inputs)
    degree = int(params.degree(equation))
    if abs(degree) > 2:
        x = normalised(x, 0)
    return _wrap(equation, _bind(by, equation, [x.data]), x.exponent * degree)


def _root(sign: int) -> Function:
    def rule(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        if per_slice(x):
            return fallback(by, equation, inputs)
        half = x.exponent // 2  # an odd exponent leaves one power of two with the data
        odd = x.exponent - 2 * half
        return _wrap(equation, _bind(by, equation, [shift(x.data, odd)]), sign * half)

    return rule


def _contractive(slope: float, bounded: bool = False) -> Function:
    """An odd function with that slope at zero, which nowhere rises more steeply, or is bounded too.

    So ``f(x * 2^e) * 2^-e`` is no larger than x's data (times the slope), and where
    ``x * 2^e`` is too small for the compute dtype it is the slope times them.
    """

    def rule(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        exponent = x.exponent
        if (
            per_slice(x)
            or x.constant_value is not None
            or (isinstance(exponent, int) and exponent >= 0)
        ):
            return fallback(by, equation, inputs)
        kept = min(exponent, 0) if isinstance(exponent, int) else jnp.minimum(exponent, 0)
        if bounded and not isinstance(exponent, int):  # an infinity's value needs no scale
            kept = jnp.where(jnp.any(jnp.isinf(x.data)), 0, kept)
        number = materialize(x)
        (y,) = _bind(by, equation, [number])
        small = lax.abs(number) < number.dtype.type(2.0**-40)
        linear = shift(x.data * number.dtype.type(slope), exponent - kept)
        return _wrap(equation, [jnp.where(small, linear, shift(y, -kept))], kept)

    return rule


def ordered(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Sorting compares each array with itself alone: by its data is by its values."""
    if any(per_slice(x) for x in _floats(inputs)):
        return fallback(by, equation, inputs)
    outs = _bind(by, equation, [x.data if isinstance(x, ScaledValue) else x for x in inputs])
    exponents = [x.exponent if isinstance(x, ScaledValue) else 0 for x in inputs]
    exponents += [0] * (len(outs) - len(exponents))  # top_k also gives indices
    return [
        ScaledValue(y, e) if is_float(a) else y
        for y, a, e in zip(outs, equation.out_avals, exponents, strict=True)
    ]


def product_of_all(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    (x,) = inputs
    if not isinstance(x, ScaledValue) or per_slice(x) or not is_known(x.data.size):
        return fallback(by, equation, inputs)
    x = normalised(x, 0)
    terms = x.data.size // max(1, math.prod(equation.out_avals[0].shape))
    return _wrap(equation, _bind(by, equation, [x.data]), x.exponent * terms)


def cube_root(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    (x,) = inputs
    if per_slice(x):
        return fallback(by, equation, inputs)
    third = x.exponent // 3
    return _wrap(equation, _bind(by, equation, [shift(x.data, x.exponent - 3 * third)]), third)


def contraction(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    dtype = by.flight_dtype(equation.out_avals[0])
    values = [_materialize_stack(x) for x in inputs]
    operands, exponent = by.operands(equation, values)
    if equation.name == "dot_general" and any(map(is_narrow, operands)):
        return [DeferredProduct(equation, operands, dtype, exponent, device=by.device)]
    return [ScaledValue(by.product(equation, operands, dtype), exponent)]


def all_gather(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """The data go narrow, if the recipe says so; their scale is everybody's."""
    (x,) = inputs
    sent = None
    if isinstance(x, ScaledValue) and not per_slice(x):
        sent = by.to_send(x, params.axis_name(equation), equation)
    if sent is None:
        return structural(by, equation, inputs)
    (data,) = equation.bind(sent.data)
    return _wrap(equation, [_loaded(data, sent.scale, x.data.dtype)], x.exponent)


def psum(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """A sum over devices of what each sends narrow, added up in the compute dtype."""
    axes, groups = params.axis_name(equation), params.axis_groups(equation)
    x = inputs[0]
    plain = len(inputs) == 1 and isinstance(x, ScaledValue) and not per_slice(x) and groups is None
    sent = by.to_send(x, axes, equation) if plain else None
    if sent is None:
        return homogeneous(by, equation, inputs)
    parts = gather_invariant(sent.data, axes).astype(sent.scale.dtype)
    return _wrap(equation, [_loaded(jnp.sum(parts, 0), sent.scale, x.data.dtype)], x.exponent)


def _loaded(data: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """What was sent narrow, in its flight dtype again."""
    return (data.astype(scale.dtype) * scale).astype(dtype)


def grouped(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """A contraction whose rows come in groups, each with a matrix of its own (``ragged_dot``)."""
    a, b, *sizes = inputs
    return contraction(by, equation.bind_last(*sizes), [a, b])


def scaled_product(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """``lax.scaled_dot``: operands of 8 bits or fewer keep their numbers and the program's scales.

    Wider ones are multiplied by their scales, and rounded as those of a ``dot_general`` are.
    """
    if all(a.dtype.itemsize == 1 for a in equation.in_avals[:2]):
        return fallback(by, equation, inputs)
    a, b, *scales = [materialize(x).astype(jnp.float32) for x in inputs]
    operands = [
        ScaledValue(x * _blockwise(scale, x.shape)) for x, scale in zip((a, b), scales, strict=True)
    ]
    changed = {"precision": None, "out_sharding": None, **equation.params}
    narrow = equation.with_primitive(lax.dot_general_p, changed).with_operands(0, 1)
    return contraction(by, narrow, operands)


def gram(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """``lax.linalg.symmetric_product``: alpha A A^T + beta C, its product a contraction."""
    dtype = compute_dtype(equation.out_avals[0])
    a, c = (dataclasses.replace(x, data=x.data.astype(dtype)) for x in inputs)
    batch, last = tuple(range(len(a.shape) - 2)), (len(a.shape) - 1,)
    changed = {
        "dimension_numbers": ((last, last), (batch, batch)),
        "precision": None,
        "preferred_element_type": equation.out_avals[0].dtype,
        "out_sharding": None,
    }
    square = equation.with_primitive(lax.dot_general_p, changed).with_operands(0, 0)
    (product,) = contraction(by, square, [a, a])
    product = product.load() if isinstance(product, DeferredProduct) else product
    alpha, beta = params.symmetric_factors(equation)
    return _wrap(equation, [alpha * materialize(product) + beta * materialize(c)])


def sparse(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """A product of sparse arrays, whose operands stay as they are: it is said."""
    keep = getattr(by, "overrides", None)
    if keep is not None and keep.find(equation, "rounded") is not None:
        warnings.warn(
            f"autoscale: {equation.where()}: {equation.name} has no rule: the operands of a sparse "
            f"product stay in float32. Name it in the recipe, keep={{{equation.name!r}: 'fp32'}}, "
            "if so.",
            UserWarning,
            stacklevel=2,
        )
    return fallback(by, equation, inputs)


def _blockwise(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Scales of blocks, each repeated for the elements of its block."""
    for axis, (n, blocks) in enumerate(zip(shape, scale.shape, strict=True)):
        scale = jnp.repeat(scale, n // blocks, axis)
    return scale


def features(equation: Equation) -> int:
    """How many features a contraction sums over, or a convolution makes of them: the fewer."""
    shape = equation.in_avals[1].shape
    if equation.name == "conv_general_dilated":
        return min(shape[a] for a in params.conv_dimensions(equation).rhs_spec[:2])
    return math.prod(shape[a] for a in params.contracted_axes(equation)[1])


def _materialize_stack(x: ScaledValue) -> ScaledValue:
    return dataclasses.replace(x, data=materialize(x), exponent=0) if per_slice(x) else x


def select_n(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    which, *cases = inputs
    if not _floats(cases):
        return equation.bind(*inputs)
    operands, exponent = _align(cases)
    dtype = by.flight_dtype(equation.out_avals[0])
    return _wrap(equation, [lax.select_n(which, *[_as(x, dtype) for x in operands])], exponent)


def convert(by: Any, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    (x,) = inputs
    if not isinstance(x, ScaledValue) or not is_float(equation.out_avals[0]) or per_slice(x):
        return fallback(by, equation, inputs)
    dtype = by.flight_dtype(equation.out_avals[0])
    return [ScaledValue(_as(x.data, dtype), x.exponent, constant_value=x.constant_value)]


FALLBACK = Rule(Family.FALLBACK, fallback)


class RuleTable(dict[str, Rule]):
    """Rules by primitive name; a name without one gets the fallback."""

    def __missing__(self, name: str) -> Rule:
        return FALLBACK


# The rule of a family.
FAMILIES: dict[Family, Function] = {
    Family.STRUCTURAL: structural,
    Family.ALIGNED: aligned,
    Family.HOMOGENEOUS: homogeneous,
    Family.COMPARISON: comparison,
    Family.INVARIANT: invariant,
    Family.ORDERED: ordered,
    Family.CONTRACTION: contraction,
    Family.SPARSE: sparse,
}
# The rules of primitives that need another than their family's, or whose family has none.
PARTICULAR: dict[str, Function] = {
    "convert_element_type": convert,
    "all_gather": all_gather,
    "all_gather_invariant": all_gather,
    "psum": psum,
    "psum_invariant": psum,
    "rem": remainder,
    "select_n": select_n,
    "mul": _product(1),
    "div": _product(-1),
    "integer_pow": power,
    "square": power,
    "sqrt": _root(1),
    "rsqrt": _root(-1),
    "cbrt": cube_root,
    "reduce_prod": product_of_all,
    "sin": _contractive(1.0),
    "asinh": _contractive(1.0),
    "tanh": _contractive(1.0, bounded=True),
    "atan": _contractive(1.0, bounded=True),
    "erf": _contractive(2 / math.sqrt(math.pi), bounded=True),
    "ragged_dot": grouped,
    "ragged_dot_general": grouped,
    "scaled_dot": scaled_product,
    "symmetric_product": gram,
}


def _rules() -> RuleTable:
    """Returns the rule of each primitive that isn't simply computed on plain numbers."""
    table = RuleTable()
    for name, row in PRIMITIVES.items():
        rule = PARTICULAR.get(name) or FAMILIES.get(row.family)
        if rule is not None:
            counts_as = Family.FALLBACK if row.family is Family.SPARSE else row.family
            table[name] = Rule(counts_as, rule)
    return table


RULES = _rules()
