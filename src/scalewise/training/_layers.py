"""A separate loss scale for each layer, for gradients that no single scale can represent.

One scale covers gradients over FP16's 40 binades. If the gradients of layers lie further apart,
each layer's backward pass gets a scale of its own, which is removed where it ends (after Zhao et
al., "Adaptive loss scaling for mixed precision training", 2019; the scales follow the same rule as
the scale of a whole loss).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._check import Count, checked
from .._types import PyTree
from ._finite import at_least_float32, is_float_array
from ._loss_scale import LossScale, LossScaleState


@checked
def layer_scaled(
    layer: Callable[[PyTree, PyTree], PyTree],
) -> Callable[[jax.Array, PyTree, PyTree], PyTree]:
    """Returns a layer whose backward pass is scaled by a scale of its own.

    The forward pass is the layer's. The backward pass multiplies the cotangent by the scale in
    float32, and divides the layer's gradients by it, in float32 if the parameters or inputs have
    that dtype. Non-finite gradients become zero, so that they don't reach the layers below; the
    gradient with respect to the scale is their number. Differentiate with respect to the scales as
    well, and leave out the step if one of these counts isn't zero.

    Args:
        layer: ``(params, x) -> y`` on pytrees of floats, differentiable in both arguments.

    Returns:
        ``(scale, params, x) -> y``, where ``scale`` is a float32 scalar; reverse mode only.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def layer(w, x):  # in FP16, whose smallest number is 6e-8
        ...     return (x.astype(jnp.float16) * w.astype(jnp.float16)).astype(jnp.float32)
        >>> def loss(scale, w):
        ...     return 1e-9 * layer_scaled(layer)(scale, w, jnp.float32(1.0))
        >>> count, gradient = jax.grad(loss, argnums=(0, 1))(jnp.float32(2.0**20), jnp.float32(1.0))
        >>> float(count), round(float(gradient) * 1e9, 2)
        (0.0, 1.0)
    """

    @jax.custom_vjp
    def scaled(scale: jax.Array, params: PyTree, x: PyTree) -> PyTree:
        return layer(params, x)

    def forward(scale: jax.Array, params: PyTree, x: PyTree):
        y, pull = jax.vjp(layer, params, x)
        return y, (scale, pull)

    def backward(saved: PyTree, cotangent: PyTree):
        scale, pull = saved

        def multiplied(g: jax.Array) -> jax.Array:
            return (at_least_float32(g) * scale).astype(g.dtype) if is_float_array(g) else g

        gradients = pull(jax.tree.map(multiplied, cotangent))
        floats = [g for g in jax.tree.leaves(gradients) if is_float_array(g)]
        wrong = sum((jnp.sum(~jnp.isfinite(g)) for g in floats), jnp.int32(0))

        def divided(g: jax.Array) -> jax.Array:
            if not is_float_array(g):
                return g
            return jnp.where(jnp.isfinite(g), at_least_float32(g) / scale, 0).astype(g.dtype)

        return (wrong.astype(scale.dtype), *jax.tree.map(divided, gradients))

    scaled.defvjp(forward, backward)
    return scaled


@checked
def layer_scales(scaling: LossScale, layers: Count) -> LossScaleState:
    """Returns the state of one loss scale for each layer: every field is an array of that length.

    ``scaling.update(state, counts == 0)`` updates each scale by the number of non-finite gradients
    of its layer.

    Example:
        >>> from scalewise.training import DynamicLossScale
        >>> scaling = DynamicLossScale(initial=8.0)
        >>> state = layer_scales(scaling, 3)
        >>> scaling.update(state, jnp.array([True, False, True])).scale.tolist()
        [8.0, 4.0, 8.0]
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (layers,)), scaling.init())
