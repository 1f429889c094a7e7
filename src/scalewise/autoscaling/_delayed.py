"""Delayed scaling: an operand's scale from its largest magnitudes in the preceding steps.

Current scaling reads an operand twice, to find the scale and to round. Delayed scaling reads it
once: a step rounds with the scale that it was given, and records the magnitudes for the next step
in an :class:`AmaxHistory`, explicit state that goes into a step and comes out of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType

import jax
import jax.numpy as jnp

from .._types import PyTree
from ..interpret import Program, is_float, pure_call, run, trace, transform
from ..scaled import Amax, Delayed, is_stored
from ..scalifying import FormatOverrides
from ._boundaries import Boundaries
from ._history import AmaxHistory, OperandAmaxes, foreign_history
from ._recipe import Recipe

NAME = "autoscale"


class WithHistory:
    """A function under a recipe with delayed scaling; the result of ``autoscale``.

    Called like the function itself it uses no history: each array determines its own scale.
    ``init`` and ``step`` use one, and are pure functions, to be jitted, saved and restored like any
    others:

        scaled = sw.autoscale(train_step, "fp8_delayed")
        history = scaled.init(params, batch)
        (params, loss), history = jax.jit(scaled.step)(history, params, batch)

    A step can't be differentiated from outside: wrap the training step, gradient and all.
    """

    def __init__(self, f: Callable, recipe: Recipe):
        scaling = recipe.products.scaling
        assert isinstance(scaling, Delayed)
        self.recipe = recipe
        self.steps = scaling.history
        self.current = recipe.with_operands(scaling=Amax(scaling.power_of_two))
        self.f = f
        functools.update_wrapper(self, f, updated=())  # leaves a callable object's attributes alone

    def __get__(self, instance: object, owner: type | None = None) -> WithHistory:
        """Returns the method of an instance, for a function that is a class's attribute."""
        return self if instance is None else WithHistory(MethodType(self.f, instance), self.recipe)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        overrides = FormatOverrides(self.current.keep)
        boundaries = Boundaries.of(self.current, overrides=overrides)
        outs = transform(self.f, boundaries, name=NAME)(*args, **kwargs)
        overrides.check(NAME)
        return outs

    def init(self, *args: PyTree, **kwargs: PyTree) -> AmaxHistory:
        """Returns the history after one step on these arguments; the step's outputs are dropped."""
        program, boundaries = self._program(self.f, args, kwargs, as_jit=True)
        operand_ids: dict[str, jax.Array] = {}
        counting = boundaries.with_amaxes(OperandAmaxes(newest=operand_ids))
        jax.eval_shape(lambda arrays: run(program, counting, (), arrays)[0], program.arrays)
        state = dict.fromkeys(operand_ids, jnp.float32(0))
        # under jit: outside of it, JAX can't place a loop's counter on a mesh with explicit axes
        newest = jax.jit(lambda arrays: run(program, boundaries, state, arrays)[0])(program.arrays)
        empty = AmaxHistory(
            jnp.zeros((len(operand_ids), self.steps), jnp.float32), tuple(sorted(operand_ids))
        )
        return empty.after(_column(empty.operand_ids, newest))

    def step(
        self, history: AmaxHistory, *args: PyTree, **kwargs: PyTree
    ) -> tuple[PyTree, AmaxHistory]:
        """Returns the function's outputs, and the history for the next call.

        Raises:
            TypeError, ValueError: as :meth:`observe`.
        """
        outs, newest = self.observe(history, *args, **kwargs)
        return outs, history.after(newest)

    def observe(
        self, history: AmaxHistory, *args: PyTree, **kwargs: PyTree
    ) -> tuple[PyTree, jax.Array]:
        """Returns the function's outputs, and each operand's largest magnitude in this call.

        For a step that consists of several calls, on microbatches or devices, which all round with
        one history: pass the largest of their magnitudes to ``history.after``.

        Raises:
            TypeError: ``history`` isn't an :class:`AmaxHistory`, or the call is differentiated.
            ValueError: the history was made for another program.
        """
        if not isinstance(history, AmaxHistory):
            raise TypeError(
                f"{NAME}: step(history, ...) takes the AmaxHistory that init made, "
                f"not a {type(history).__name__}"
            )
        with pure_call(self.f, args, kwargs, is_stored) as call:
            program, boundaries = self._program(call.f, call.args, call.kwargs)
            outs, newest = self._observed(history, program, boundaries)
            return call.finish(program.outputs(outs)), newest

    def _observed(
        self, history: AmaxHistory, program: Program, boundaries: Boundaries
    ) -> tuple[list[PyTree], jax.Array]:
        program = dataclasses.replace(program, arrays=_undifferentiated(list(program.arrays)))
        earlier = dict(zip(history.operand_ids, jnp.max(history.amaxes, axis=1), strict=True))
        amaxes = OperandAmaxes(earlier)
        here = boundaries.with_amaxes(amaxes)
        state = dict.fromkeys(history.operand_ids, jnp.zeros((), jnp.float32))
        newest, values = run(program, here, state)
        boundaries.overrides.check(NAME)
        others = sorted(set(history.operand_ids) - amaxes.seen)
        if others:
            raise foreign_history(f"has an operand {others[0]}, which this program has not")
        outs = [
            here.emit(v, a, path) if is_float(a) else v
            for v, a, path in zip(values, program.out_avals, program.paths, strict=True)
        ]
        return outs, _column(history.operand_ids, newest)

    def _program(self, f: Callable, args, kwargs, as_jit: bool = False):
        overrides = FormatOverrides(self.recipe.keep)
        boundaries = Boundaries.of(self.recipe, overrides=overrides).with_amaxes(OperandAmaxes())
        return trace(f, boundaries, args, kwargs, name=NAME, as_jit=as_jit), boundaries


def _column(operand_ids: Sequence[str], newest: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.stack([newest[s] for s in operand_ids]) if operand_ids else jnp.zeros(0)


@jax.custom_jvp
def _undifferentiated(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


@_undifferentiated.defjvp
def _(primals, tangents):
    raise TypeError(
        f"{NAME}: step(history, ...) can't be differentiated from outside; wrap the training step, "
        "gradient and all"
    )
