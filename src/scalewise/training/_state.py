"""The state that a training step takes and returns, and the metrics that it reports."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from .._types import PyTree
from ..autoscaling import AmaxHistory
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
