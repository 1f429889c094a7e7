"""Delayed scaling: an operand's scale from its largest magnitudes in the preceding steps.

Current scaling reads an operand twice, to find the scale and to round. Delayed scaling reads it
once: a step rounds with the scale that it was given, and records the magnitudes for the next step
in an :class:`AmaxHistory`, explicit state that goes into a step and comes out of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set

import jax
import jax.numpy as jnp
from jax import lax

from .._types import AxisName, PyTree
from ..formats import Format
from ..interpret import (
    Applied,
    Equation,
    Program,
    State,
    Value,
    is_float,
    pure_call,
    run,
    trace,
    transform,
)
from ..primitives import Family
from ..scaled import Amax, Axes, Delayed, ScaledArray, Scales, Scaling, amax, quantize, to_top
from ._blocks import Blocks
from ._boundaries import Boundaries
from ._narrow import is_stored
from ._operand_settings import Operand
from ._overrides import FormatOverrides
from ._recipe import Recipe
from ._residuals import load, load_product
from ._rules import RULES
from ._value import ScaledValue

NAME = "autoscale"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AmaxHistory:
    """Largest magnitudes of each operand in the last steps.

    Attributes:
        amaxes: float32, ``[operands, steps]``, the newest first; 0 for steps before the first.
        operand_ids: of each operand, the number of its contraction among the program's (after the
            numbers of the loops and calls around it), ``/`` and its own position.
    """

    amaxes: jax.Array
    operand_ids: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def after(self, newest: jax.Array) -> AmaxHistory:
        """Returns the history after one more step.

        Args:
            newest: that step's largest magnitudes, float32, ``[operands]``, as
                :meth:`WithHistory.observe` returns them; those that aren't finite don't count.
        """
        column = jnp.where(jnp.isfinite(newest), newest, 0)
        return AmaxHistory(jnp.column_stack([column, self.amaxes[:, :-1]]), self.operand_ids)


@dataclasses.dataclass(frozen=True)
class FixedAmax(Scaling):
    """Scales by a given largest magnitude; by 1 if that is 0."""

    magnitude: jax.Array
    power_of_two: bool

    def scale(self, x: jax.Array, fmt: Format, axes: Axes, keepdims: bool = False) -> Scales:
        scales = to_top(self.magnitude.astype(x.dtype), fmt, self.power_of_two)
        shape = (1,) * x.ndim if keepdims else ()
        scales = (jnp.where(self.magnitude > 0, s, jnp.ones_like(s)) for s in scales)
        scale, inverse = (s.reshape(shape) for s in scales)
        return scale, inverse


@dataclasses.dataclass(frozen=True)
class DelayedBoundaries(Boundaries):
    """``Boundaries`` whose state is this step's largest magnitude of each operand, a scalar.

    Attributes:
        earlier: the largest magnitudes of earlier steps; None for none, so that each array
            determines its own scale.
        magnitudes: receives the magnitudes while an equation is run; before there is a state, only
            the ids of the operands.
        seen: the ids of the operands that the program has had so far.
    """

    earlier: Mapping[str, jax.Array] | None = None
    magnitudes: dict[str, jax.Array] | None = None
    seen: set[str] = dataclasses.field(default_factory=set)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if RULES[equation.name].family is not Family.CONTRACTION or self.magnitudes is not None:
            return super().apply(state, equation, inputs)
        magnitudes: dict[str, jax.Array] = {}
        here = dataclasses.replace(self, magnitudes=magnitudes)
        _, outs = Boundaries.apply(here, (), equation, inputs)
        return state | {i: jnp.maximum(state[i], amax) for i, amax in magnitudes.items()}, outs

    def invariant(self, value: Value, readers: Set[str], equation: Equation) -> Value:
        return load_product(value)  # not rounded, since each operand has its own history

    def merge(self, state: State, axes: AxisName) -> State:
        return jax.tree.map(lambda newest: lax.pmax(newest, axes), state)

    def _rounded(
        self,
        value: ScaledValue,
        setting: Operand,
        contracted: tuple[int, ...],
        operand_id: str,
    ) -> ScaledArray | Blocks:
        """Returns the narrow copy, and records its largest magnitude.

        An operand that shares the copy of another one has the same largest magnitude, so that the
        ids don't depend on which operands are one array.
        """
        copy = super()._rounded(value, setting, contracted, operand_id)
        assert self.magnitudes is not None
        if operand_id in self.magnitudes:
            value.memo["largest"] = self.magnitudes[operand_id]
        else:
            self._check_operand(operand_id)
            self.magnitudes[operand_id] = value.memo["largest"]
        return copy

    def _check_operand(self, operand_id: str) -> None:
        if self.earlier is not None and operand_id not in self.earlier:
            raise _foreign(f"knows no operand {operand_id}")
        self.seen.add(operand_id)

    def copied(
        self, value: ScaledValue, fmt: Format, scaling: Scaling, operand_id: str
    ) -> ScaledArray:
        assert self.magnitudes is not None
        self._check_operand(operand_id)
        x, measured = value.data, self._measured(value, arguments=False)
        self.magnitudes[operand_id] = amax(measured.astype(jnp.float32), range(x.ndim), False)
        strategy: Scaling = Amax(scaling.power_of_two)
        if self.earlier is not None:
            strategy = FixedAmax(self.earlier[operand_id], scaling.power_of_two)
        return quantize(x, fmt, scaling=strategy)


@dataclasses.dataclass(frozen=True)
class PastBoundaries(Boundaries):
    """``Boundaries`` whose operands' past magnitudes are given for one equation at a time.

    Attributes:
        past: float, ``[2]``, of each operand the largest magnitude in earlier steps; 0, or None for
            both, so that the operand determines its own scale.
    """

    past: jax.Array | None = dataclasses.field(default=None, compare=False)

    def copied(
        self, value: ScaledValue, fmt: Format, scaling: Scaling, operand_id: str
    ) -> ScaledArray:
        magnitude = self._magnitude(value)
        if self.past is not None:
            past = self.past[int(operand_id.rpartition("/")[2])].astype(jnp.float32)
            magnitude = jnp.where(past > 0, past, magnitude)
        scaling = FixedAmax(magnitude, scaling.power_of_two)
        return quantize(value.data, fmt, scaling=scaling)

    def magnitudes(self, inputs: Sequence[Value]) -> jax.Array:
        """Returns the largest magnitudes of a contraction's operands, float32, ``[2]``."""
        return jnp.stack([self._magnitude(load(x)) for x in inputs[:2]])

    def _magnitude(self, value: ScaledValue) -> jax.Array:
        measured = self._measured(value, arguments=False).astype(jnp.float32)
        return amax(measured, range(value.data.ndim), False)


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
        assert isinstance(recipe.scaling, Delayed)
        self.recipe = recipe
        self.steps = len(recipe.scaling.amaxes)
        self.current = dataclasses.replace(recipe, scaling=Amax(recipe.scaling.power_of_two))
        self.f = f
        functools.update_wrapper(self, f, updated=())  # leaves a callable object's attributes alone

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        overrides = FormatOverrides(self.current.overrides)
        boundaries = Boundaries(self.current, overrides=overrides)
        outs = transform(self.f, boundaries, name=NAME)(*args, **kwargs)
        overrides.check(NAME)
        return outs

    def init(self, *args: PyTree, **kwargs: PyTree) -> AmaxHistory:
        """Returns the history after one step on these arguments; the step's outputs are dropped."""
        program, boundaries = self._program(self.f, args, kwargs, as_jit=True)
        operand_ids: dict[str, jax.Array] = {}
        counting = dataclasses.replace(boundaries, magnitudes=operand_ids)
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
        self, history: AmaxHistory, program: Program, boundaries: DelayedBoundaries
    ) -> tuple[list[PyTree], jax.Array]:
        """Returns a program's float and other outputs, and this call's largest magnitudes."""
        program = dataclasses.replace(program, arrays=_undifferentiated(list(program.arrays)))
        earlier = dict(zip(history.operand_ids, jnp.max(history.amaxes, axis=1), strict=True))
        here = dataclasses.replace(boundaries, earlier=earlier)
        state = dict.fromkeys(history.operand_ids, jnp.zeros((), jnp.float32))
        newest, values = run(program, here, state)
        boundaries.overrides.check(NAME)
        others = sorted(set(history.operand_ids) - here.seen)
        if others:
            raise _foreign(f"has an operand {others[0]}, which this program has not")
        outs = [
            here.emit(v, a, path) if is_float(a) else v
            for v, a, path in zip(values, program.out_avals, program.paths, strict=True)
        ]
        return outs, _column(history.operand_ids, newest)

    def _program(self, f: Callable, args, kwargs, as_jit: bool = False):
        boundaries = DelayedBoundaries(
            self.recipe, overrides=FormatOverrides(self.recipe.overrides)
        )
        return trace(f, boundaries, args, kwargs, name=NAME, as_jit=as_jit), boundaries


def _foreign(why: str) -> ValueError:
    return ValueError(
        f"{NAME}: the history {why}: it was made for another program; "
        "make one by init(...) with arguments like these"
    )


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
