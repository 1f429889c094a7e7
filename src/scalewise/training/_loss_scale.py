"""Loss scaling: multiplies the loss so that gradients don't underflow in a narrow format.

Micikevicius et al., "Mixed precision training" (ICLR 2018): multiply the loss by S, so that every
gradient is S times as large. If a gradient isn't finite, leave out the step and reduce S. Otherwise
multiply the gradients by 1/S in float32 before they are used (clipping, weight decay, moments).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._check import Count, Fraction, Positive, Range, checked
from .._types import AxisName, PyTree
from ._gradients import all_finite, at_least_float32, by_parts, real_parts, tree_where, update_if


class LossScaleState(NamedTuple):
    """The state of loss scaling between steps.

    Attributes:
        scale: the factor on the next loss, float32, scalar.
        good_steps: number of finite steps since the scale last changed, int32.
        skipped: number of steps left out so far, int32.
        skipped_in_a_row: number of steps left out since the last finite one, int32.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


@checked
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A constant loss scale; steps with a non-finite gradient are left out.

    Attributes:
        scale: positive; multiplying by a power of two is exact.
    """

    scale: Positive = 2.0**15

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return _state(self.scale)

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Returns the state after a step whose gradients were all finite, or not."""
        return _counted(state, finite, jnp.where(finite, state.good_steps + 1, 0))


@checked
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that follows the largest value for which gradients stay finite.

    Attributes:
        initial: the first scale; it may be large, since it decreases within a few steps.
        growth: factor on the scale after ``interval`` finite steps in a row; over 1.
        backoff: factor on the scale after a non-finite gradient; between 0 and 1.
        interval: number of finite steps in a row before the scale grows.
        min_scale: a lower bound on the scale. Gradients beyond 65504 need a scale under 1 in FP16.
            NaN gradients of finite data move the scale to its bound, within 40 steps by default,
            from which it recovers by one factor of ``growth`` in ``interval`` finite steps. Set the
            bound to 1 if no gradient exceeds 65504, and watch ``skipped_in_a_row`` in the metrics.
        max_scale: an upper bound on the scale.
    """

    initial: Positive = 2.0**16
    growth: Annotated[float, Range(lambda x: 1 < x < math.inf, "a finite number over 1")] = 2.0
    backoff: Fraction = 0.5
    interval: Count = 2000
    min_scale: Positive = 2.0**-24
    max_scale: Positive = 2.0**32

    def __post_init__(self):
        if not self.min_scale <= self.initial <= self.max_scale:
            raise ValueError(
                f"DynamicLossScale: initial {self.initial} isn't between "
                f"min_scale {self.min_scale} and max_scale {self.max_scale}"
            )

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return _state(self.initial)

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Returns the state after a step whose gradients were all finite, or not."""
        good = jnp.where(finite, state.good_steps + 1, 0)
        grows = good >= self.interval
        factor = jnp.where(finite, jnp.where(grows, self.growth, 1.0), self.backoff)
        scale = jnp.clip(state.scale * factor.astype(jnp.float32), self.min_scale, self.max_scale)
        return _counted(state, finite, jnp.where(grows, 0, good))._replace(scale=scale)


LossScale = StaticLossScale | DynamicLossScale


def _counted(state: LossScaleState, finite: jax.Array, good_steps: jax.Array) -> LossScaleState:
    """Returns the state after one more step, with the same scales."""
    return state._replace(
        good_steps=good_steps,
        skipped=state.skipped + jnp.where(finite, 0, 1),
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
    )


@checked
def scale_loss(loss: jax.Array, state: LossScaleState) -> jax.Array:
    """Returns ``loss * scale`` in float32 (float64 for a float64 loss), to be differentiated."""
    loss = at_least_float32(loss)
    return loss * state.scale.astype(loss.dtype)


@checked
def unscale(gradients: PyTree, state: LossScaleState) -> PyTree:
    """Returns gradients times ``1 / scale`` in float32; exact for a power of two.

    float64 and complex numbers keep their dtype, integers their value.

    Non-finite gradients stay non-finite.
    """
    return _times(gradients, 1 / state.scale)


def _times(gradients: PyTree, factor: jax.Array) -> PyTree:
    def leaf(g: jax.Array) -> jax.Array:
        return by_parts(lambda x: x * factor.astype(x.dtype), g)

    return jax.tree.map(leaf, gradients)


class LossScaledState(NamedTuple):
    """The state of :func:`loss_scaled`: that of the loss scale, and the inner optimizer's."""

    loss_scale: LossScaleState
    inner: optax.OptState


@checked
def loss_scaled(
    optimizer: optax.GradientTransformation,
    scaling: LossScale | None = None,
    *,
    clip: Positive | None = None,
    axis_name: AxisName = None,
    check_finite: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to take gradients of a scaled loss and leave out non-finite steps.

    Each update checks once whether all gradients are finite. If they are, the gradients are
    unscaled in float32 and passed to the inner optimizer. If not, the updates are zero, the inner
    state keeps its bits (step counters included), and the loss scale is reduced.

    ``update`` also takes the unscaled loss as optax's ``value=``. If that isn't finite, the step is
    left out and the loss scale stays, since no other scale would have helped.

    Args:
        optimizer: any optax transformation.
        scaling: how the loss scale changes; :class:`DynamicLossScale` by default.
        clip: clips the unscaled gradients to this global norm, as
            ``optax.chain(optax.clip_by_global_norm(clip), optimizer)`` does. The same norm serves
            as the finite check, and one factor unscales and clips. Scaled gradients whose norm
            exceeds float32's range (about 1.8e19) count as non-finite.
        axis_name: as for :func:`all_finite`.
        check_finite: False makes every update, as a loop in bfloat16 without overflow checks does;
            gradients are only unscaled and clipped.

    Returns:
        A transformation whose state holds a :class:`LossScaleState`, which
        :func:`loss_scale_of` finds under any further wrappers.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> optimizer = loss_scaled(optax.sgd(1.0), DynamicLossScale(initial=8.0))
        >>> params = jnp.float32(1.0)
        >>> state = optimizer.init(params)
        >>> scaled = lambda w: scale_loss(w * 3, loss_scale_of(state))
        >>> updates, state = optimizer.update(jax.grad(scaled)(params), state, params)
        >>> float(updates)
        -3.0
        >>> updates, state = optimizer.update(jnp.float32(jnp.inf), state, params)
        >>> float(updates), float(loss_scale_of(state).scale), int(loss_scale_of(state).skipped)
        (0.0, 4.0, 1)
    """
    scaling = DynamicLossScale() if scaling is None else scaling
    if not check_finite and not isinstance(scaling, StaticLossScale):
        raise ValueError(
            f"check_finite=False needs scaling=StaticLossScale(...), not {scaling!r}, which "
            "changes with the overflows that are then not looked for"
        )
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> LossScaledState:
        return LossScaledState(scaling.init(), inner.init(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree):
        value, before = extra.get("value", jnp.float32(0)), state.loss_scale
        factor, tested = 1 / before.scale, updates
        if clip is not None:
            floats = map(at_least_float32, real_parts(updates))
            sums = (jnp.sum(jnp.square(x)).astype(jnp.float32) for x in floats)
            tested = jnp.sqrt(sum(sums, jnp.float32(0)))
            factor = jnp.minimum(factor, clip / tested)
        unscaled = _times(updates, factor)
        if not check_finite:
            updates, after = inner.update(unscaled, state.inner, params, **extra)
            return updates, LossScaledState(state.loss_scale, after)
        finite_loss = all_finite(jnp.asarray(value), axis_name=axis_name)
        finite = finite_loss & all_finite(tested, axis_name=axis_name)

        def step(updates: PyTree, state: PyTree, params: PyTree, extra: dict[str, PyTree]):
            return inner.update(updates, state, params, **extra)

        updates, after = update_if(finite, step, state.inner, unscaled, state.inner, params, extra)
        same_scale = _counted(before, finite, before.good_steps)
        scale = tree_where(finite_loss, scaling.update(before, finite), same_scale)
        return updates, LossScaledState(scale, after)

    return optax.GradientTransformationExtraArgs(init, update)


@checked
def loss_scale_of(tree: PyTree) -> LossScaleState:
    """Returns the only :class:`LossScaleState` in a pytree such as an optimizer's state."""
    found = loss_scales(tree)
    if len(found) != 1:
        raise ValueError(
            f"loss_scale_of: {len(found)} loss scales in this tree; expected the state of an "
            "optimizer that loss_scaled(...) wraps once"
        )
    return found[0]


def loss_scales(tree: PyTree) -> list[LossScaleState]:
    def is_state(x: object) -> bool:
        return isinstance(x, LossScaleState)

    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]


def _state(scale: float) -> LossScaleState:
    # arrays of their own: a state is donated only if no two leaves share a buffer
    counts = (jnp.zeros((), jnp.int32) for _ in range(3))
    return LossScaleState(jnp.full((), scale, jnp.float32), *counts)
