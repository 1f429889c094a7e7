"""A product of a matrix unit as one JAX equation.

An interpretation, which rounds or records the result of each equation, then sees one product, not
the thousands of steps that compute it in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import ShapedArray, batching, jex, mlir
from ..devices import MatrixUnit, element_of
from ..formats import TF32
from ..formats import format as format_
from ..rounding import from_float64, round_bits, round_to
from ._matrix_units import unit_product

unit_p = jex.Primitive("matrix_unit")


def unit_matmul(unit: MatrixUnit, out: np.dtype, *operands: jax.Array) -> jax.Array:
    """Returns the product of matrices, and scales of block formats, with equal leading axes."""
    if not jax.sharding.get_abstract_mesh().empty:  # types carry more than shapes and dtypes
        return _computed(unit, out, *operands)
    return unit_p.bind(*operands, unit=unit, out=out)


def in_dtype(x: jax.Array, out: np.dtype) -> jax.Array:
    """Converts float64; rounds to the dtype's format first if a conversion would round twice."""
    fmt = format_(out)
    return from_float64(x if fmt.bits >= 32 else round_bits(x, fmt), out)


@partial(jax.jit, static_argnums=(0, 1))
def _computed(
    unit: MatrixUnit, out: np.dtype, a: jax.Array, b: jax.Array, *scales: jax.Array
) -> jax.Array:
    operands = [
        x if fmt == TF32 else round_to(x, fmt)
        for x, fmt in ((a, element_of(unit.left)), (b, element_of(unit.right)))
    ]
    with jax.enable_x64(True):

        def product(a: jax.Array, b: jax.Array, *scales: jax.Array) -> jax.Array:
            return unit_product(unit, a, b, scales or None)  # pyright: ignore[reportArgumentType]

        for _ in range(a.ndim - 2):
            product = jax.vmap(product)
        return in_dtype(product(*operands, *scales), out)


def _run(*operands: jax.Array, unit: MatrixUnit, out: np.dtype) -> jax.Array:
    return _computed(unit, out, *operands)


def _abstract(
    a: ShapedArray, b: ShapedArray, *scales: ShapedArray, unit: MatrixUnit, out: np.dtype
) -> ShapedArray:
    return ShapedArray((*a.shape[:-1], b.shape[-1]), out)


def _batch(
    operands: Sequence[jax.Array], dims: Sequence[int | None], *, unit: MatrixUnit, out: np.dtype
) -> tuple[jax.Array, int]:
    pairs = list(zip(operands, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    with jax.enable_x64(True):
        whole = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in pairs
        ]
        return unit_p.bind(*whole, unit=unit, out=out), 0


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: mlir.ir.Value, **params: Any
) -> Sequence[mlir.ir.Value]:
    # `emulate` binds float64 operands with x64 on; an outer `jit` lowers them after it has ended.
    with jax.enable_x64(True):
        return mlir.lower_fun(_run, multiple_results=False)(ctx, *operands, **params)


unit_p.def_impl(_run)
unit_p.def_abstract_eval(_abstract)
batching.primitive_batchers[unit_p] = _batch
mlir.register_lowering(unit_p, _lower)
