"""Contractions of narrow operands as a device's matrix units add them, on any platform."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..devices import MatrixUnit, MatrixUnits
from ..formats import BF16, E5M2, FP16, BlockFormat, Format
from ..formats import format as format_
from ..interpret import Equation, unit_for, unit_result
from ..ops import matmul
from ..primitives import params
from ._block_product import arranged, takes_blocks
from ._blocks import Blocks, Factor, quantized, widened

SIXTEEN = (FP16, BF16)


def unit_of(
    equation: Equation, operands: Sequence[Factor], units: MatrixUnits
) -> MatrixUnit | None:
    """Returns the unit that multiplies two operands as they are stored, or else in 16 bits.

    None if only float32 holds them, or for a mesh with explicit axes.
    """
    (a, _), (b, _) = operands
    if isinstance(a, Blocks) and isinstance(b, Blocks):
        if not (isinstance(a.format, BlockFormat) and isinstance(b.format, BlockFormat)):
            return None
        unit = units.unit(a.format, b.format)
        if unit is not None and takes_blocks(equation, quantized(a), quantized(b)):
            return unit
    formats = [format_(x.dtype) for x, _ in operands]
    return unit_for(equation, units, formats) or unit_for(equation, units, _wider(formats))


def _wider(formats: Sequence[Format]) -> tuple[Format, Format]:
    wide = [f for f in formats if f in SIXTEEN]
    narrow = [f for f in formats if f.bits <= 8]
    common = wide[0] if wide else BF16 if E5M2 in narrow else FP16
    return common, common


def product_on_units(
    equation: Equation, operands: Sequence[Factor], unit: MatrixUnit, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns a contraction of numbers without their scales, and scales of whole operands."""
    (a, _), (b, _) = operands
    if isinstance(unit.left, BlockFormat):
        assert isinstance(a, Blocks)
        assert isinstance(b, Blocks)
        return _of_blocks(equation, unit, a, b, dtype)
    numbers = [x.value(jnp.float32) if isinstance(x, Blocks) else x for x, _ in operands]
    wide = equation.varied([widened(x, jnp.float32) for x in numbers])
    return unit_result(equation, unit, [jnp.asarray(x) for x in wide], dtype), ()


def _of_blocks(
    equation: Equation, unit: MatrixUnit, a: Blocks, b: Blocks, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    copies = [quantized(a), quantized(b)]
    (x, x_scales), (y, y_scales) = arranged(params.dot_dimensions(equation), *copies)
    x, y = (jnp.asarray(z).astype(jnp.float32) for z in (x, y))
    x_scales, y_scales = (z.astype(jnp.float32) for z in (x_scales, y_scales))
    scales = x_scales, y_scales.swapaxes(-1, -2)
    out = matmul(x, y.swapaxes(-1, -2), accumulator=unit, scales=scales, out=jnp.float32)
    shape = equation.out_avals[0].shape
    assert math.prod(shape) == out.size
    above = [c.tensor_scale for c in copies if c.tensor_scale is not None]
    return out.reshape(shape).astype(dtype), tuple(s.astype(jnp.float32) for s in above)
