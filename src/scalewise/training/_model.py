"""The model that is trained, split into arrays and structure, its loss, and the training's state.

A model is a pytree, or a module of Flax NNX or Equinox. Neither library is imported here: a caller
that passes a module has imported its library.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._check import shown
from .._types import PyTree, TreeDef
from ..autocasting import Policy, autocast
from ..autocasting import policy as policy_
from ..autoscaling import AmaxHistory, Recipe, autoscale
from ..interpret import has_objects
from ..scalifying import Scalify
from ._gradients import is_array, is_float_array

Model: TypeAlias = Any
"""A pytree of parameters, or a Flax NNX or Equinox module."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """Rebuilds a model from its arrays; it is hashable. This class serves plain pytrees."""

    def merge(self, params: PyTree, rest: PyTree) -> Model:
        """Returns the model that the user's loss function gets."""
        return params

    def rest(self, model: Model) -> PyTree:
        """Returns the model's other arrays after that call: statistics, counters, keys."""
        return ()


@dataclasses.dataclass(frozen=True)
class FlaxStructure(Structure):
    """Rebuilds a Flax NNX module."""

    graph: Hashable

    def merge(self, params: PyTree, rest: PyTree) -> Model:
        # a copy: a loss may change variables only at its own level of tracing
        return importlib.import_module("flax.nnx").merge(self.graph, params, rest, copy=True)

    def rest(self, model: Model) -> PyTree:
        nnx = importlib.import_module("flax.nnx")
        return nnx.split(model, nnx.Param, ...)[2]


@dataclasses.dataclass(frozen=True, eq=False)
class EquinoxStructure(Structure):
    """Rebuilds an Equinox module."""

    static: PyTree

    def merge(self, params: PyTree, rest: PyTree) -> Model:
        return importlib.import_module("equinox").combine(params, rest, self.static)

    def rest(self, model: Model) -> PyTree:
        eqx = importlib.import_module("equinox")
        others = eqx.filter(model, eqx.is_inexact_array, inverse=True)
        return eqx.filter(others, eqx.is_array)

    @property
    def _key(self) -> tuple[tuple[PyTree, ...], TreeDef]:
        leaves, treedef = jax.tree.flatten(self.static)
        return tuple(leaves), treedef

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EquinoxStructure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def split(model: Model) -> tuple[PyTree, PyTree, Structure]:
    nnx, eqx = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(model, nnx.Module):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        structure = FlaxStructure(graph)
    elif eqx is not None and isinstance(model, eqx.Module):
        params, others = eqx.partition(model, eqx.is_inexact_array)
        rest, static = eqx.partition(others, eqx.is_array)
        structure = EquinoxStructure(static)
    else:
        params, rest, structure = model, (), Structure()
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise TypeError("training.step: there is nothing to train: the params hold no array")
    for path, x in leaves:
        dtype = getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            kind = f"a {type(x).__name__}" if dtype is None else f"{dtype}{list(x.shape)}"
            raise TypeError(
                f"training.step: params{jax.tree_util.keystr(path)} is {kind}; expected real float "
                "arrays, which are trained: put anything else into the batch, or close over it"
            )
    return params, rest, structure


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that one training step returns and the next one takes."""

    params: PyTree  # the trained arrays, in the policy's ``params`` dtype
    rest: PyTree  # the model's other arrays: batch statistics, random counters
    optimizer: PyTree  # the wrapped state: masters, moments, loss scale
    history: AmaxHistory | None  # operands' largest magnitudes, for delayed scaling
    step: jax.Array  # the number of steps so far, including those left out, int32
    structure: Structure = dataclasses.field(metadata={"static": True})  # rebuilds the model

    def model(self) -> Model:
        """Returns the model with its present weights."""
        return self.structure.merge(self.params, self.rest)


class Metrics(NamedTuple):
    """The metrics of a training step, all of them arrays."""

    loss: jax.Array  # unscaled, the mean over microbatches
    finite: jax.Array  # True if the step was made; if not, only the loss scale changed
    scale: jax.Array  # that this step used
    skipped: jax.Array  # the number of steps left out so far
    skipped_in_a_row: jax.Array  # a large number: the data or the weights aren't finite
    aux: PyTree = None  # what the loss function returned beside the loss, stacked


def check_call(state: object, batch: PyTree) -> None:
    """Raises TypeError if a step is called without a state, or with an object as its batch."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"step: state is {shown(state)}; expected the TrainState of init(model) "
            "or of the step before"
        )
    if has_objects(batch):
        raise TypeError(
            "step: the batch holds a Flax NNX object, whose updates would be lost; keep it in the "
            "model, or pass its values"
        )


def loss_and_aux(out: PyTree, has_aux: bool) -> tuple[jax.Array, PyTree]:
    """Returns what a loss function returned, as an array and what is beside it."""
    pair = isinstance(out, tuple | list) and len(out) == 2
    loss, aux = out if has_aux and pair else (out, None)
    single = has_aux <= pair and is_array(loss) and np.shape(loss) == ()
    if not single or not is_float_array(jnp.asarray(loss)):
        expected = "a pair of a real scalar and more" if has_aux else "a real scalar"
        hint = "" if has_aux else ": take its mean, or say has_aux=True of a pair"
        raise TypeError(f"step: loss returned {shown(out)}; expected {expected}{hint}")
    return jnp.asarray(loss), aux


def loss_transform(
    policy: Policy | Recipe | Scalify | DTypeLike | None,
) -> tuple[Callable[[Callable], Callable], np.dtype | None, bool]:
    """Returns the transformation of the loss, the parameters' dtype, and if that is float16."""
    if isinstance(policy, Recipe | Scalify) and policy.state:
        raise ValueError(
            f"step: the recipe has state patterns ({policy.state[0][0]!r}); expected a recipe "
            "without them: moments={...} and the policy's p= say how the state is stored. Or "
            "autoscale a training step of your own"
        )
    # Step differentiates a recipe with a history together with that
    if policy is None or (isinstance(policy, Recipe) and policy.is_delayed):
        return lambda f: f, None, False
    if isinstance(policy, Recipe | Scalify):
        return lambda f: autoscale(f, policy), None, False
    chosen = policy_(policy)
    narrow = jnp.float16 in (chosen.compute, chosen.params)
    params = None if chosen.params is None else np.dtype(chosen.params)
    # Step casts the parameters, and the loss is float32: autocast only casts operations
    inner = dataclasses.replace(chosen, params=None, output=None)
    return lambda f: autocast(f, inner), params, narrow
