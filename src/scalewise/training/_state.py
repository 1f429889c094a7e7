"""The state that a training step takes and returns, and the metrics that it reports."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._check import shown
from .._types import PyTree
from ..autoscaling import AmaxHistory
from ..interpret import has_objects
from ._finite import is_array, is_float_array
from ._model import Model, Structure


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that one training step returns and the next one takes.

    Attributes:
        params: the trained arrays, in the policy's ``params`` dtype.
        rest: the model's other arrays (batch statistics, random counters).
        optimizer: the state of the wrapped optimizer: masters, moments, loss scale.
        history: the operands' largest magnitudes in earlier steps, for delayed scaling; or None.
        step: the number of steps so far, including those left out, int32.
        structure: rebuilds the model from ``params`` and ``rest``.
    """

    params: PyTree
    rest: PyTree
    optimizer: PyTree
    history: AmaxHistory | None
    step: jax.Array
    structure: Structure = dataclasses.field(metadata={"static": True})

    def model(self) -> Model:
        """Returns the model with its present weights."""
        return self.structure.merge(self.params, self.rest)


class Metrics(NamedTuple):
    """The metrics of a training step, all of them arrays.

    Attributes:
        loss: unscaled, the mean over microbatches.
        finite: True if the step was made; if not, only the loss scale changed.
        scale: the loss scale that this step used.
        skipped: the number of steps left out so far.
        skipped_in_a_row: the number of steps left out since the last one that was made. A large
            number isn't caused by the loss scale: the data or the weights aren't finite.
        aux: what the loss function returned beside the loss, stacked over microbatches.
    """

    loss: jax.Array
    finite: jax.Array
    scale: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    aux: PyTree = None


def check_call(state: object, batch: PyTree) -> None:
    """Raises TypeError if a step is called without a state, or with an object as its batch."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"step: state is {shown(state)}; expected the TrainState of init(model), or of the "
            "step before"
        )
    if has_objects(batch):
        raise TypeError(
            "step: the batch holds a Flax NNX object, whose updates would be lost; keep it in "
            "the model, or pass its values"
        )


def loss_and_aux(out: PyTree, has_aux: bool) -> tuple[jax.Array, PyTree]:
    """Returns what a loss function returned, as an array and what is beside it.

    Raises:
        TypeError: the loss isn't a real number, as ``jax.grad`` asks for.
    """
    pair = isinstance(out, tuple | list) and len(out) == 2
    loss, aux = out if has_aux and pair else (out, None)
    single = has_aux <= pair and is_array(loss) and np.shape(loss) == ()
    if not single or not is_float_array(jnp.asarray(loss)):
        expected = "a pair of a real scalar and more" if has_aux else "a real scalar"
        hint = "" if has_aux else ": take its mean, or say has_aux=True of a pair"
        raise TypeError(f"step: loss returned {shown(out)}; expected {expected}{hint}")
    return jnp.asarray(loss), aux
