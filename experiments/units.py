"""Rescaled training programs: the same optimization with all numbers multiplied by 2^k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalewise.cli._program import TrainingProgram

Tree = Any


class Units(NamedTuple):
    """The factors on every float of the batch, on the parameters and on the loss."""

    inputs: Any = 1.0
    weights: Any = 1.0
    loss: Any = 1.0

    @staticmethod
    def of(kind: str, k: int) -> Units:
        one = Units(*(np.float32(1) for _ in Units._fields))
        return one._replace(**{kind: np.float32(2.0**k)}) if kind else one


class InUnits(NamedTuple):
    units: Units
    inner: Any


def scaled(tree: Tree, factor: Any) -> Tree:
    """Multiplies each float by the factor in its dtype; other leaves are unchanged."""

    def leaf(x):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        return x * jnp.asarray(factor, x.dtype) if isinstance(x, jax.Array) else x * factor

    return jax.tree.map(leaf, tree)


def in_units(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimizer that sees gradients and parameters as if nothing had been multiplied.

    Its state holds the units (ones, as ``init`` makes it).
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params):
        return InUnits(Units.of("", 0), optimizer.init(params))

    def update(gradients, state, params=None, *, value=None, **extra):
        units = state.units
        gradients = scaled(scaled(gradients, units.weights), 1 / units.loss)
        value = None if value is None else value / units.loss
        if "grad" in extra:
            extra["grad"] = gradients
        params = scaled(params, 1 / units.weights)
        updates, inner = optimizer.update(gradients, state.inner, params, value=value, **extra)
        return scaled(updates, units.weights), InUnits(units, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def program_in_units(program: TrainingProgram) -> TrainingProgram:
    """The program whose batches are pairs (batch, units), and whose parameters are in units.

    The model's own code sees the numbers that it always sees: parameters and inputs are divided
    by their units where they enter it, its loss is multiplied where it leaves.
    """
    assert program.loss_of is not None
    assert program.optimizer is not None
    inner, optimizer = program.loss_of, in_units(program.optimizer)

    def loss_of(params, batch):
        batch, units = batch
        params = scaled(params, 1 / units.weights)
        return inner(params, scaled(batch, 1 / units.inputs)) * units.loss

    def train_step(state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        plain = scaled(batch[0], 1 / batch[1].inputs)
        search = {"grad": gradients, "value_fn": lambda params: inner(params, plain)}  # if it asks
        with jax.named_scope("optimizer"):
            updates, optimizer_state = optimizer.update(
                gradients, state["optimizer"], state["params"], value=loss, **search
            )
            params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer_state}, loss

    def init(seed: int) -> Tree:
        params = program.init(seed)["params"]
        return {"params": params, "optimizer": optimizer.init(params)}

    def batches(data: bytes, seed: int) -> Iterator[Any]:
        for batch in program.batches(data, seed):
            yield batch, Units.of("", 0)

    return TrainingProgram(program.name, init, train_step, batches, loss_of, optimizer)
