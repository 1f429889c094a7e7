"""``Interpretation``, the base class, and the one loop over a jaxpr's equations."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import _jax
from .._jax import Jaxpr, ShapedArray, avals_of, jex
from .._types import AxisName, PyTree
from ..primitives import params
from ._equation import Equation, contracts, operation_body
from ._wide import Value, is_float, map_in_meshes

Boundary = Literal["carry", "branch", "stacked", "mapped"]

State: TypeAlias = Any
"""A pytree of fixed shape that each equation gets from the one before it."""

Argument: TypeAlias = Any
"""A caller's array, or another node of a pytree that ``Interpretation.is_argument`` accepts."""

Readers: TypeAlias = Sequence[tuple[Equation, int]]
"""Equations that read a value, each with the operand's number."""

Applied = tuple[State, Sequence[Value]]  # after an equation, with a value for each result


class RoundedOperand(NamedTuple):
    """An operand that an equation rounds before it computes.

    Attributes:
        exact, rounded: the numbers before and after, of one shape.
        saturated: bool, whether a number's magnitude was cut off at the largest with its scale.
        limit: the largest magnitude with its scale, if that doesn't depend on the numbers; else
            infinity.
    """

    exact: jax.Array
    rounded: jax.Array
    saturated: jax.Array
    limit: jax.Array | float = math.inf


class Interpretation:
    """The identity, and the base class of all interpretations.

    A *value* is any pytree that stands for one float array; integers, booleans, complex numbers and
    keys stay plain arrays, unless :meth:`lifts` says otherwise. The abstract type alone decides
    which arrays are lifted to values, so that loop carries and branches agree by construction.

    An interpretation may thread a state (statistics, for example) through the program: a pytree of
    fixed shape that each equation gets from the one before it, also through loops and branches.

    Attributes:
        inline: True to replace nested jits by their bodies, except those with compiler options.
        traces: False if it computes numbers: their operations need no line, scope or mesh.
        transposes: True if JAX can transpose what a linear program becomes.
    """

    inline: ClassVar[bool] = False
    traces: ClassVar[bool] = True
    transposes: ClassVar[bool] = False

    def opens(self, equation: Equation) -> bool:
        """Returns whether an operation of another library, such as ATen's, is interpreted step by
        step (see :func:`operation_body`). Otherwise it is one equation, which rounds once."""
        return False

    def context(self) -> AbstractContextManager[object]:
        """Returns the context (``jax.enable_x64``, say) in which the program is interpreted."""
        return nullcontext()

    def is_argument(self, leaf: object) -> bool:
        """Returns whether a node of an argument's pytree stands for one array (a ScaledArray)."""
        return False

    def abstract(self, leaf: Argument) -> Argument:
        """Returns what the user's function is traced with in place of an argument."""
        return leaf

    def lifts(self, aval: ShapedArray) -> bool:
        """Returns whether arrays of this abstract type are values: by default floats."""
        return is_float(aval)

    def lift(self, x: Argument, aval: ShapedArray) -> Value:
        """Returns the value that stands for a plain array (or argument) ``x``."""
        return x

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Value:
        """Returns the value of a literal."""
        return self.lift(x, aval)

    def number(self, value: Value) -> np.ndarray | None:
        """Returns the number of the program's source that a value is; None of other values."""
        return value if isinstance(value, np.ndarray) and not value.ndim else None

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        """Returns the plain array that ``value`` stands for, in the dtype of ``aval``."""
        return value

    def emit(self, value: Value, aval: ShapedArray, path: str) -> Value:
        """Returns the caller's output at ``path`` (as ``jax.tree_util.keystr`` prints it)."""
        return self.lower(value, aval)

    def residual(self, value: Value, aval: ShapedArray) -> Value:
        """Returns ``value`` as it waits for a backward pass that is a program of its own."""
        return value

    def tangent(self, argument: Argument, tangent: PyTree) -> jax.Array:
        """Returns the tangent of the array that an argument stands for, from the argument's."""
        return tangent

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        """Runs one equation on values; inputs and outputs that aren't floats are plain arrays."""
        return state, equation.bind(*inputs)

    def rounded_operands(
        self, equation: Equation, inputs: Sequence[Value]
    ) -> Sequence[RoundedOperand]:
        """Returns the operands that :meth:`apply` would round before it computes an equation."""
        return ()

    def unlifted(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        """Runs one equation without floats among its operands and results, on plain arrays."""
        return state, equation.bind(*inputs)

    def control(self, equation: Equation, run: Callable) -> Callable:
        """Returns the function to call in place of ``run``, which re-issues a loop or a branch.

        ``run`` maps ``(state, inputs)`` to ``(state, outputs)``. An interpretation may return
        ``run`` itself, or a compiled function that it has kept from an earlier run.
        """
        return run

    def eager_iterations(self, state: State, equation: Equation) -> int:
        """Returns how many iterations of a loop are run eagerly, at most, instead of being traced.

        A scan of more iterations is re-issued, a while loop after that many. If this isn't 0, only
        the branch that is taken is interpreted. For runs outside of ``jit``, in which values are
        concrete.
        """
        return 0

    def merge(self, state: State, axes: AxisName) -> State:
        """Returns one state for all devices along the mesh's ``axes``; by default the first's."""
        return state

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> Value:
        """Returns ``value`` in a form that depends only on ``aval``, ``boundary`` and ``equation``.

        Called on the values that enter or leave a loop's carry, leave a branch, are stacked by a
        scan, or enter or leave a map over a mesh of devices.
        """
        return value

    def select(self, predicate: Value, on_true: Value, on_false: Value) -> Value:
        """Chooses elementwise between two canonical carries of one type (of a vmapped while loop,
        or of one that ends at several iterations)."""
        return jnp.where(predicate, on_true, on_false)

    def invariant(self, value: Value, readers: Readers, equation: Equation) -> Value:
        """Returns a loop's constant after the work that each iteration would repeat on it.

        The body's ``readers`` read it, each as the operand of that number.
        """
        return value

    def repeated(self, equation: Equation, inputs: Sequence[Value | None]) -> Value | None:
        """Returns the result of an equation in a loop's body, computed before the loop; None to
        compute it in the body. Inputs that aren't the same in each iteration are None.
        """
        return None

    def behind(self, value: Value, barrier: Value) -> Value:
        """Returns a value, which is ``barrier`` behind an optimization barrier, as a recomputation
        of the forward pass reads it.
        """
        return barrier

    def inside(self, value: Value) -> Value:
        """Returns a copy of a value, in which a loop's body may cache what it traces."""
        return jax.tree.map(lambda leaf: leaf, value)

    def unstack(self, value: Value, aval: ShapedArray) -> Value:
        """Returns a value whose leaves all have the first axis, along which a scan slices it."""
        return value

    def stack(self, value: Value, aval: ShapedArray) -> Value:
        """Returns a scan's stacked result: the canonical form, each leaf with a new first axis."""
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Number:
    number: np.ndarray
    aval: ShapedArray


Atom = jex.Var | Number


@dataclasses.dataclass(frozen=True, eq=False)
class BodyStep:
    """One equation of a body; no later one reads the variables ``last``, nor unread results."""

    equation: Equation
    reads: Sequence[Atom]
    writes: Sequence[jex.Var]
    last: Sequence[jex.Var]


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    constants: Sequence[jex.Var]
    inputs: Sequence[jex.Var]
    steps: Sequence[BodyStep]
    outputs: Sequence[Atom]


def body_of(
    jaxpr: Jaxpr,
    within: Equation | None = None,
    part: tuple[int, ...] = (),
    *,
    keep: bool = False,
) -> Body:
    """Returns the body of an open jaxpr, whose equations know their place in the program.

    The name stack and the position of ``within``, whose body it is, precede the equations' own
    (JAX begins a new stack in each loop body); so does the number ``part`` of several bodies. A
    jaxpr that occurs at several places has a body for each. With ``keep``, bodies are cached in
    their equations.
    """
    kept = within.bodies if within else None
    if kept is not None and (jaxpr, part) in kept:
        return kept[jaxpr, part]
    keep = keep or kept is not None
    scope, path = (within.scope, (*within.path, *part)) if within else ("", ())
    outputs = [_atom(x) for x in jaxpr.outvars]
    read = {x for x in outputs if isinstance(x, jex.Var)}
    steps: list[BodyStep] = []
    order = (*within.order, *part) if within else ()
    before = itertools.accumulate(map(contracts, jaxpr.eqns), initial=0)
    numbered = [(i, n, eqn) for i, (n, eqn) in enumerate(zip(before, jaxpr.eqns, strict=False))]
    for i, n, eqn in reversed(numbered):
        own = str(eqn.source_info.name_stack)
        inner = f"{scope}/{own}" if scope and own else scope or own
        equation = Equation(eqn, inner, (*path, i), within, {} if keep else None, (*order, n))
        reads = [_atom(x) for x in eqn.invars]
        used = dict.fromkeys(x for x in (*reads, *eqn.outvars) if isinstance(x, jex.Var))
        last = [x for x in used if x not in read]
        read.update(used)
        steps.append(BodyStep(equation, reads, eqn.outvars, last))
    body = Body(jaxpr.constvars, jaxpr.invars, steps[::-1], outputs)
    if kept is not None:
        kept[jaxpr, part] = body
    return body


def _atom(x: jex.Var | jex.Literal) -> Atom:
    if not isinstance(x, jex.Literal):
        return x
    return Number(literal_number(x), avals_of([x])[0])


def literal_number(x: jex.Literal) -> np.ndarray:
    """Returns a literal as interpretations get it: a Python number in its type's dtype."""
    return np.asarray(x.val, getattr(x.val, "dtype", avals_of([x])[0].dtype))


Rule = Callable[[Interpretation, Equation, State, Sequence[Value]], Applied]
# The rules of calls and control flow by primitive, registered by `_calls.py` and `_loops.py`.
CONTROL: dict[str, Rule] = {}


def interpret_jaxpr(
    interpretation: Interpretation,
    jaxpr: Jaxpr,
    state: State,
    values: Sequence[Value],
    within: Equation | None = None,
    part: tuple[int, ...] = (),
) -> tuple[State, list[Value]]:
    """Runs the equations of a jaxpr, in order, under an interpretation.

    ``values`` stand for the inputs, ``state`` is any pytree of fixed shape; ``within`` and
    ``part`` are as for :func:`body_of`. Returns the new state, and a value for each output.
    """
    jaxpr, consts = _jax.open_jaxpr(jaxpr)
    return interpret_body(interpretation, body_of(jaxpr, within, part), consts, state, values)


def interpret_body(
    interpretation: Interpretation,
    body: Body,
    consts: Sequence[ArrayLike],
    state: State,
    values: Sequence[Value],
) -> tuple[State, list[Value]]:
    environment: dict[jex.Var, Value] = dict(zip(body.inputs, values, strict=True))
    avals = _jax.avals_of(body.constants)
    for var, const, aval in zip(body.constants, consts, avals, strict=True):
        environment[var] = interpretation.lift(const, aval) if interpretation.lifts(aval) else const

    def read(atom: Atom):
        if isinstance(atom, Number):
            known = atom.number
            lifts = interpretation.lifts(atom.aval)
            return interpretation.constant(known, atom.aval) if lifts else known
        return environment[atom]

    for step in body.steps:
        equation = step.equation
        traces = interpretation.traces
        with _jax.provenance(equation.eqn, equation.traceback) if traces else nullcontext():
            calls = CONTROL["closed_call"] if params.is_call(equation) else _apply
            rule = CONTROL.get(equation.name, calls)
            state, outs = rule(interpretation, equation, state, [read(x) for x in step.reads])
        environment.update(zip(step.writes, outs, strict=True))
        del outs
        for var in step.last:
            environment.pop(var, None)
    return state, [read(x) for x in body.outputs]


def _apply(interpretation, equation: Equation, state, inputs):
    body = operation_body(equation)
    if body is not None and interpretation.opens(equation):
        return interpret_jaxpr(interpretation, body, state, inputs, equation)
    if equation.name == "convert_element_type":
        # a program's Python integer, which a jitted function such as jnp.clip converts
        (aval,), number = equation.out_avals, interpretation.number(inputs[0])
        if number is not None and interpretation.lifts(aval):
            return state, [interpretation.constant(number.astype(aval.dtype), aval)]
    if equation.lifted:
        return interpretation.apply(state, equation, inputs)
    return interpretation.unlifted(state, equation, inputs)


def canonical(interpretation, equation, values, avals, boundary):
    values = map_in_meshes(
        lambda v, a: interpretation.canonical(v, a, boundary, equation),
        values,
        avals,
        interpretation.lifts,
    )
    if not _jax.manual_now():
        return values
    return [_jax.vary(v, _jax.varying(a)) for v, a in zip(values, avals, strict=True)]


def vary(state: State) -> State:
    """Casts a state to vary over all mesh axes: a loop's body or a branch may make it do so."""
    return _jax.vary(state, _jax.manual_now())
