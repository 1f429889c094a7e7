"""Predicts standard deviations from shapes alone, as unit scaling does (arXiv 2303.11257).

A symbolic dimension (``jax.export``) counts as 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..interpret import Equation, Value
from ..primitives import Family, names, params
from ..scaled import predicted_size
from ._value import ScaledValue

SUMS = names(lambda row: row.family is Family.HOMOGENEOUS and row.autocast == "sum")


def of_argument(shape: tuple[int, ...]) -> float:
    """Returns log2 of an argument's standard deviation: 1 / sqrt(fan in) for a matrix, else 1."""
    return -math.log2(predicted_size(shape[:-1])) / 2 if len(shape) > 1 else 0.0


def predict(equation: Equation, family: Family, inputs: Sequence[Value]) -> float:
    """Returns log2 of the standard deviation of an equation's results, for independent operands."""
    floats = [x for x in inputs if isinstance(x, ScaledValue)]
    if not floats:
        return 0.0
    stds = [_of(x) for x in floats]
    match family:
        case Family.STRUCTURAL | Family.ORDERED:
            return stds[0]
        case Family.ALIGNED:
            varying = [s for s, x in zip(stds, floats, strict=True) if x.constant_value is None]
            return max(varying or stds)
        case Family.HOMOGENEOUS:
            terms = predicted_size(floats[0].shape) / predicted_size(equation.out_avals[0].shape)
            return stds[0] + (math.log2(max(1, terms)) / 2 if equation.name in SUMS else 0)
        case Family.PRODUCT:
            return stds[0] + (stds[1] if equation.name == "mul" else -stds[1])
        case Family.POWER:
            return stds[0] * params.degree(equation)
        case Family.CONTRACTION:
            return sum(stds) + math.log2(max(1, terms_of(equation))) / 2
    return 0.0


def terms_of(equation: Equation) -> int:
    """Returns how many products each element of a contraction is the sum of."""
    left, right = equation.in_avals[:2]
    if equation.name != "conv_general_dilated":
        terms = predicted_size(left.shape[a] for a in params.contracted_axes(equation)[0])
        groups = predicted_size(equation.out_avals[0].shape[:1]) if _sums_groups(equation) else 1
        return max(1, terms // groups)
    out_features = params.conv_dimensions(equation).rhs_spec[0]
    return predicted_size(n for axis, n in enumerate(right.shape) if axis != out_features)


def _sums_groups(equation: Equation) -> bool:
    numbers = params.ragged_dimensions(equation)
    return (
        numbers is not None
        and not numbers.rhs_group_dimensions
        and set(numbers.lhs_ragged_dimensions) <= set(params.contracted_axes(equation)[0])
    )


def _of(x: ScaledValue) -> float:
    number = x.constant_value
    if number is None:
        return x.log2_std
    return math.log2(abs(number)) if number and math.isfinite(number) else 0.0
