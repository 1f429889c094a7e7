"""A loss scale for each layer: where one for all of them must overflow here or flush there.

One scale serves gradients over FP16's 40 binades. Where layers lie further apart than that, each
gets its own, put on where its backward pass begins and taken off where it ends (after Zhao et al.,
"Adaptive loss scaling for mixed precision training", 2019; here found as for the whole loss).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._finite import at_least_float32, is_float_array
from ._loss_scale import LossScale, LossScaleState

Tree = Any


def layer_scaled(layer: Callable[[Tree, Tree], Tree]) -> Callable[[jax.Array, Tree, Tree], Tree]:
    """A layer whose backward pass runs under a scale of its own.

    Forward it is the layer. Backward the cotangent is multiplied by the scale in float32 before it
    enters, and what leaves, for parameters and for the layers below, is divided by it, in float32
    where that is the parameters' or the input's dtype. Values that aren't finite leave as zero, so
    that no layer below is blamed for them; how many there were is what comes back as *the gradient
    of the scale*: differentiate with respect to the scales, too, and leave the step out if any
    count isn't zero.

    Args:
        layer: ``(params, x) -> y``, pytrees of floats; differentiable in both.

    Returns:
        ``(scale, params, x) -> y``, scale a float32 scalar; reverse mode only.

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
    def scaled(scale: jax.Array, params: Tree, x: Tree) -> Tree:
        return layer(params, x)

    def forward(scale: jax.Array, params: Tree, x: Tree):
        y, pull = jax.vjp(layer, params, x)
        return y, (scale, pull)

    def backward(saved: Any, cotangent: Tree):
        scale, pull = saved

        def on(g: Any) -> Any:
            return (at_least_float32(g) * scale).astype(g.dtype) if is_float_array(g) else g

        gradients = pull(jax.tree.map(on, cotangent))
        floats = [g for g in jax.tree.leaves(gradients) if is_float_array(g)]
        wrong = sum((jnp.sum(~jnp.isfinite(g)) for g in floats), jnp.int32(0))

        def off(g: Any) -> Any:
            if not is_float_array(g):
                return g
            return jnp.where(jnp.isfinite(g), at_least_float32(g) / scale, 0).astype(g.dtype)

        return (wrong.astype(scale.dtype), *jax.tree.map(off, gradients))

    scaled.defvjp(forward, backward)
    return scaled


def layer_scales(scaling: LossScale, layers: int) -> LossScaleState:
    """The state of one scale for each of several layers: every field an array of that length.

    ``scaling.update(state, counts == 0)`` moves each by its own layer's count of values that
    weren't finite.

    Example:
        >>> from scalewise.training import DynamicLossScale
        >>> scaling = DynamicLossScale(initial=8.0)
        >>> state = layer_scales(scaling, 3)
        >>> scaling.update(state, jnp.array([True, False, True])).scale.tolist()
        [8.0, 4.0, 8.0]
    """
    if not (isinstance(layers, int) and layers >= 1):
        raise ValueError(f"layer_scales: layers is {layers!r}; expected 1, 2, ...")
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (layers,)), scaling.init())
