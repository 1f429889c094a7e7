"""``training.step``: the few lines everyone writes, in the right order, as one function."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._deprecated import renamed_arguments, warn_renamed
from .._resolve import resolve
from ..autocast import DTYPES, Policy, autocast
from ..autocast import policy as policy_
from ..autoscale import AmaxHistory, Recipe, WithHistory, autoscale
from ..autoscale.recipes import CATALOGUE
from ..interpret import per_device
from ._finite import at_least_float32, choose
from ._loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleState,
    StaticLossScale,
    loss_scale_of,
    loss_scaled,
    scale_loss,
)
from ._model import Structure, split
from ._moments import store_state
from ._reduce import mean_over
from ._weights import apply_updates, compensated, master_weights, stochastic_rounding

Tree = Any
Weights = Literal["plain", "master", "stochastic", "compensated"]
WEIGHTS: dict[str, Callable] = {
    "plain": lambda optimizer: optimizer,
    "master": master_weights,
    "stochastic": stochastic_rounding,
    "compensated": compensated,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a training step hands on to the next.

    Attributes:
        params: the trained arrays, in the policy's ``params`` dtype.
        rest: what else the model holds (batch statistics, random counters).
        optimizer: of the wrapped optimizer: masters, moments, loss scale.
        history: the operands' largest magnitudes in the steps before, for delayed scaling.
        step: steps so far, those left out included, int32.
        structure: how the model is put together again.
    """

    params: Tree
    rest: Tree
    optimizer: Tree
    history: AmaxHistory | None
    step: jax.Array
    structure: Structure = dataclasses.field(metadata={"static": True})

    def model(self) -> Any:
        """The model with its present weights."""
        return self.structure.merge(self.params, self.rest)


class Metrics(NamedTuple):
    """What a step has to say: scalars, all of them arrays.

    Attributes:
        loss: unscaled, the mean over microbatches.
        finite: whether the step was taken; if not, nothing but the loss scale changed.
        scale: the loss scale that this step used.
        skipped: steps left out so far.
        skipped_in_a_row: steps left out since the last one that was taken. A long row is no matter
            of the loss scale: data or weights aren't finite.
        aux: what the loss function returned beside the loss; stacked over microbatches.
    """

    loss: jax.Array
    finite: jax.Array
    scale: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    aux: Any = None


@renamed_arguments(wire="comm_format")
@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A training step, see :func:`step`: ``init(model)`` once, then ``state, metrics = it(...)``.

    Attributes:
        loss: the user's function.
        optimizer: wrapped for clipping, storage, weights and loss scaling, in that order.
        params: dtype in which the parameters are kept, None for their own.
        accumulate: microbatches to a step.
        has_aux: whether ``loss`` returns a pair.
        transform: what the policy does to the function from params to loss.
        delayed: a recipe with a history, under which that function's gradient is computed.
        axis_name: mapped axes over which gradients are averaged.
        comm_format: format in which gradients are sent between devices.
        warn_after: how many steps left out in a row are warned of; None for no warning.
    """

    loss: Callable
    optimizer: optax.GradientTransformationExtraArgs
    params: Any = None
    accumulate: int = 1
    has_aux: bool = False
    transform: Callable[[Callable], Callable] = lambda f: f
    delayed: Recipe | None = None
    axis_name: Any = None
    comm_format: Any = None
    warn_after: int | None = None

    def init(self, model: Any, *batch: Any) -> TrainState:
        """The state before the first step, of a model or a pytree of parameters.

        Args:
            model: what is trained.
            batch: for delayed scaling, which finds its first scales from a step on it: arguments
                like those to come, or, with ``axis_name``, like one member's part of them.

        Raises:
            TypeError: something in it that is to be trained isn't a real float array; delayed
                scaling, and no batch.
        """
        params, rest, structure = split(model)
        optimizer = self.optimizer.init(params)  # before narrowing: masters are exact
        if self.params is not None:
            params = jax.tree.map(lambda x: jnp.asarray(x).astype(self.params), params)
        state = TrainState(params, rest, optimizer, None, jnp.int32(0), structure)
        if self.delayed is None:
            return state
        if not batch or batch == (None,):
            raise TypeError("step: delayed scaling begins with a batch: init(model, batch)")
        return dataclasses.replace(state, history=self._first_history(self.delayed, state, batch))

    def __call__(self, state: TrainState, *batch: Any) -> tuple[TrainState, Metrics]:
        """One step on a batch: what the loss function takes beside the model, one argument or
        several, pytrees whose arrays have the examples along their first axis."""
        before = loss_scale_of(state.optimizer)
        gradients, loss, rest, aux, newest = self._gradients(state, batch)
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
        if history is not None:
            history = choose(finite, history.after(newest), history)
        new = dataclasses.replace(
            state,
            params=apply_updates(state.params, updates),
            rest=choose(finite, rest, state.rest),
            optimizer=optimizer,
            history=history,
            step=state.step + 1,
        )
        if self.warn_after is not None:
            _warn_of_skipped(self.warn_after, after)
        row = after.skipped_in_a_row
        return new, Metrics(loss, finite, before.scale, after.skipped, row, aux)

    def _gradients(self, state: TrainState, batch: Any) -> tuple[Tree, jax.Array, Tree, Any, Any]:
        """Scaled gradients, the loss as it is, the rest of the model, what else came of it, and,
        with a history, the largest magnitudes of its operands."""
        scaling, members = loss_scale_of(state.optimizer), self._members()
        differentiate = self._differentiate(state.structure, members)
        params = self._own(state.params)

        def one(rest: Tree, batch: Any) -> tuple[Any, Any]:
            args = (params, rest, batch, scaling)
            if self.delayed is None:
                return differentiate(*args), None
            if state.history is None:
                raise TypeError("step: the state has no history: init it by this step")
            return WithHistory(differentiate, self.delayed).observe(state.history, *args)

        if self.accumulate == 1:
            (gradients, (loss, rest, aux)), newest = one(state.rest, batch)
            return gradients, loss, rest, aux, newest

        def add(carry, microbatch):
            total, loss, rest = carry
            (gradients, (part, rest, aux)), newest = one(rest, microbatch)
            total = jax.tree.map(lambda t, g: t + at_least_float32(g), total, gradients)
            return (total, loss + part, rest), (aux, newest)

        zeros = jax.tree.map(lambda p: jnp.zeros_like(at_least_float32(p)), params)
        parts = microbatches(batch, self.accumulate)
        start = self._own((zeros, jnp.float32(0), state.rest))
        (total, loss, rest), (aux, newest) = jax.lax.scan(add, start, parts)
        mean = jax.tree.map(lambda t: t / self.accumulate, total)
        newest = jax.tree.map(lambda n: n.max(axis=0), newest)
        return mean, loss / self.accumulate, rest, aux, newest

    def _differentiate(self, structure: Structure, members: Any) -> Callable:
        """``(params, rest, batch, scale) -> (gradients, (loss, rest, aux))``."""

        def scaled(params: Tree, rest: Tree, batch: Any, scaling: LossScaleState):
            loss, rest, aux = self._apply(structure, params, rest, batch)
            # a member's part of the batch's mean, or its gradients were that many times larger
            return scale_loss(loss, scaling) / members, (at_least_float32(loss), rest, aux)

        return jax.grad(scaled, has_aux=True)

    def _first_history(self, recipe: Recipe, state: TrainState, batch: Any) -> AmaxHistory:
        """Of one step by current scaling, all microbatches together."""
        delayed = WithHistory(self._differentiate(state.structure, 1), recipe)
        scaling = loss_scale_of(state.optimizer)

        def one(part: Any) -> AmaxHistory:
            return delayed.init(state.params, state.rest, part, scaling)

        if self.accumulate == 1:
            return one(batch)
        histories = jax.lax.map(one, microbatches(batch, self.accumulate))
        return jax.tree.map(lambda a: a.max(axis=0), histories)

    def _own(self, tree: Tree) -> Tree:
        """A tree as this member of the mapped axes has it: its gradient isn't summed over them."""
        return tree if self.axis_name is None else per_device(tree, self.axis_name)

    def _members(self) -> int:
        return 1 if self.axis_name is None else jax.lax.psum(1, self.axis_name)

    def _apply(self, structure: Structure, params: Tree, rest: Tree, batch: Any):
        """Loss, rest and aux of the model, all of it under the policy."""
        arrays, treedef = jax.tree.flatten(batch)

        def whole(params, rest, arrays):
            if self.params is not None:  # the program is float32's; narrow is what lies in memory
                params = jax.tree.map(at_least_float32, params)
            model = structure.merge(params, rest)
            out = self.loss(model, *jax.tree.unflatten(treedef, arrays))
            loss, aux = out if self.has_aux else (out, None)
            return at_least_float32(jnp.asarray(loss)), structure.rest(model), aux

        return self.transform(whole)(params, rest, arrays)


@renamed_arguments(wire="comm_format")
def step(
    loss: Callable,
    optimizer: optax.GradientTransformation,
    policy: Policy | Recipe | str | Any | None = None,
    *,
    scaling: LossScale | None = None,
    weights: Weights | None = None,
    moments: Mapping[str, Any] | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    has_aux: bool = False,
    axis_name: Any = None,
    comm_format: Any = None,
    warn_after: int | None = None,
) -> Step:
    """A mixed-precision training step around any loss function and optax optimizer.

    In this order: the loss under its policy; times the loss scale; gradients, summed in float32
    over the microbatches; one finite check; unscaled in float32 and clipped by their global norm;
    the optimizer, its state widened and stored again; the new weights. A step with a gradient or
    a loss that isn't finite changes nothing but the scale: weights, moments, statistics and the
    history of delayed scaling keep their bits. (A loss that isn't finite was so before it was
    scaled: then the scale stays, too.)

    Args:
        loss: ``(model, batch) -> scalar``, or ``(model, inputs, labels, ...) -> scalar``; model as
            given to ``init``.
        optimizer: any optax transformation.
        policy: what runs in which precision: a :class:`~scalewise.Policy` or its string, for
            :func:`~scalewise.autocast`; a :class:`~scalewise.Recipe` or the name of one
            (``"fp8"``), for :func:`~scalewise.autoscale` (with delayed scaling ``init`` takes a
            batch, too, and all microbatches of a step, on all devices, have one history); None: the
            loss as it is.
        scaling: by default :class:`DynamicLossScale` where the policy computes in float16, and
            none (a scale of 1, bad steps left out all the same) elsewhere.
        weights: how narrow weights (``p=f16`` or ``p=bf16`` in the policy) are updated:
            ``"master"`` (the default), ``"stochastic"``, ``"compensated"`` or ``"plain"``.
        moments: storages for the optimizer's state, as :func:`store_state` takes them.
        clip: largest global norm of the gradients, over all parameters, unscaled.
        accumulate: in how many microbatches of equal size a batch is computed.
        has_aux: whether ``loss`` returns ``(scalar, aux)``.
        axis_name: mapped axes (of a ``shard_map``, say) whose members each have a part of the
            batch: gradients and loss are averaged over them, and all take the same decisions. Not
            needed under ``jit`` with shardings, where arrays are whole.
        comm_format: format in which the gradients are sent to be averaged, see :func:`mean_over`.
        warn_after: with a number, a warning comes from the host once that many steps in a row have
            been left out. It is a host callback in the program (``jax.debug.callback``), which
            can't be exported or cached on disk; None, the default, leaves it to the caller to look
            at ``metrics.skipped_in_a_row``.

    Returns:
        A :class:`Step`, jittable: ``state = it.init(model)``, ``state, metrics = it(state,
        batch)``. Params may be any pytree of floats, a Flax NNX module or an Equinox module.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> def loss(params, batch):
        ...     return jnp.mean(jnp.square(batch @ params["w"] - 1))
        >>> train = step(loss, optax.adam(0.1), "p=f32,c=f16,o=f32", clip=1.0)
        >>> state = train.init({"w": jnp.zeros((2, 1))})
        >>> jitted = jax.jit(train)
        >>> for _ in range(60):  # the first scale, 65536, is one too many for FP16
        ...     state, metrics = jitted(state, jnp.eye(2))
        >>> bool(metrics.loss < 1e-2), int(metrics.skipped), float(metrics.scale)
        (True, 1, 32768.0)
    """
    if isinstance(policy, str):
        policy = _named(policy)
    transform, params, narrow = _transform(policy)
    delayed = policy if isinstance(policy, Recipe) and policy.scaling.source == "history" else None
    if weights is None:
        weights = "master" if params is not None and params.itemsize < 4 else "plain"
    if weights not in WEIGHTS:
        raise ValueError(
            f"step: weights is {weights!r}; expected one of {', '.join(map(repr, WEIGHTS))}"
        )
    if not (isinstance(accumulate, int) and accumulate >= 1):
        raise ValueError(f"step: accumulate is {accumulate!r}; expected 1, 2, ...")
    if moments is not None:
        optimizer = store_state(optimizer, moments)
    if scaling is None:
        scaling = DynamicLossScale() if narrow else StaticLossScale(1.0)
    whole = loss_scaled(WEIGHTS[weights](optimizer), scaling, clip=clip, axis_name=axis_name)
    if comm_format is not None and axis_name is None:
        raise ValueError("step: comm_format needs axis_name, the axes that gradients are sent over")
    if warn_after is not None and not (isinstance(warn_after, int) and warn_after >= 1):
        raise ValueError(f"step: warn_after is {warn_after!r}; expected 1, 2, ... or None")
    return Step(
        loss,
        whole,
        params,
        accumulate,
        has_aux,
        transform,
        delayed,
        axis_name,
        comm_format,
        warn_after,
    )


def _warn_of_skipped(limit: int, state: LossScaleState) -> None:
    """Warns, from the host, in the step that is the ``limit``-th in a row to be left out."""

    def warn(scale: Any) -> None:
        warnings.warn(
            f"training.step: {limit} steps in a row were left out, their gradients or losses not "
            f"finite; the loss scale is {float(scale):g}. A smaller scale doesn't help against "
            "NaN in the data or the weights: look at the batch, or run scalewise.audit on the step",
            stacklevel=2,
        )

    jax.lax.cond(
        state.skipped_in_a_row == limit,
        lambda scale: jax.debug.callback(warn, scale),
        lambda scale: None,
        state.scale,
    )


def microbatches(batch: Any, n: int) -> Any:
    """A batch cut into ``n`` parts along its first axis, stacked: ``(n, size / n, ...)``."""

    def leaf(x: Any) -> Any:
        size = x.shape[0] if getattr(x, "ndim", 0) else 0
        if not size or size % n:
            raise ValueError(
                f"step: accumulate={n} cuts each array of the batch along its first axis into "
                f"{n} equal parts; one has shape {getattr(x, 'shape', ())}"
            )
        return x.reshape(n, size // n, *x.shape[1:])

    return jax.tree.map(leaf, batch)


def _named(policy: str) -> Policy | Recipe:
    """Returns the policy or recipe of a string."""
    if policy.lower() in DTYPES and policy not in CATALOGUE:
        warn_renamed(f"step(..., {policy!r})", repr(f"c={policy}"), stacklevel=4)
        return policy_(policy)
    return resolve(policy, "policy", "recipe", where="step")


def _transform(policy: Any) -> tuple[Callable[[Callable], Callable], Any, bool]:
    """What a policy does to a function; the dtype it keeps params in; whether FP16 is computed."""
    if policy is None:
        return lambda f: f, None, False
    if isinstance(policy, Recipe):
        if policy.state:
            raise ValueError(
                f"step: the recipe's state says how parts of a training state are stored, first "
                f"{policy.state[0][0]!r}; here moments={{...}} and the policy's p= do; expected a "
                "recipe without, or autoscale of a training step of your own"
            )
        if policy.scaling.source == "history":  # differentiated within a call with a history
            return lambda f: f, None, False
        return lambda f: autoscale(f, policy), None, False
    chosen = policy_(policy)
    narrow = jnp.float16 in (chosen.compute, chosen.params)
    # params are kept so already, and the loss is float32: here only operations look at the policy
    inner = dataclasses.replace(chosen, params=None, output=None)
    return lambda f: autocast(f, inner), chosen.params, narrow
