"""One kernel for NVIDIA's GPUs that rounds an array to blocks along both of its last axes.

It reads the array once. XLA reads it three times: for the scales along either axis, and to round.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._jax import ad, batching, gpu_kernel, is_exported, is_partitioned, jex, mlir, needs_devices
from ..devices import Device, units_for
from ..formats import BlockFormat
from ..scaled import Mx, ScaledArray, Scaling, is_known, quantize_measured, rounds_in_blocks
from ..scaled._blocks import in_range, nan_scales, split_blocks

TILE = 64  # rows and columns of an array that one program of the kernel rounds

both_ways_p = jex.Primitive("both_ways")
both_ways_p.multiple_results = True


def has_kernel(
    x: jax.Array, fmt: BlockFormat, scaling: Scaling | None, axis: int, device: Device | None
) -> bool:
    """Returns whether the kernel rounds an operand for a GPU with units for its blocks."""
    if device is None or device.platform != "cuda" or units_for(fmt, fmt, device) is None:
        return False
    own = rounds_in_blocks(fmt, scaling) and not nan_scales(fmt, scaling)
    if not own or fmt.element.infinities or x.dtype.itemsize > 4 or axis < x.ndim - 2:
        return False
    if x.ndim < 2 or not all(map(is_known, x.shape)) or x.shape[-2] % fmt.size:
        return False
    *rows, columns = x.shape
    return x.size > 0 and not columns % TILE and not x.size // columns % TILE


def rounded_by_kernel(options: tuple, x: jax.Array) -> ScaledArray:
    """Returns an array in blocks along an axis; the kernels of both axes are one for XLA."""
    fmt, scaling, axis, dtype = options
    outs = both_ways_p.bind(x.reshape(-1, x.shape[-1]), fmt=fmt, scaling=scaling, dtype=dtype)
    data, scale = outs[:2] if axis == x.ndim - 1 else outs[2:]
    scale = lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
    if axis == x.ndim - 1:
        parts = [y.reshape(*x.shape[:-1], -1) for y in (data, scale)]
    else:
        parts = [
            y.reshape(-1, *x.shape[:-2], y.size // (x.size // x.shape[-2])) for y in (data, scale)
        ]
        parts = [jnp.moveaxis(y, 0, -1) for y in parts]
    return ScaledArray(*parts, (axis, fmt.size))


def _by_xla(
    x: jax.Array, *, fmt: BlockFormat, scaling: Mx | None, dtype: DTypeLike
) -> list[jax.Array]:
    found, x = [], x.astype(dtype)
    for axis in (1, 0):
        copy = quantize_measured(x, x, fmt, scaling, axis)
        parts = copy.data, lax.bitcast_convert_type(copy.scale, jnp.uint8)
        found += [y if axis else y.T for y in parts]
    return found


def by_kernel(
    x: jax.Array, *, fmt: BlockFormat, scaling: Mx | None, dtype: DTypeLike, interpret: bool = False
) -> list[jax.Array]:
    (rows, columns), n = x.shape, fmt.size
    kinds = (1, fmt.element.dtype), (n, jnp.uint8)
    outs = [
        (jax.ShapeDtypeStruct((a, b // m), d), (TILE, TILE // m), order)
        for a, b, order in ((rows, columns, (0, 1)), (columns, rows, (1, 0)))
        for m, d in kinds
    ]
    grid, kernel = (rows // TILE, columns // TILE), partial(_kernel, fmt, scaling or Mx(), dtype)
    return gpu_kernel(kernel, grid, [(x, (TILE, TILE), (0, 1))], outs, interpret=interpret)


def _kernel(fmt: BlockFormat, scaling: Mx, dtype: DTypeLike, x, *outs) -> None:
    tile = x[...].astype(dtype).astype(jnp.float32)
    for axis, (numbers, scales) in ((1, outs[:2]), (0, outs[2:])):
        blocks = split_blocks(tile, fmt.size, axis)
        exponent = scaling.exponents(blocks, fmt.element, (axis + 1,))
        data = in_range(blocks, jnp.expand_dims(exponent, axis + 1), fmt.element)
        data = data.reshape(tile.shape).astype(fmt.element.dtype)
        code = (exponent + 127).astype(jnp.uint8)
        numbers[...], scales[...] = (data, code) if axis else (data.T, code.T)


def _lower(ctx: mlir.LoweringRuleContext, x: mlir.ir.Value, **params):
    split = is_partitioned(ctx) or is_exported(ctx)
    return mlir.lower_fun(_by_xla if split else by_kernel, multiple_results=True)(ctx, x, **params)


def _batched(args, dims, **params):
    outs = jax.vmap(partial(_by_xla, **params), in_axes=dims)(*args)
    return outs, [0] * len(outs)


def _abstract(x, **params):
    return [
        x.update(shape=y.shape, dtype=y.dtype)
        for y in jax.eval_shape(partial(_by_xla, **params), x)
    ]


both_ways_p.def_impl(_by_xla)
both_ways_p.def_abstract_eval(_abstract)
batching.primitive_batchers[both_ways_p] = _batched
ad.primitive_jvps[both_ways_p] = lambda primals, tangents, **params: jax.jvp(
    partial(_by_xla, **params), primals, [ad.instantiate_zeros(t) for t in tangents]
)
mlir.register_lowering(both_ways_p, mlir.lower_fun(_by_xla, multiple_results=True))
mlir.register_lowering(both_ways_p, _lower, platform="cuda")
needs_devices(both_ways_p)
