"""The straight-through derivative of casts to 8-bit dtypes, in the dtype of their inputs."""

from __future__ import annotations

from typing import Any

import jax

from .._jax import ad, batching, jex, mlir

straight_through_p = jex.Primitive("straight_through")


def straight_through(y: jax.Array, x: jax.Array) -> jax.Array:
    """Returns ``y`` with the derivative of ``x``: the tangent of y is that of x, in x's dtype.

    JAX gives a tangent the dtype of its primal value, but cotangents in an 8-bit dtype become
    NaN above its largest number. So the tangent of ``y`` keeps x's dtype. JAX's rules for
    conversions, products with ``preferred_element_type`` and operations that move data pass such
    a tangent on unchanged. Arithmetic in the 8-bit dtype itself isn't differentiable.
    """
    return straight_through_p.bind(jax.lax.stop_gradient(y), x)


def _jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    y = straight_through_p.bind(*primals)
    tangent = tangents[1]
    if type(tangent) is ad.Zero:
        return y, ad.Zero.from_primal_value(y)  # pyright: ignore[reportAttributeAccessIssue]
    return y, tangent


def _batched(args: tuple[Any, Any], dims: tuple[Any, Any]) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    moved = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    return straight_through_p.bind(*moved), 0


straight_through_p.def_impl(lambda y, x: y)
straight_through_p.def_abstract_eval(lambda y, x: y)
mlir.register_lowering(straight_through_p, lambda ctx, y, x: [y])
ad.primitive_jvps[straight_through_p] = _jvp
batching.primitive_batchers[straight_through_p] = _batched
