"""Loss scaling: a factor on the loss that lifts gradients over a narrow format's smallest number.

Micikevicius et al., "Mixed precision training" (ICLR 2018): multiply the loss by S, so that every
gradient is S times as large; if one of them isn't finite, leave the step out and reduce S; else
multiply by 1/S in float32 before anybody looks at a gradient (clipping, weight decay, moments).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._deprecated import renamed_arguments
from ._conditional_update import update_if
from ._finite import all_finite, at_least_float32, choose, is_float_array

Tree = Any


class LossScaleState(NamedTuple):
    """What loss scaling remembers from step to step.

    Attributes:
        scale: the factor on the next loss, float32, scalar.
        good_steps: finite steps since the scale last changed, int32.
        skipped: steps left out so far, int32.
        skipped_in_a_row: steps left out since the last finite one, int32.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """One factor for ever; steps with a non-finite gradient are left out all the same.

    Attributes:
        scale: positive; a power of two costs no bit of precision.
    """

    scale: float = 2.0**15

    def __post_init__(self):
        _positive(self, "scale")

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return _state(self.scale)

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after a step whose gradients were all finite, or were not."""
        return LossScaleState(
            state.scale,
            jnp.where(finite, state.good_steps + 1, 0),
            state.skipped + jnp.where(finite, 0, 1),
            jnp.where(finite, 0, state.skipped_in_a_row + 1),
        )


@renamed_arguments(smallest="min_scale", largest="max_scale")
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """The largest factor under which gradients stay finite, found and followed while training.

    Attributes:
        initial: the first factor; large, since it comes down by itself within a few steps.
        growth: what it is multiplied by after ``interval`` finite steps in a row; over 1.
        backoff: what it is multiplied by where a gradient isn't finite; between 0 and 1.
        interval: finite steps in a row before it grows.
        min_scale: a lower bound on it. Gradients beyond 65504 need one under 1 in FP16. Gradients
            that are NaN because of the data reach the bound within 40 steps of the default, and
            come back from it by one doubling in ``interval`` finite steps: set a bound of 1, say,
            where no gradient is that large, and look at the metrics' ``skipped_in_a_row``.
        max_scale: an upper bound on it.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**32

    def __post_init__(self):
        for field in ("initial", "growth", "backoff", "min_scale", "max_scale"):
            _positive(self, field)
        if not self.growth > 1:
            raise ValueError(f"DynamicLossScale.growth is {self.growth}; expected a number over 1")
        if not self.backoff < 1:
            raise ValueError(
                f"DynamicLossScale.backoff is {self.backoff}; expected a number under 1"
            )
        if not (isinstance(self.interval, int) and self.interval >= 1):
            raise ValueError(f"DynamicLossScale.interval is {self.interval!r}; expected 1, 2, ...")
        if not self.min_scale <= self.initial <= self.max_scale:
            raise ValueError(
                f"DynamicLossScale: initial {self.initial} isn't between "
                f"min_scale {self.min_scale} and max_scale {self.max_scale}"
            )

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return _state(self.initial)

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after a step whose gradients were all finite, or were not."""
        good = jnp.where(finite, state.good_steps + 1, 0)
        grows = good >= self.interval
        factor = jnp.where(finite, jnp.where(grows, self.growth, 1.0), self.backoff)
        scale = jnp.clip(state.scale * factor.astype(jnp.float32), self.min_scale, self.max_scale)
        skipped = state.skipped + jnp.where(finite, 0, 1)
        row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        return LossScaleState(scale, jnp.where(grows, 0, good), skipped, row)


LossScale = StaticLossScale | DynamicLossScale


def scale_loss(loss: jax.Array, state: LossScaleState) -> jax.Array:
    """``loss * scale`` in float32 (float64 for a float64 loss): what is to be differentiated."""
    loss = at_least_float32(loss)
    return loss * state.scale.astype(loss.dtype)


def unscale(gradients: Tree, state: LossScaleState) -> Tree:
    """Gradients times ``1 / scale``, in float32 (float64 stays): exact for a power of two.

    A gradient that isn't finite stays so.
    """
    return _times(gradients, 1 / state.scale)


def _times(gradients: Tree, factor: jax.Array) -> Tree:
    def leaf(g: Any) -> Any:
        if not is_float_array(g):
            return g
        g = at_least_float32(g)
        return g * factor.astype(g.dtype)

    return jax.tree.map(leaf, gradients)


def _norm(tree: Tree) -> jax.Array:
    """The root of the sum of all squares, in float32; 0 of an empty tree."""
    floats = [at_least_float32(x) for x in jax.tree.leaves(tree) if is_float_array(x)]
    sums = (jnp.sum(jnp.square(x)).astype(jnp.float32) for x in floats)
    return jnp.sqrt(sum(sums, jnp.float32(0)))


class LossScaledState(NamedTuple):
    """The state of :func:`loss_scaled`: the scale's, and the inner optimizer's."""

    loss_scale: LossScaleState
    inner: Any


def loss_scaled(
    optimizer: optax.GradientTransformation,
    scaling: LossScale | None = None,
    *,
    clip: float | None = None,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that takes the gradients of a scaled loss, and leaves bad steps out.

    Each update checks once whether all gradients are finite. If so they are unscaled in float32
    and handed to the inner optimizer, which may clip them: it sees their true size. If not, the
    updates are zero, the inner state keeps its bits (step counters too), and the scale follows.
    If ``update`` is also given the unscaled loss, as optax's ``value=``, and that isn't finite
    itself, the step is left out and the scale stays: no scale could have mended it.

    Args:
        optimizer: any optax transformation.
        scaling: how the scale moves; :class:`DynamicLossScale` by default.
        clip: largest global norm of the unscaled gradients, what
            ``optax.chain(optax.clip_by_global_norm(clip), optimizer)`` would clip to; but the one
            norm is also the finite check, and one factor unscales and clips. (Scaled gradients
            whose norm is beyond float32's range, 1.8e19 about, count as not finite.)
        axis_name: as for :func:`all_finite`.

    Returns:
        A transformation whose state holds a :class:`LossScaleState`; :func:`loss_scale_of` finds
        it, also under further wrappers.

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
    if not isinstance(scaling, StaticLossScale | DynamicLossScale):
        raise TypeError(
            "loss_scaled(optimizer, scaling) takes a StaticLossScale or a DynamicLossScale, not "
            f"a {type(scaling).__name__}: {scaling!r}"
        )
    if clip is not None and not clip > 0:
        raise ValueError(f"loss_scaled: clip is {clip!r}; expected a number over 0, or None")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> LossScaledState:
        return LossScaledState(scaling.init(), inner.init(params))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any):
        value = extra.get("value", jnp.float32(0))
        sound = all_finite(jnp.asarray(value), axis_name=axis_name)
        if clip is None:
            finite = sound & all_finite(updates, axis_name=axis_name)
            true = unscale(updates, state.loss_scale)
        else:
            norm = _norm(updates)
            finite = sound & all_finite(norm, axis_name=axis_name)
            true = _times(updates, jnp.minimum(1 / state.loss_scale.scale, clip / norm))

        def step(true: Tree, before: Any, params: Tree, extra: dict[str, Any]) -> tuple[Tree, Any]:
            return inner.update(true, before, params, **extra)

        updates, after = update_if(finite, step, state.inner, true, state.inner, params, extra)
        before = state.loss_scale
        unmended = before._replace(
            skipped=before.skipped + 1, skipped_in_a_row=before.skipped_in_a_row + 1
        )
        moved = choose(sound, scaling.update(state.loss_scale, finite), unmended)
        return updates, LossScaledState(moved, after)

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale_of(tree: Tree) -> LossScaleState:
    """The one :class:`LossScaleState` within a pytree, an optimizer's state say.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = _scales(tree)
    if len(found) != 1:
        raise ValueError(
            f"loss_scale_of: {len(found)} loss scales in this tree; expected the state of an "
            "optimizer that loss_scaled(...) wraps once"
        )
    return found[0]


def has_loss_scale(tree: Tree) -> bool:
    """Whether :func:`loss_scale_of` finds one."""
    return len(_scales(tree)) == 1


def _scales(tree: Tree) -> list[LossScaleState]:
    def is_state(x: Any) -> bool:
        return isinstance(x, LossScaleState)

    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]


def _state(scale: float) -> LossScaleState:
    return LossScaleState(jnp.float32(scale), jnp.int32(0), jnp.int32(0), jnp.int32(0))


def _positive(noun: Any, field: str) -> None:
    number = getattr(noun, field)
    if not (isinstance(number, int | float) and math.isfinite(number) and number > 0):
        raise ValueError(
            f"{type(noun).__name__}.{field} is {number!r}; expected a finite number over 0"
        )
