"""Contractions of a program as a device's matrix units compute them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..devices import MatrixUnit, MatrixUnits
from ..formats import FP32, TF32, Format
from ..formats import format as format_
from ..ops import conv_general_dilated, dot_general
from ..primitives import params
from ._equation import Equation

# Of the precisions of a product of float32 operands, those that allow TF32.
FAST = (None, lax.Precision.DEFAULT)


def unit_for(
    equation: Equation, units: MatrixUnits, formats: Sequence[Format] | None = None
) -> MatrixUnit | None:
    """Returns the unit of a device that computes an equation of operands in these formats, or None.

    Operands in float32 are multiplied as TF32, unless the product asks for more precision.
    """
    if equation.name not in ("dot_general", "conv_general_dilated"):
        return None
    if any(not jnp.issubdtype(a.dtype, jnp.floating) for a in equation.in_avals):
        return None
    left, right = formats or [format_(a.dtype) for a in equation.in_avals]
    unit = units.unit(left, right)
    if unit is None and FP32 in (left, right):
        precision = params.precision(equation)
        asked = precision if isinstance(precision, tuple) else (precision, precision)
        if formats is not None or all(p in FAST for p in asked):
            left, right = (TF32 if fmt == FP32 else fmt for fmt in (left, right))
            unit = units.unit(left, right)
    return unit


def unit_result(
    equation: Equation,
    unit: MatrixUnit,
    inputs: Sequence[jax.Array],
    out: DTypeLike | None = None,
) -> jax.Array:
    """Returns a product or convolution, in the operands' one dtype or ``out``, by a unit."""
    a, b = inputs
    if equation.name == "dot_general":
        return dot_general(a, b, params.dot_dimensions(equation), accumulator=unit, out=out)
    window = params.conv_window(equation)
    features, batch = params.conv_groups(equation)
    return conv_general_dilated(
        a, b, window.strides, window.padding, lhs_dilation=window.lhs_dilation,
        rhs_dilation=window.rhs_dilation, dimension_numbers=params.conv_dimensions(equation),
        feature_group_count=features, batch_group_count=batch, accumulator=unit, out=out,
    )  # fmt: skip
