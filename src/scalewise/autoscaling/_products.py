"""Contractions of narrow operands, by the device's own narrow units if it has them.

The platform for which a program is lowered decides how a product is computed, so that a program
compiled ahead of time on a host runs as it would on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._jax import provenance_here, with_common_axes
from .._types import PyTree
from ..devices import DEVICES, Device, MatrixUnit, MatrixUnits, units_for
from ..formats import BF16, E5M2, FP16, BlockFormat
from ..formats import format as format_
from ..interpret import Equation, by_platform, unit_for, unit_result
from ..ops import matmul
from ..primitives import params
from ..scalifying import (
    Exponent,
    Origin,
    ScaledValue,
    bound,
    leading,
    precision_of,
    sixteen_bits,
    wide_dtype,
)
from ._blocks import Blocks, Factor, block_product, on_device, quantized, takes_blocks, widened
from ._grouped_kernel import GroupedProduct, grouped_product
from ._layout import stored_copy
from ._units import has_group_kernel, units_of
from ._value import UnscaledProduct

SIXTEEN = (FP16.dtype, BF16.dtype)
DEFAULT_DEVICE = DEVICES["h100"]  # if no other device is named or present


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class DeferredProduct:
    """A ``dot_general`` of narrow operands, computed when its value is first read.

    JAX computes the gradient of a weight with its axes exchanged, and transposes it. XLA on a
    CPU merges the transpose into a product that its library doesn't support: a GPT's step took a
    fifth longer. Here the operands change places instead. Flattening it as a pytree computes the
    value.
    """

    equation: Equation
    operands: tuple[Factor, Factor]
    dtype: DTypeLike
    exponent: Exponent
    origin: Origin = "stored"
    log2_std: float = 0.0
    device: Device | None = None
    units: MatrixUnits | None = None
    memo: dict[str, ScaledValue] = dataclasses.field(default_factory=dict, repr=False)
    placed: Callable = dataclasses.field(default_factory=provenance_here, repr=False)

    def load(self) -> ScaledValue:
        if "plain" not in self.memo:
            if "transposed" in self.memo:
                data = lax.transpose(self.memo["transposed"].data, self._exchange(1, 0))
                self.memo["plain"] = self._as_value(data, None)
            else:
                self.memo["plain"] = self._multiply(self.equation, self.operands)
        return self.memo["plain"]

    def transposed(self, permutation: Sequence[int]) -> ScaledValue | None:
        equation = self.equation
        exchanged = tuple(permutation) == self._exchange(0, 1)
        if "plain" in self.memo or not exchanged or params.out_sharding(equation) is not None:
            return None
        if "transposed" not in self.memo:
            precision = params.precision(equation)
            exchanged = equation.with_params(
                dimension_numbers=tuple((b, a) for a, b in params.dot_dimensions(equation)),
                precision=precision[::-1] if isinstance(precision, tuple) else precision,
            )
            self.memo["transposed"] = self._multiply(exchanged, self.operands[::-1])
        return self.memo["transposed"]

    def _multiply(self, equation: Equation, operands: Sequence[Factor]) -> ScaledValue:
        with self.placed():  # not on the line that reads the value
            product = multiply(equation, operands, self.dtype, self.device, self.units)
            value = self._as_value(product.value(), product)

        def in_float32() -> jax.Array:
            with self.placed():
                product = multiply(equation, operands, jnp.float32, self.device, self.units)
                return product.by_one_factor()

        if len(product.factors) == 2 and not any(map(jnp.ndim, product.factors)):
            value.memo.in_float32 = in_float32
        return value

    def _exchange(self, first: int, second: int) -> tuple[int, ...]:
        """Returns the permutation that moves one operand's axes in a result behind the other's."""
        contracted, batch = params.dot_dimensions(self.equation)
        n = len(batch[0])
        own = [x.ndim - n - len(contracted[0]) for x, _ in self.operands]
        middle, end = n + own[first], n + own[first] + own[second]
        return (*range(n), *range(middle, end), *range(n, middle))

    def _as_value(self, data: jax.Array, base: UnscaledProduct | None) -> ScaledValue:
        return ScaledValue(data, self.exponent, self.origin, log2_std=self.log2_std, base=base)

    def tree_flatten(self):
        return (self.load(),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return children[0]


def multiply(
    equation: Equation,
    operands: Sequence[Factor],
    dtype: DTypeLike,
    device: Device | None = None,
    units: MatrixUnits | None = None,
    stored: bool = False,
) -> UnscaledProduct:
    """Computes a contraction of narrow operands with scales that are powers of two.

    Products of two narrow numbers are exact in float32, so that all methods give the same result,
    except for the order in which sums are accumulated, and for intermediate results beyond
    float32's range. Sums are accumulated in float32 at least.

    - On a CPU, which has no narrow units for all shapes, operands are widened and multiplied by
      their scales first, so that consumers need no rescale.
    - All other platforms multiply the numbers as they are stored, if the device's units support the
      pair of formats, and scale the result. A backward product asks for the exact accumulation that
      Hopper's FP8 units otherwise shorten to 14 bits (``Precision.HIGHEST``), a forward product
      keeps the program's own ``precision``.
    - Blocks with scales of their own go to the device's block-scaled units. A device without them
      gets the products of numbers and scales in 16 bits.

    The axes of an operand's scale are the first axes of the data; or, of a ``dot_general``'s, all
    of them, of which contracted ones have length 1. ``device`` is an H100 by default. ``units``, if
    any, add the product on every platform, bit for bit, where they multiply the operands' formats.
    ``stored``: whether the second operand is an argument, as :func:`quantize_params` stores it.
    """
    total = wide_dtype(dtype)
    unit = None if units is None else _unit_of(equation, operands, units)
    if unit is not None:
        raw, above = _product_on_unit(equation, operands, unit, dtype)
        return UnscaledProduct(raw, above or _ordered(_result_scales(equation, operands)))
    grouped = _grouped(equation, operands, dtype, device, stored)
    device = DEFAULT_DEVICE if device is None or device.platform == "cpu" else device
    by_blocks = total == jnp.float32 and has_block_units(equation, operands, device)
    if (
        not by_blocks
        and grouped is None
        and not all(isinstance(x, Blocks) and x.source is not None for x, _ in operands)
    ):
        operands = plain(operands)
    scales = tuple(scale for _, scale in operands if scale is not None)
    kept = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16)) if by_blocks else None
    dtypes = kept or tuple(x.dtype for x, _ in operands)
    unit_dtypes = _unit_dtypes(equation, dtypes, dtype, device) if total == jnp.float32 else None

    def wide(arrays: Sequence[Factor]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        factors = [
            wider if scale is None else lax.mul(wider, leading(scale.astype(total), x))
            for x, scale in plain(arrays, total)
            for wider in [lax.convert_element_type(x, total)]
        ]
        out = bound(equation, factors, total).astype(dtype)
        given = _result_scales(equation, arrays)
        return out, tuple(map(jnp.ones_like, _tensor_scales(arrays) or given))

    def narrow(arrays: Sequence[Factor]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        assert unit_dtypes is not None
        arrays, ones = plain(arrays), tuple(map(jnp.ones_like, _tensor_scales(arrays)))
        factors = []
        for (x, _), (own, k) in zip(arrays, unit_dtypes, strict=True):
            made = widened(x, own, k)  # one that becomes narrower is stored once
            factors.append(stored_copy(made) if own.itemsize < x.dtype.itemsize else made)
        exact = equation.direction == "backward" and all(x.dtype.itemsize == 1 for x in factors)
        precise = equation.with_params(precision=precision_of(equation, exact))
        out = bound(precise, factors, dtype)
        shifted = [
            (x, scale if scale is None or k == 0 else scale * np.asarray(2.0**k, scale.dtype))
            for (x, scale), (_, k) in zip(arrays, unit_dtypes, strict=True)
        ]
        return out, ones or _ordered(_result_scales(equation, shifted))

    if not by_blocks and grouped is None and not scales and all(d == dtype for d in dtypes):
        return UnscaledProduct(bound(equation, [x for x, _ in plain(operands)], dtype))
    if unit_dtypes is None:
        return UnscaledProduct(wide(operands)[0])

    def by_block_units(arrays: Sequence[Factor]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (a, _), (b, _) = arrays
        multiply = functools.partial(on_device, dtype=dtype)
        return block_product(params.dot_dimensions(equation), a.copy, b.copy, multiply)  # pyright: ignore

    def by_groups(arrays: Sequence[Factor]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        assert grouped is not None
        copies = [x.copy for x, _ in arrays if isinstance(x, Blocks)]
        numbers = [x.copy.data if isinstance(x, Blocks) else x for x, _ in arrays]
        found = _result_scales(equation, arrays)
        factors = jnp.stack([*_ordered(found), *(np.float32(1) for _ in range(2 - len(found)))])
        given = *numbers, *equation.held, factors, *(c.scale for c in copies)
        out = grouped_product(*map(jnp.asarray, given), rule=grouped)
        return out, tuple(map(jnp.ones_like, found))

    routes = {device.platform: by_block_units} if by_blocks else {}
    routes |= {device.platform: by_groups} if grouped is not None else {}
    routes |= {"cpu": wide, "default": narrow}
    arrays = with_common_axes(tuple(operands))
    raw, factors = _by_platform(equation, routes, arrays, dtype)
    return UnscaledProduct(raw, factors)


def _by_platform(
    equation: Equation,
    routes: dict[str, Callable],
    arrays: tuple[Factor, ...],
    dtype: DTypeLike,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    # JAX traces here what holds tracers, a group's sizes; and XLA lowers block-scaled products only
    # where it knows the devices
    if equation.held or len(routes) > 2:
        return cast(tuple, lax.platform_dependent(arrays, **routes))

    def ignoring(_: None, *arrays: Factor, route: Callable) -> PyTree:
        return route(arrays)

    def scales(arrays: Sequence[Factor]) -> tuple[jax.Array, ...]:
        return _tensor_scales(arrays) or _result_scales(equation, arrays)

    factors = scales(arrays)
    if any(s.ndim for s in factors):
        factors = jax.eval_shape(scales, arrays)
    known = {name: functools.partial(ignoring, route=f) for name, f in routes.items()}
    raw = jax.ShapeDtypeStruct(_shape(equation, [x.shape for x, _ in arrays]), dtype)
    types = tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in factors)
    return by_platform(known, None, (raw, types), *arrays)


def _shape(equation: Equation, operands: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of a product, which may be a transpose of the program's."""
    if equation.name != "dot_general":
        return equation.out_avals[0].shape
    contracted, batch = params.dot_dimensions(equation)
    shape = [operands[0][i] for i in batch[0]]
    for own, summed, kept in zip(operands, contracted, batch, strict=True):
        shape += [n for i, n in enumerate(own) if i not in (*summed, *kept)]
    return tuple(shape)


def is_narrow(operand: Factor) -> bool:
    """Returns whether an operand has scales, so that its product shouldn't be transposed."""
    return operand[1] is not None or isinstance(operand[0], Blocks)


def has_block_units(equation: Equation, operands: Sequence[Factor], device: Device) -> bool:
    (a, _), (b, _) = operands
    if not (isinstance(a, Blocks) and isinstance(b, Blocks)):
        return False
    known = units_for(a.format, b.format, device) is not None
    return known and takes_blocks(equation, a.copy, b.copy)


def _grouped(
    equation: Equation,
    operands: Sequence[Factor],
    dtype: DTypeLike,
    device: Device | None,
    stored: bool,
) -> GroupedProduct | None:
    """Returns what the kernel for groups computes of two operands; None to leave them to XLA."""
    formats = [x.format if isinstance(x, Blocks) else format_(x.dtype) for x, _ in operands]
    if device is None or not has_group_kernel(equation, formats, device):
        return None
    axes = params.contracted_axes(equation)
    for (x, scale), (axis,) in zip(operands, axes, strict=True):
        blocks = isinstance(x, Blocks)
        if jnp.ndim(scale) if scale is not None else 0:
            return None
        if blocks and (x.copy.block is None or x.copy.block[0] % x.ndim != axis):
            return None
    return GroupedProduct(
        params.ragged_dimensions(equation),  # pyright: ignore
        jnp.dtype(dtype),
        precision_of(equation, equation.direction == "backward"),
        exchanged=stored and operands[1][0].ndim == 3,
    )


def plain(
    operands: Sequence[Factor], dtype: DTypeLike | None = None
) -> list[tuple[jax.Array, jax.Array | None]]:
    return [(x.value(dtype) if isinstance(x, Blocks) else x, scale) for x, scale in operands]


def _tensor_scales(operands: Sequence[Factor]) -> tuple[jax.Array, ...]:
    scales = [x.copy.tensor_scale for x, _ in operands if isinstance(x, Blocks)]
    return tuple(s.astype(jnp.float32) for s in scales if s is not None)


def _result_scales(equation: Equation, operands: Sequence[Factor]) -> tuple[jax.Array, ...]:
    """Returns scales with the axes of a product's result; those of one number are unchanged."""
    found = []
    for i, (x, scale) in enumerate(operands):
        if scale is not None and scale.ndim:
            contracted, batch = (axes[i] for axes in params.dot_dimensions(equation))
            other = operands[1 - i][0].ndim - len(contracted) - len(batch)
            free = [a for a in range(x.ndim) if a not in (*contracted, *batch)]
            moved = lax.transpose(scale, (*batch, *free, *contracted))
            kept, own = moved.shape[: len(batch)], moved.shape[len(batch) :][: len(free)]
            beside = (1,) * other
            scale = moved.reshape(*kept, *((*own, *beside) if i == 0 else (*beside, *own)))
        if scale is not None:
            found.append(scale)
    return tuple(found)


def _ordered(scales: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns two scales, the smaller first, so that a product doesn't overflow on the way.

    Behind a barrier: one small kernel computes both, not each kernel that reads the product.
    """
    if len(scales) < 2 or any(s.ndim for s in scales):
        return scales
    pair = lax.concatenate([lax.expand_dims(f(*scales), [0]) for f in (lax.min, lax.max)], 0)
    pair = lax.optimization_barrier(pair)
    return tuple(lax.index_in_dim(pair, i, keepdims=False) for i in range(2))


def _unit_dtypes(
    equation: Equation, dtypes: Sequence[np.dtype], dtype: DTypeLike, device: Device
) -> tuple[tuple[np.dtype, int], tuple[np.dtype, int]] | None:
    """Returns each operand's dtype in the units and log2 of its divisor; None for float32."""
    a, b = dtypes
    narrow = [d for d in (a, b) if d.itemsize == 1]
    if len(narrow) == 2:
        units = units_of(equation, format_(a), format_(b), device)
        if units is not None:
            (x, y), (j, k) = units.formats, units.shifts
            return (x.dtype, j), (y.dtype, k)  # pyright: ignore
    wider = {d for d in (a, b) if d.itemsize > 1}
    common = sixteen_bits(equation, list(wider)) if wider else None
    if wider and common is None:
        return None
    own = jnp.dtype(dtype if dtype in SIXTEEN else FP16.dtype)  # each holds every FP8 number
    if not device.rate(FP16, FP16):
        own = jnp.dtype(BF16.dtype)
    common = own if common is None else common
    return (common, 0), (common, 0)


def _unit_of(
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
    wide = [f for f in formats if f in (FP16, BF16)]
    common = wide[0] if wide else BF16 if E5M2 in formats else FP16
    return unit_for(equation, units, formats) or unit_for(equation, units, (common, common))


def _product_on_unit(
    equation: Equation, operands: Sequence[Factor], unit: MatrixUnit, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def exactly(*arrays: jax.Array) -> jax.Array:
        x, y, x_scales, y_scales = (jnp.asarray(z).astype(jnp.float32) for z in arrays)
        scales = x_scales, y_scales.swapaxes(-1, -2)
        out = matmul(x, y.swapaxes(-1, -2), accumulator=unit, scales=scales, out=jnp.float32)
        return out.astype(dtype)

    (a, _), (b, _) = operands
    if isinstance(unit.left, BlockFormat):
        assert isinstance(a, Blocks)
        assert isinstance(b, Blocks)
        return block_product(params.dot_dimensions(equation), quantized(a), quantized(b), exactly)
    numbers = [x.value(jnp.float32) if isinstance(x, Blocks) else x for x, _ in operands]
    wide = equation.varied([widened(x, jnp.float32) for x in numbers])
    return unit_result(equation, unit, [jnp.asarray(x) for x in wide], dtype), ()
