"""Narrow copies, their memory layout and lifetime, and barriers, decided when a program is
lowered."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import (
    Layout,
    ad,
    batching,
    is_exported,
    is_partitioned,
    jex,
    mlir,
    with_common_axes,
    with_layout_constraint,
)
from .._types import PyTree
from ..formats import Format
from ..interpret import by_platform, outlined
from ..scaled import ScaledArray, Scaling, layout, quantize, quantize_measured
from ._history import FixedAmax

# one equation each: `lax.platform_dependent` traces a branch for each platform
stored_p = jex.Primitive("stored_copy")
separate_p = jex.Primitive("separate_copy")
materialized_p = jex.Primitive("materialized")
after_p = jex.Primitive("after")


_lowered = functools.partial(mlir.lower_fun, multiple_results=False)


def narrow_copy(
    x: jax.Array, measured: jax.Array, fmt: Format, scaling: Scaling | None
) -> ScaledArray:
    fixed = isinstance(scaling, FixedAmax)
    options = (fmt, scaling.power_of_two if fixed else scaling, fixed)
    operands = (x, scaling.magnitude if fixed else measured)
    if fmt.dtype is None or fmt.bits < 8 or x.dtype.itemsize > 4:
        return outlined(_narrow_copy, options, *operands)
    types: Any = jax.ShapeDtypeStruct(x.shape, fmt.dtype), jax.ShapeDtypeStruct((), jnp.float32)
    result = ScaledArray(*types)
    routes = {"default": _narrow_copy, "whole_cpu": _flat_copy}
    return by_platform(routes, options, result, *operands)


def _narrow_copy(options: tuple, x: jax.Array, other: jax.Array) -> ScaledArray:
    fmt, scaling, fixed = options
    if fixed:
        copy = quantize(x, fmt, scaling=FixedAmax(other, scaling))
        return dataclasses.replace(copy, value_dtype=None)
    return quantize_measured(x, other, fmt, scaling)


def _flat_copy(options: tuple, x: jax.Array, other: jax.Array) -> ScaledArray:
    """Calls one function for all arrays of a size: each costs XLA some kernels to compile."""
    fixed = options[-1]
    flat = other if fixed else other.reshape(-1)
    copy = outlined(_narrow_copy, options, x.reshape(-1), flat)
    assert isinstance(copy.data, jax.Array)
    return dataclasses.replace(copy, data=copy.data.reshape(x.shape))


def stored_copy(data: jax.Array) -> jax.Array:
    """Returns ``data``, an operand's narrow copy, in the layout in which products read it.

    On a GPU the copy is written in row-major order, whichever order a product asks for, and its
    transpose is made from the narrow numbers: a kernel that writes both orders at once has a third
    to a half of the memory's bandwidth on an H200. A TPU's products read any order, and the
    prescription would reach attention's scores. A program that XLA partitions is left as it is: the
    partitioner does not split an array with a prescribed layout, but gathers it. So is an exported
    one, since no later release need understand the prescription.
    """
    return stored_p.bind(data)


def loaded_after(scale: jax.Array, other: PyTree) -> jax.Array:
    """Returns ``scale``, of stored numbers, so that a CPU multiplies them by it after ``other``.

    XLA on a CPU runs each operation as soon as its operands are computed. It would widen and
    transpose the operands of a backward product during the forward pass, and keep the wide
    arrays until the backward pass reads them. Here the scale, which is positive, seems to depend
    on a number of ``other``, which the backward pass computes. Elsewhere this changes nothing.
    """
    return scale if other is None else after_p.bind(scale, other)


def _after(scale: jax.Array, other: jax.Array) -> jax.Array:
    integer, *_ = layout(scale.dtype)
    first = lax.reshape(lax.slice(other, (0,) * other.ndim, (1,) * other.ndim), ())
    bits = lax.bitcast_convert_type(first.astype(scale.dtype), integer)
    bits = lax.broadcast(lax.min(bits, integer(0)), scale.shape)
    own = lax.bitcast_convert_type(scale, integer)
    return lax.bitcast_convert_type(lax.max(own, bits), scale.dtype)


def _lower_after(ctx, scale, other):
    if is_partitioned(ctx) or not ctx.avals_in[1].size:
        return [scale]
    return _lowered(_after)(ctx, scale, other)


def _row_major(data: jax.Array) -> jax.Array:
    row_major = with_layout_constraint(data, Layout(tuple(range(data.ndim))))
    return lax.optimization_barrier(row_major)


def _lower_for_device(ctx, data):
    if ctx.avals_in[0].ndim < 2 or is_partitioned(ctx) or is_exported(ctx):
        return [data]
    return _lowered(_row_major)(ctx, data)


def separate_copy(x: jax.Array, purpose: int) -> jax.Array:
    """Returns ``x`` behind a barrier, so that a device's compiler recomputes its functions.

    XLA merges two copies of one number. On a CPU it stores less if it may share results.
    """
    return separate_p.bind(x, purpose=purpose)


def force_materialize(total: jax.Array, part: jax.Array) -> jax.Array:
    """Returns ``total`` in a form that XLA on a CPU computes once, however many operations read it.

    The result is ``total`` with NaN where ``part``, one of its addends, is NaN: the same array. XLA
    on a CPU recomputes an array for each reader, and what it is computed from, if all its operands
    but one are broadcasts. The gradient of a norm ends that way, in a mean that is added
    everywhere. The gradient of a residual stream was thus recomputed in each layer. An array
    computed from two arrays is stored if a library function or a reduction reads it. Other
    platforms get ``total`` itself.
    """
    return materialized_p.bind(*with_common_axes((total, part)))


def _register(
    primitive: jex.Primitive,
    device: Callable,
    cpu: Callable = lambda ctx, first, *_, **params: [first],
    tpu: Callable | None = None,
) -> None:
    primitive.def_impl(lambda first, *_, **params: first)
    primitive.def_abstract_eval(lambda first, *_, **params: first)
    # a plan differentiates a step that has a gradient in it
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: (
        primitive.bind(*primals, **params),
        tangents[0],
    )
    mlir.register_lowering(primitive, device)
    mlir.register_lowering(primitive, cpu, platform="cpu")
    mlir.register_lowering(primitive, tpu or device, platform="tpu")


_register(stored_p, _lower_for_device, tpu=lambda ctx, data: [data])
_register(
    separate_p, _lowered(lambda x, purpose: lax.optimization_barrier((x, np.int32(purpose)))[0])
)
_register(
    materialized_p,
    lambda ctx, total, part: [total],
    _lowered(lambda total, part: lax.select(lax.ne(part, part), part, total)),
)
_register(after_p, lambda ctx, scale, other: [scale], _lower_after)
batching.defvectorized(stored_p)
batching.defvectorized(separate_p)
batching.defbroadcasting(materialized_p)
batching.primitive_batchers[after_p] = lambda arrays, axes: (arrays[0], axes[0])
