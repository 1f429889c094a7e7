"""The interpretation behind a recording: the plain program, with each result's numbers kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._jax import ShapedArray, Tracer
from ...emulating import is_exact
from ...interpret import Applied, Argument, Boundary, Equation, Interpretation, Program, Value, run
from ...primitives import having
from .._run._lockstep import MAX_EAGER
from ._numbers import Numbers, empty, observe

DROPS = having("drops")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched:
    """A float or complex array of the program, and whether all its numbers are finite."""

    array: Any
    finite: Any


@dataclasses.dataclass(frozen=True)
class Site:
    """One array that is recorded."""

    name: str  # the primitive, or ``"argument"`` or ``"output"``
    aval: ShapedArray  # its type
    equation: Equation | None = None  # whose result it is
    position: int = 0  # of it among the equation's results
    path: str = ""  # of an argument or output


@dataclasses.dataclass(eq=False)
class Recorder(Interpretation):
    """Runs each equation as the program has it, and observes what rounds or decides.

    Results that are operands' own numbers (a slice, a transpose) aren't recorded, nor are integers
    that are computed from integers.
    """

    sites: list[Site] = dataclasses.field(default_factory=list)  # the recorded arrays
    # of these, by the equation's path and the result's position
    indices: dict[Any, int] = dataclasses.field(default_factory=dict)

    inline = True

    def record(self, program: Program, arrays: Sequence[ArrayLike]) -> tuple[Numbers, list[Any]]:
        avals = program.in_avals
        state = empty(len(avals) + program.results + len(program.out_avals))
        values: list[Any] = []
        for path, x, aval in zip(program.arguments, arrays, avals, strict=True):
            site = Site("argument", aval, path=path)
            x = jnp.asarray(x, aval.dtype) if _has_numbers(aval) else x
            x = self.argument(x, aval)
            state, value = self._observed(state, ("argument", path), site, x, ())
            values.append(value)
        state, values = run(program, self, state, values=values)
        outs = []
        for path, value, aval in zip(program.paths, values, program.out_avals, strict=True):
            site = Site("output", aval, path=path)
            outs.append(plain(value))
            state, _ = self._observed(state, ("output", path), site, outs[-1], (False,))
        return state, outs

    def argument(self, x: Any, aval: ShapedArray) -> Any:
        return x

    def lifts(self, aval: ShapedArray) -> bool:
        return jnp.issubdtype(aval.dtype, jnp.inexact)

    def lift(self, x: Argument, aval: ShapedArray) -> Watched:
        is_literal = isinstance(x, np.ndarray) and x.size == 1
        return Watched(x, np.isfinite(x).all() if is_literal else _is_finite(x))

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        return plain(value)

    def apply(self, state: Numbers, equation: Equation, inputs: Sequence[Value]) -> Applied:
        finite = tuple(x.finite for x in inputs if isinstance(x, Watched))
        outs = equation.bind(*map(plain, inputs))
        if is_exact(equation):
            if equation.name not in DROPS and len(finite) == 1:
                return state, [self._watched(y, finite[0]) for y in outs]
            return state, [self._watched(y, None) for y in outs]
        values = []
        for i, (y, aval) in enumerate(zip(outs, equation.out_avals, strict=True)):
            # the integers of a bitcast are patterns of bits, no numbers
            if self.lifts(aval) or (finite and equation.name != "bitcast_convert_type"):
                site = Site(equation.name, aval, equation, i)
                state, y = self._observed(state, (equation.path, i), site, y, finite)
            values.append(y)
        return state, values

    unlifted = apply

    def eager_iterations(self, state: Numbers, equation: Equation) -> int:
        return 0 if isinstance(state.clock, Tracer) else MAX_EAGER // equation.inner

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> Watched:
        return Watched(jnp.asarray(value.array), jnp.asarray(value.finite))

    def select(self, predicate: Value, on_true: Watched, on_false: Watched) -> Watched:
        array = jnp.where(predicate, on_true.array, on_false.array)
        return Watched(array, on_true.finite & on_false.finite)

    def unstack(self, value: Watched, aval: ShapedArray) -> Watched:
        spread = jnp.broadcast_to if isinstance(value.finite, Tracer) else np.broadcast_to
        return Watched(value.array, spread(value.finite, aval.shape[:1]))

    def stack(self, value: Watched, aval: ShapedArray) -> Watched:
        return Watched(value.array, value.finite.all())

    def _observed(
        self, state: Numbers, key: Any, site: Site, x: Any, finite: Sequence[Any]
    ) -> tuple[Numbers, Any]:
        if not _has_numbers(site.aval):
            return state, x
        index = self.indices.setdefault(key, len(self.sites))
        if index == len(self.sites):
            self.sites.append(site)
        state, own = observe(state, index, x, tuple(finite))
        return state, Watched(x, own) if self.lifts(site.aval) else x

    def _watched(self, x: Any, finite: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return Watched(x, _is_finite(x) if finite is None else finite)


def plain(value: Any) -> Any:
    return value.array if isinstance(value, Watched) else value


def _has_numbers(aval: ShapedArray) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()
