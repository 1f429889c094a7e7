"""``training.step``: a mixed-precision training step around a loss and an optax optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .._check import Count, Positive, checked
from .._jax import per_device
from .._resolve import resolve
from .._types import AxisName, PyTree
from ..autocasting import PolicyLike
from ..autoscaling import AmaxHistory, Recipe, RecipeLike, WithHistory, warn_of_second
from ..formats import FormatLike
from ..scalifying import Scalify
from . import _model as models
from ._gradients import at_least_float32, mean_over, own_buffers, tree_where
from ._loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleState,
    StaticLossScale,
    loss_scale_of,
    loss_scaled,
    scale_loss,
)
from ._moments import StateFormat, store_state
from ._weights import apply_updates, compensated, master_weights, stochastic_rounding

Weights = Literal["plain", "master", "stochastic", "compensated"]
WEIGHTS: dict[str, Callable] = {
    "plain": lambda optimizer: optimizer,
    "master": master_weights,
    "stochastic": stochastic_rounding,
    "compensated": compensated,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A training step, made by :func:`step`: ``init(model)`` once, then called for each batch."""

    loss: Callable[..., Any]  # the user's
    # wrapped for storage, narrow weights and loss scaling
    optimizer: optax.GradientTransformationExtraArgs
    params: DTypeLike | None = None  # in which the parameters are kept; None for their own
    accumulate: int = 1  # microbatches
    has_aux: bool = False
    # of the function from parameters to loss, by the policy
    transform: Callable[[Callable], Callable] = lambda f: f
    delayed: Recipe | None = None  # a recipe with a history, under which the gradient is computed
    axis_name: AxisName = None  # mapped axes over which gradients are averaged
    comm_format: FormatLike | None = None  # of gradients that devices send

    def __repr__(self) -> str:
        name = getattr(self.loss, "__name__", "a loss")
        return f"<Step of {name}: init(model), then a call for each batch>"

    def init(self, model: models.Model, *batch: PyTree) -> models.TrainState:
        """Returns the state before the first step.

        Its arrays are copies of the model's, so that ``jax.jit(train, donate_argnums=0)`` may reuse
        their memory.

        Args:
            model: a model or a pytree of parameters.
            batch: needed for delayed scaling, whose first scales come from a step on this batch:
                arguments like those of later steps; with ``axis_name``, like one device's part.
        """
        given, rest, structure = models.split(model)
        params, optimizer = given, self.optimizer.init(given)  # before narrowing: masters are exact
        if self.params is not None:
            params = jax.tree.map(lambda x: jnp.asarray(x).astype(self.params), params)
        state = models.TrainState(params, rest, optimizer, None, jnp.int32(0), structure)
        state = own_buffers(state, (given, rest))
        if self.delayed is None:
            return state
        if not batch or (len(batch) == 1 and batch[0] is None):
            raise TypeError("step: delayed scaling begins with a batch: init(model, batch)")
        return dataclasses.replace(state, history=self._first_history(self.delayed, state, batch))

    def __call__(
        self, state: models.TrainState, *batch: PyTree
    ) -> tuple[models.TrainState, models.Metrics]:
        """Makes one step; returns the new state and the step's metrics.

        Args:
            state: from ``init`` or the step before.
            batch: the loss function's arguments beside the model, one or several, pytrees whose
                arrays have the examples along their first axis.
        """
        models.check_call(state, batch)
        before = loss_scale_of(state.optimizer)
        gradients, loss, rest, aux, newest = self._gradients(state, batch, before)
        if self.axis_name is not None:
            members = self._members()
            mean = mean_over(gradients, self.axis_name, self.comm_format)
            gradients = jax.tree.map(lambda g: g * members, mean)
            loss = jax.lax.pmean(loss, self.axis_name)
            newest = jax.tree.map(lambda n: jax.lax.pmax(n, self.axis_name), newest)
        updates, optimizer = self.optimizer.update(
            gradients, state.optimizer, state.params, value=loss
        )
        after = loss_scale_of(optimizer)
        finite = after.skipped == before.skipped
        history = state.history
        if history is not None and newest is not None:
            history = tree_where(finite, history.after(newest), history)
        new = dataclasses.replace(
            state, params=apply_updates(state.params, updates),
            rest=tree_where(finite, rest, state.rest), optimizer=optimizer, history=history,
            step=state.step + 1,
        )  # fmt: skip
        in_a_row = after.skipped_in_a_row
        return new, models.Metrics(loss, finite, before.scale, after.skipped, in_a_row, aux)

    def _gradients(
        self, state: models.TrainState, batch: PyTree, scaling: LossScaleState
    ) -> tuple[PyTree, jax.Array, PyTree, PyTree, jax.Array | None]:
        """Returns scaled gradients, loss, other arrays, aux, and the operands' amaxes or None."""
        differentiate = self._differentiate(state.structure, self._members())
        params = self._own(state.params)

        def one(rest: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            args = (params, rest, batch, scaling)
            if self.delayed is None:
                return differentiate(*args), None
            if state.history is None:
                raise TypeError(
                    "step: delayed scaling needs a state with a history; make it by "
                    "step.init(model, batch)"
                )
            return WithHistory(differentiate, self.delayed).observe(state.history, *args)

        if self.accumulate == 1:
            (gradients, (loss, rest, aux)), newest = one(state.rest, batch)
            return gradients, loss, rest, aux, newest

        def add(carry, microbatch):
            total, rest = carry
            (gradients, (loss, rest, aux)), newest = one(rest, microbatch)
            total = jax.tree.map(lambda t, g: t + at_least_float32(g), total, gradients)
            return (total, rest), (loss, aux, newest)

        zeros = jax.tree.map(lambda p: jnp.zeros_like(at_least_float32(p)), params)
        parts = microbatches(batch, self.accumulate)
        start = self._own((zeros, state.rest))
        (total, rest), (losses, aux, newest) = jax.lax.scan(add, start, parts)
        mean = jax.tree.map(lambda t: t / self.accumulate, total)
        newest = jax.tree.map(lambda n: n.max(axis=0), newest)
        return mean, jnp.mean(losses), rest, aux, newest

    def _differentiate(self, structure: models.Structure, members: PyTree) -> Callable:
        def scaled(params: PyTree, rest: PyTree, batch: PyTree, scaling: LossScaleState):
            loss, rest, aux = self._apply(structure, params, rest, batch)
            # a device's share of the mean over the batch: gradients are summed over devices
            return scale_loss(loss, scaling) / members, (at_least_float32(loss), rest, aux)

        return jax.grad(scaled, has_aux=True)

    def _first_history(
        self, recipe: Recipe, state: models.TrainState, batch: PyTree
    ) -> AmaxHistory:
        """Returns the history of one step with current scaling, all microbatches together."""
        delayed = WithHistory(self._differentiate(state.structure, 1), recipe)
        scaling = loss_scale_of(state.optimizer)

        def one(part: PyTree) -> AmaxHistory:
            return delayed.init(state.params, state.rest, part, scaling)

        if self.accumulate == 1:
            return one(batch)
        histories = jax.lax.map(one, microbatches(batch, self.accumulate))
        return jax.tree.map(lambda a: a.max(axis=0), histories)

    def _own(self, tree: PyTree) -> PyTree:
        """Marks a tree as different on each device, so that JAX doesn't sum its gradient."""
        return tree if self.axis_name is None else per_device(tree, self.axis_name)

    def _members(self) -> int:
        return 1 if self.axis_name is None else jax.lax.psum(1, self.axis_name)

    def _apply(
        self,
        structure: models.Structure,
        params: PyTree,
        rest: PyTree,
        batch: PyTree,
    ):
        arrays, treedef = jax.tree.flatten(batch)

        def whole(params, rest, arrays):
            if self.params is not None:  # stored narrow, computed as the float32 program
                params = jax.tree.map(at_least_float32, params)
            model = structure.merge(params, rest)
            out = self.loss(model, *jax.tree.unflatten(treedef, arrays))
            loss, aux = models.loss_and_aux(out, self.has_aux)
            return at_least_float32(loss), structure.rest(model), aux

        return self.transform(whole)(params, rest, arrays)


@checked
def step(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    policy: PolicyLike | RecipeLike | None = None,
    *,
    scaling: LossScale | None = None,
    weights: Weights | None = None,
    moments: Mapping[str, StateFormat] | str | None = None,
    clip: Positive | None = None,
    accumulate: Count = 1,
    has_aux: bool = False,
    axis_name: AxisName = None,
    comm_format: FormatLike | None = None,
    check_finite: bool = True,
) -> Step:
    """Returns a mixed-precision training step for a loss function and an optax optimizer.

    A step computes the loss under the policy and multiplies it by the loss scale; sums the
    gradients of the microbatches in float32; checks once whether all are finite; unscales them in
    float32 and clips them by their global norm; updates the optimizer, whose stored state is
    widened and stored again; and updates the weights.

    A step with a non-finite gradient changes only the loss scale: weights, moments, statistics and
    the history of delayed scaling keep their bits. If the loss itself isn't finite, before it is
    scaled, the loss scale stays as well: no other one would have helped.

    Args:
        loss: ``(model, batch) -> scalar``, or ``(model, inputs, labels, ...) -> scalar``, where
            ``model`` is like the one given to ``init``.
        optimizer: any optax transformation.
        policy: the precision of the loss: a :class:`~scalewise.Policy` or its string, for
            :func:`~scalewise.autocast`; a :class:`~scalewise.Recipe` or the name of one
            (``"fp8"``), for :func:`~scalewise.autoscale`; None changes nothing. With delayed
            scaling ``init`` takes a batch, too, and all microbatches of a step on all devices share
            one history.
        scaling: how the loss is scaled; by default :class:`DynamicLossScale` if the policy
            computes in float16, else a scale of 1. Non-finite steps are left out in any case.
        weights: how narrow weights (``p=f16`` or ``p=bf16`` in the policy) are updated:
            ``"master"`` (the default), ``"stochastic"``, ``"compensated"`` or ``"plain"``.
        moments: storages for the optimizer's state, as :func:`store_state` takes them.
        clip: clips the unscaled gradients to this global norm over all parameters.
        accumulate: number of microbatches of equal size that a batch is split into.
        has_aux: True if ``loss`` returns ``(scalar, aux)``.
        axis_name: mapped axes (of a ``shard_map``, say) over which the batch is split: gradients
            and loss are averaged over them, and all devices make or leave out the same steps. Not
            needed under ``jit`` with shardings.
        comm_format: format in which gradients are sent between devices, see :func:`mean_over`.
        check_finite: False makes every step without looking for infinities and NaN, which is what
            most programs in bfloat16 do; ``metrics.finite`` is then always True. Not with a loss
            scale that changes.

    Returns:
        A :class:`Step`: ``state = train.init(model)``, then ``state, metrics = train(state,
        batch)`` under ``jax.jit``. The model may be any pytree of floats, a Flax NNX module or an
        Equinox module.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from scalewise import training
        >>> def loss(params, batch):
        ...     return jnp.mean(jnp.square(batch @ params["w"] - 1))
        >>> train = training.step(loss, optax.adam(0.1), "p=f32,c=f16,o=f32", clip=1.0)
        >>> state = train.init({"w": jnp.zeros((2, 1))})
        >>> jitted = jax.jit(train)
        >>> for _ in range(60):  # the first scale, 65536, overflows FP16: one step is left out
        ...     state, metrics = jitted(state, jnp.eye(2))
        >>> bool(metrics.loss < 1e-2), int(metrics.skipped), float(metrics.scale)
        (True, 1, 32768.0)
    """
    if isinstance(policy, str):
        policy = resolve(policy, "policy", "recipe", where="step")
    transform, params, narrow = models.loss_transform(policy)
    if isinstance(policy, Recipe | Scalify):
        warn_of_second(loss, "training.step", stacklevel=4)
    delayed = policy if isinstance(policy, Recipe) and policy.is_delayed else None
    if weights is None:
        weights = "master" if params is not None and params.itemsize < 4 else "plain"
    if moments is not None:
        optimizer = store_state(optimizer, moments)
    if scaling is None:
        scaling = DynamicLossScale() if narrow else StaticLossScale(1.0)
    whole = loss_scaled(
        WEIGHTS[weights](optimizer), scaling, clip=clip, axis_name=axis_name,
        check_finite=check_finite,
    )  # fmt: skip
    if comm_format is not None and axis_name is None:
        raise ValueError("step: comm_format needs axis_name, the axes that gradients are sent over")
    return Step(
        loss, whole, params, accumulate, has_aux, transform, delayed, axis_name, comm_format
    )


def microbatches(batch: PyTree, n: int) -> PyTree:
    """Splits a batch into ``n`` parts along its first axis, stacked: ``(n, size / n, ...)``."""

    def leaf(x: jax.Array) -> jax.Array:
        size = x.shape[0] if getattr(x, "ndim", 0) else 0
        if not size or size % n:
            raise ValueError(
                f"step: accumulate={n} splits each array of the batch along its first axis into "
                f"{n} equal parts; one has shape {getattr(x, 'shape', ())}"
            )
        return x.reshape(n, size // n, *x.shape[1:])

    return jax.tree.map(leaf, batch)
