"""Products as a device's matrix units compute them, for emulations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..devices import MatrixUnit, architecture_of, matrix_unit
from ..formats import FP32, TF32, Format
from ..formats import format as format_
from ..interpret import Applied, Equation, Interpretation, State, Value
from ..ops import conv_general_dilated, dot_general
from ..primitives import params

# Of the precisions of a product of float32 operands, those that allow TF32.
FAST = (None, lax.Precision.DEFAULT)


def unit_of(equation: Equation, device: str, fmt: Format | None = None) -> MatrixUnit | None:
    """Returns the unit of a device that computes an equation; None if none does.

    Args:
        equation: of any primitive.
        device: as for :func:`scalewise.devices.matrix_unit`.
        fmt: of all operands; by default that of each operand's dtype. Operands in float32 are
            multiplied as TF32, unless the product asks for more precision.
    """
    if equation.name not in ("dot_general", "conv_general_dilated"):
        return None
    if any(not jnp.issubdtype(a.dtype, jnp.floating) for a in equation.in_avals):
        return None
    formats = [fmt or format_(a.dtype) for a in equation.in_avals]
    precision = params.precision(equation)
    asked = precision if isinstance(precision, tuple) else (precision, precision)
    for names in (formats, [TF32 if f == FP32 else f for f in formats]):
        if TF32 in names and fmt is None and any(p not in FAST for p in asked):
            return None
        try:
            return matrix_unit(device, *names)
        except ValueError:
            continue
    return None


def unit_result(equation: Equation, unit: MatrixUnit, inputs: Sequence[jax.Array]) -> jax.Array:
    """Returns a product or convolution as a unit computes it, in the dtype of its operands."""
    a, b = inputs
    if equation.name == "dot_general":
        return dot_general(a, b, params.dot_dimensions(equation), accumulator=unit)
    window = params.conv_window(equation)
    features, batch = params.conv_groups(equation)
    return conv_general_dilated(
        a, b, window.strides, window.padding, lhs_dilation=window.lhs_dilation,
        rhs_dilation=window.rhs_dilation, dimension_numbers=params.conv_dimensions(equation),
        feature_group_count=features, batch_group_count=batch, accumulator=unit,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OnDevice(Interpretation):
    """Computes products as a device's matrix units do, and all else as the program says."""

    device: str

    def __post_init__(self):
        architecture_of(self.device)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        unit = unit_of(equation, self.device)
        if unit is None:
            return super().apply(state, equation, inputs)
        wide = [x.astype(np.float64 if x.dtype == np.float64 else np.float32) for x in inputs]
        return state, [unit_result(equation, unit, wide).astype(equation.out_avals[0].dtype)]
