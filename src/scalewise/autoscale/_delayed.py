"""Delayed scaling: each operand's scale from the largest magnitudes of the steps before.

What current scaling reads twice, once for the scale and once to round, is here read once: a step
rounds with the scale that it came with, and notes what the next one needs. The notes are explicit
state, an :class:`AmaxHistory`, that goes into a step and comes out of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._deprecated import renamed_attribute
from ..formats import BlockFormat, Format
from ..interpret import Equation, is_float, run, trace, transform
from ..primitives import Family
from ..scaled import Amax, Delayed, ScaledArray, Scaling, amax, quantize, to_top
from ._boundaries import Boundaries
from ._overrides import FormatOverrides
from ._recipe import Recipe
from ._residuals import load_product
from ._rules import RULES
from ._value import ScaledValue

NAME = "autoscale"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class AmaxHistory:
    """Largest magnitudes of each operand in the last steps.

    Attributes:
        amaxes: float32, ``[operands, steps]``, the newest first; 0 where there was none.
        operand_ids: of each operand, the number of its contraction among the program's (after the
            numbers of the loops and calls around it), ``/`` and its own position.
    """

    amaxes: jax.Array
    operand_ids: tuple[str, ...]
    sites = renamed_attribute("sites", "operand_ids")

    def after(self, newest: jax.Array) -> AmaxHistory:
        """The history with one more step in it, whose largest magnitudes are ``newest``.

        Args:
            newest: float32, ``[operands]``, as :meth:`WithHistory.observe` has them; one that
                isn't finite doesn't count.
        """
        column = jnp.where(jnp.isfinite(newest), newest, 0)
        return AmaxHistory(jnp.column_stack([column, self.amaxes[:, :-1]]), self.operand_ids)

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("amaxes"), self.amaxes),), self.operand_ids

    @classmethod
    def tree_unflatten(cls, operand_ids, children):
        return cls(children[0], operand_ids)


@dataclasses.dataclass(frozen=True)
class FixedAmax(Scaling):
    """Scales by a given largest magnitude; by 1 if that is 0."""

    magnitude: jax.Array
    power_of_two: bool

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        scales = to_top(self.magnitude.astype(x.dtype), fmt, self.power_of_two)
        shape = (1,) * x.ndim if keepdims else ()
        scale, inverse = (
            jnp.where(self.magnitude > 0, s, jnp.ones_like(s)).reshape(shape) for s in scales
        )
        return scale, inverse


@dataclasses.dataclass(frozen=True)
class DelayedBoundaries(Boundaries):
    """``Boundaries`` whose state is this step's largest magnitudes: a scalar for each operand.

    Attributes:
        known: those of the steps before; None for none, when each array decides itself.
        noted: where a step's magnitudes are put down while an equation is run; or, before there is
            a state, only which operands there are.
        met: the operands that the program has had so far.
    """

    known: Mapping[str, jax.Array] | None = None
    noted: dict[str, Any] | None = None
    met: set[str] = dataclasses.field(default_factory=set)

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        if RULES[equation.name].family is not Family.CONTRACTION or self.noted is not None:
            return super().apply(state, equation, inputs)
        noted: dict[str, jax.Array] = {}
        here = dataclasses.replace(self, noted=noted)
        _, outs = Boundaries.apply(here, (), equation, inputs)
        largest = {
            operand_id: jnp.maximum(state[operand_id], amax) for operand_id, amax in noted.items()
        }
        return state | largest, outs

    def invariant(self, value: Any, readers: Set[str], equation: Equation) -> Any:
        return load_product(value)  # not rounded: each operand has a history of its own

    def merge(self, state: Any, axes: Any) -> Any:
        return jax.tree.map(lambda newest: lax.pmax(newest, axes), state)

    def _rounded(
        self,
        value: ScaledValue,
        fmt: Format | BlockFormat,
        contracted: tuple[int, ...],
        operand_id: str,
    ) -> ScaledArray:
        """The narrow copy; an operand that is one made before has the same largest magnitude, so
        that which operands there are doesn't depend on which of them are one array."""
        copy = super()._rounded(value, fmt, contracted, operand_id)
        assert self.noted is not None
        if operand_id in self.noted:
            value.memo["largest"] = self.noted[operand_id]
        else:
            self._meet(operand_id)
            self.noted[operand_id] = value.memo["largest"]
        return copy

    def _meet(self, operand_id: str) -> None:
        if self.known is not None and operand_id not in self.known:
            raise _foreign(f"knows no operand {operand_id}")
        self.met.add(operand_id)

    def copied(
        self, value: ScaledValue, fmt: Format, scaling: Scaling, operand_id: str
    ) -> ScaledArray:
        assert self.noted is not None
        self._meet(operand_id)
        x, measured = value.data, self._measured(value, arguments=False)
        self.noted[operand_id] = amax(measured.astype(jnp.float32), range(x.ndim), False)
        power_of_two = scaling.power_of_two
        current = Amax(power_of_two)
        known = current if self.known is None else FixedAmax(self.known[operand_id], power_of_two)
        return quantize(x, fmt, scaling=known)


class WithHistory:
    """A function under a recipe with delayed scaling: what ``autoscale`` then returns.

    Called as the function itself it has no history, and each array's scale is its own. With one,
    ``init`` and ``step`` are pure functions, to be jitted, saved and restored like any others:

        scaled = sw.autoscale(train_step, "fp8_delayed")
        history = scaled.init(params, batch)
        (params, loss), history = jax.jit(scaled.step)(history, params, batch)

    A step isn't differentiated from outside: wrap the training step, gradient and all.
    """

    def __init__(self, f: Callable, recipe: Recipe):
        assert isinstance(recipe.scaling, Delayed)
        self.recipe = recipe
        self.steps = len(recipe.scaling.amaxes)
        self.current = dataclasses.replace(recipe, scaling=Amax(recipe.scaling.power_of_two))
        transform(f, Boundaries(self.current), name=NAME)  # refuses what is no function
        self.f = f
        functools.update_wrapper(self, f, updated=())  # a callable object's attributes stay its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        overrides = FormatOverrides(self.current.keep)
        boundaries = Boundaries(self.current, overrides=overrides)
        outs = transform(self.f, boundaries, name=NAME)(*args, **kwargs)
        overrides.check(NAME)
        return outs

    def init(self, *args: Any, **kwargs: Any) -> AmaxHistory:
        """The history after one step on these arguments, whose outputs are dropped."""
        program, boundaries = self._program(args, kwargs, as_jit=True)
        operand_ids: dict[str, Any] = {}
        counting = dataclasses.replace(boundaries, noted=operand_ids)
        jax.eval_shape(lambda arrays: run(program, counting, (), arrays)[0], program.arrays)
        state = dict.fromkeys(operand_ids, jnp.float32(0))
        # one program: outside of one, JAX can't place a loop's counter on a mesh of explicit axes
        newest = jax.jit(lambda arrays: run(program, boundaries, state, arrays)[0])(program.arrays)
        empty = AmaxHistory(
            jnp.zeros((len(operand_ids), self.steps), jnp.float32), tuple(sorted(operand_ids))
        )
        return empty.after(_column(empty.operand_ids, newest))

    def step(self, history: AmaxHistory, *args: Any, **kwargs: Any) -> tuple[Any, AmaxHistory]:
        """The function's outputs, and the history to call it with next.

        Raises:
            TypeError, ValueError: as :meth:`observe`.
        """
        outs, newest = self.observe(history, *args, **kwargs)
        return outs, history.after(newest)

    def observe(self, history: AmaxHistory, *args: Any, **kwargs: Any) -> tuple[Any, jax.Array]:
        """The function's outputs, and each operand's largest magnitude in this call.

        For a step that is several calls, of microbatches or on devices, all of which round with
        one history: ``history.after(...)`` takes the largest of their magnitudes.

        Raises:
            TypeError: ``history`` isn't an :class:`AmaxHistory`; somebody differentiates the call.
            ValueError: it was made for another program.
        """
        if not isinstance(history, AmaxHistory):
            raise TypeError(
                f"{NAME}: step(history, ...) takes the AmaxHistory that init made, "
                f"not a {type(history).__name__}"
            )
        program, boundaries = self._program(args, kwargs)
        program = dataclasses.replace(program, arrays=_undifferentiated(list(program.arrays)))
        known = dict(zip(history.operand_ids, jnp.max(history.amaxes, axis=1), strict=True))
        here = dataclasses.replace(boundaries, known=known)
        state = dict.fromkeys(history.operand_ids, jnp.zeros((), jnp.float32))
        newest, values = run(program, here, state)
        boundaries.overrides.check(NAME)
        others = sorted(set(history.operand_ids) - here.met)
        if others:
            raise _foreign(f"has an operand {others[0]}, which this program has not")
        outs = [
            here.emit(v, a, path) if is_float(a) else v
            for v, a, path in zip(values, program.out_avals, program.paths, strict=True)
        ]
        return program.outputs(outs), _column(history.operand_ids, newest)

    def _program(self, args, kwargs, as_jit: bool = False):
        boundaries = DelayedBoundaries(self.recipe, overrides=FormatOverrides(self.recipe.keep))
        return trace(self.f, boundaries, args, kwargs, name=NAME, as_jit=as_jit), boundaries


def _foreign(why: str) -> ValueError:
    return ValueError(
        f"{NAME}: the history {why}: it was made for another program; "
        "make one by init(...) with arguments like these"
    )


def _column(operand_ids: Sequence[str], newest: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.stack([newest[s] for s in operand_ids]) if operand_ids else jnp.zeros(0)


@jax.custom_jvp
def _undifferentiated(arrays: list[Any]) -> list[Any]:
    return arrays


@_undifferentiated.defjvp
def _(primals, tangents):
    raise TypeError(
        f"{NAME}: step(history, ...) can't be differentiated from outside; wrap the training step, "
        "gradient and all"
    )
