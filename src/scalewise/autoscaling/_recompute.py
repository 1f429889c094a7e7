"""Values that are computed again where they are read, instead of being stored until then.

A backward pass reads values of the forward pass: of a GELU five arrays, all functions of one array,
the product before it. Stored one by one they take more memory and more traffic than the program
without scales, in which XLA chooses. So an elementwise function of one large array remembers how it
was computed, and the backward pass computes it again from that array, its *source*.

If the source is kept unrounded, the second value equals the first. If it is stored rounded, only
functions are computed again that amplify its rounding error no more than a product would; all
others are rounded and stored themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax

from ..interpret import Equation, Value, is_quantization
from ..primitives import having, params
from ..scaled import at_least, is_known
from ._value import Lineage, ScaledValue

RECOMPUTED, STABLE = having("recomputed"), having("stable")
SAME_ORDER = having("same_order")
COSTLY, REDUCTIONS = having("costly"), having("reduces")
FEW = 16  # the least elements per result of a reduction that makes a statistic
DEEPEST = 48  # most operations between a value and its source


def lineage(
    equation: Equation,
    inputs: Sequence[Value],
    result: ScaledValue,
    small: int,
    kept: Callable[[ScaledValue], bool],
    keeps_norms: bool,
) -> Lineage | None:
    """Returns how a result is computed again; None if it is stored, as small arrays are.

    ``kept`` says of a value that it is stored unrounded, and ``keeps_norms`` that the source of a
    softmax or a norm is. A result that is stored unrounded isn't computed again from a source that
    would be rounded for it.
    """
    if equation.name not in RECOMPUTED or len(equation.out_avals) != 1:
        return None
    floats = [x for x in inputs if isinstance(x, ScaledValue) and x.constant_value is None]
    large = [x for x in floats if at_least(x.data.size, small) and not x.is_statistic]
    sources = {id(s): s for s in map(_source, large) if s is not None}
    depth = 1 + max((x.lineage.depth for x in large if x.lineage), default=0)
    if len(sources) > 1 or depth > DEEPEST:
        return None
    source = next(iter(sources.values()), None)
    own = [x.lineage.normalises for x in floats if x.lineage]
    normalises = any(own) or any(x.is_statistic for x in floats)
    rounded = source is not None and not kept(source) and not (normalises and keeps_norms)
    if rounded and (kept(result) or not _is_stable(equation, floats)):
        return None
    costly = equation.name in COSTLY or any(x.lineage.costly for x in large if x.lineage)
    return Lineage(equation, tuple(inputs), source, costly, normalises, depth)


def before_cast(x: ScaledValue) -> jax.Array | None:
    """Returns the argument that a value was cast from, as float32 weights are; None for others."""
    if x.lineage is None or x.lineage.equation.name != "convert_element_type":
        return None
    source = x.lineage.inputs[0]
    is_argument = isinstance(source, ScaledValue) and source.origin == "stored"
    return source.data if is_argument and source.exponent == x.exponent == 0 else None


def is_statistic(equation: Equation, inputs: Sequence[Value]) -> bool:
    """Returns whether a result is a statistic, much smaller than the array it was computed from.

    A reduction of at least ``FEW`` elements to one, or an elementwise function of such results.
    """
    floats = [x for x in inputs if isinstance(x, ScaledValue)]
    size = math.prod(equation.out_avals[0].shape)
    if equation.name in REDUCTIONS:
        return bool(floats) and at_least(floats[0].data.size, size * FEW)
    arrays = [x for x in floats if x.constant_value is None]
    if equation.name not in RECOMPUTED or not arrays or not is_known(size):
        return False
    return all(x.is_statistic for x in arrays) and any(at_least(x.data.size, size) for x in arrays)


def _source(x: ScaledValue) -> ScaledValue | None:
    return x if x.lineage is None else x.lineage.source


def _is_stable(equation: Equation, floats: Sequence[ScaledValue]) -> bool:
    if equation.name in STABLE:
        return not is_quantization(equation)
    # a sum may cancel, unless one addend is a constant, 1 - tanh(x), or all have one sign, x + x^3
    if equation.name == "add" and len(floats) == 2:
        return all(map(_odd, floats))
    return equation.name in ("add", "sub") and len(floats) == 1


def _odd(x: ScaledValue) -> bool:
    """Returns whether a value is its source times a factor that is never negative."""
    if x.lineage is None:
        return True
    equation = x.lineage.equation
    floats = [i for i in x.lineage.inputs if isinstance(i, ScaledValue)]
    arrays = [i for i in floats if i.constant_value is None]
    if len(arrays) != 1:
        return False
    match equation.name:
        case "integer_pow":
            kept = params.degree(equation) % 2 == 1
        case "mul":
            kept = all(i.constant_value > 0 for i in floats if i.constant_value is not None)
        case "convert_element_type":
            kept = True
        case name:
            kept = name in SAME_ORDER
    return kept and _odd(arrays[0])
