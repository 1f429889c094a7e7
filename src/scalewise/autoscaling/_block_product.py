"""Multiplies block-scaled operands by the units that a device has for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._jax import ad, batching, has_explicit_mesh, jex, mlir, needs_devices
from ..formats import E2M1FN
from ..interpret import Equation
from ..primitives import params
from ..rounding import EncodedArray
from ..scaled import ScaledArray

block_product_p = jex.Primitive("block_product")


def takes_blocks(equation: Equation, a: ScaledArray, b: ScaledArray) -> bool:
    """Returns whether both operands' blocks are of one size, along one pair of contracted axes.

    False on an explicit mesh, where the sharding of such a product isn't known.
    """
    if equation.name != "dot_general" or has_explicit_mesh():
        return False
    if not (isinstance(a, ScaledArray) and isinstance(b, ScaledArray) and a.block and b.block):
        return False
    (left, right), _ = params.dot_dimensions(equation)
    (i, size), (j, other) = a.block, b.block
    return size == other and i in left and right[left.index(i)] == j and 0 not in (a.size, b.size)


def block_product(
    dimensions: Sequence[params.AxisPair],
    a: ScaledArray,
    b: ScaledArray,
    multiply: Callable[..., jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Multiplies two operands block by block; the factors are still to be applied.

    ``multiply`` gets each operand's numbers and both operands' scales, ``[batch, free, ...]``.
    """
    contracted, batch = dimensions
    (x, x_scale), (y, y_scale) = _arranged_pair(dimensions, a, b)
    out = multiply(x, y, x_scale, y_scale)
    shape = [a.shape[i] for i in batch[0]]
    for z, axes, own in zip((a, b), contracted, batch, strict=True):
        shape += [n for i, n in enumerate(z.shape) if i not in (*axes, *own)]
    scales = [z.tensor_scale for z in (a, b)]
    return out.reshape(shape), tuple(s.astype(jnp.float32) for s in scales if s is not None)


def on_device(x, y, x_scale, y_scale, *, dtype: DTypeLike) -> jax.Array:
    """Returns the sums over blocks of ``scale_x * scale_y * dot(block_x, block_y)``, in float32."""
    return block_product_p.bind(x, y, x_scale, y_scale, dtype=jnp.dtype(dtype))


def _arranged_pair(
    dimensions: Sequence[params.AxisPair], a: ScaledArray, b: ScaledArray
) -> list[tuple[jax.Array, jax.Array]]:
    """Returns each operand's numbers, ``[batch, free, contracted]``, and its scales likewise."""
    contracted, batch = dimensions
    assert a.block is not None
    last = contracted[0].index(a.block[0])
    order = [k for k in range(len(contracted[0])) if k != last] + [last]
    return [
        _arranged(x, [axes[k] for k in order], own)
        for x, axes, own in zip((a, b), contracted, batch, strict=True)
    ]


def _arranged(
    x: ScaledArray, contracted: Sequence[int], batch: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Of several contracted axes, the one along which blocks lie becomes the innermost."""
    assert x.block is not None
    data = in_four_bits(x.data) if isinstance(x.data, EncodedArray) else x.data
    scale = x.scale.data if isinstance(x.scale, ScaledArray) else x.scale
    assert isinstance(scale, jax.Array)
    axis, size = x.block
    free = [i for i in range(x.ndim) if i not in (*contracted, *batch)]
    order = (*batch, *free, *contracted)
    short = -x.shape[axis] % size
    data = jnp.transpose(data, order)
    if short:  # pads with zeros, which have any scale
        data = jnp.pad(data, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    sizes = [math.prod(x.shape[i] for i in axes) for axes in (batch, free)]
    scale = jnp.transpose(scale, order)
    return data.reshape(*sizes, -1), scale.reshape(*sizes, -1)


def in_four_bits(data: EncodedArray) -> jax.Array:
    """Returns packed codes of E2M1 as an array of XLA's dtype, without a copy."""
    assert data.format == E2M1FN
    pairs = lax.bitcast_convert_type(data.codes, jnp.float4_e2m1fn)
    whole = pairs.reshape(*data.codes.shape[:-1], -1)
    return lax.slice_in_dim(whole, 0, data.length, axis=-1)


def _by_units(x, y, x_scale, y_scale, *, dtype):
    return jax.nn.scaled_matmul(x, y, x_scale, y_scale, preferred_element_type=dtype)


def _in_float32(x, y, x_scale, y_scale, *, dtype):
    def whole(data, scale):
        size = data.shape[-1] // scale.shape[-1]
        return data.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), size, axis=-1)

    axes = (((2,), (2,)), ((0,), (0,)))
    out = lax.dot_general(whole(x, x_scale), whole(y, y_scale), axes)
    return out.astype(dtype)


def _abstract(x, y, x_scale, y_scale, *, dtype):
    return x.update(shape=(*x.shape[:2], y.shape[1]), dtype=dtype, weak_type=False)


def _batched(args, dims, *, dtype):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    moved = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    out = block_product_p.bind(*[x.reshape(-1, *x.shape[2:]) for x in moved], dtype=dtype)
    return out.reshape(size, -1, *out.shape[1:]), 0


def _jvp(primals, tangents, *, dtype):
    out = block_product_p.bind(*primals, dtype=dtype)
    wide = [p.astype(jnp.float32) for p in primals]
    given = [
        jnp.zeros_like(p) if type(t) is ad.Zero else t.astype(jnp.float32)  # pyright: ignore
        for p, t in zip(wide, tangents, strict=True)
    ]
    _, tangent = jax.jvp(lambda *args: _in_float32(*args, dtype=dtype), wide, given)
    return out, tangent


block_product_p.def_impl(jax.jit(_in_float32, static_argnames="dtype"))
block_product_p.def_abstract_eval(_abstract)
batching.primitive_batchers[block_product_p] = _batched
ad.primitive_jvps[block_product_p] = _jvp
mlir.register_lowering(block_product_p, mlir.lower_fun(_in_float32, multiple_results=False))
mlir.register_lowering(
    block_product_p, mlir.lower_fun(_by_units, multiple_results=False), platform="cuda"
)
needs_devices(block_product_p)
