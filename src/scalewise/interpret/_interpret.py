"""The one loop over a jaxpr's equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.typing import ArrayLike

from .. import _jax
from .._jax import Jaxpr, jex
from ..primitives import params
from ._body import Atom, Body, Number, body_of
from ._equation import Equation, operation_body
from ._floats import Value, map_floats
from ._interpretation import Applied, Interpretation, State

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
        with _jax.provenance(equation.eqn, equation.traceback):
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
    if equation.lifted:
        return interpretation.apply(state, equation, inputs)
    return interpretation.unlifted(state, equation, inputs)


def canonical(interpretation, equation, values, avals, boundary):
    """Returns values in their canonical forms, cast to vary over the mesh axes of their types."""
    values = map_floats(
        lambda v, a: interpretation.canonical(v, a, boundary, equation),
        values,
        avals,
        interpretation.lifts,
    )
    if not _jax.manual_now():
        return values
    return [_jax.vary(v, _jax.varying(a)) for v, a in zip(values, avals, strict=True)]


def at_boundary(interpretation: Interpretation, state: State) -> State:
    """Casts a state to vary over all mesh axes: a loop's body or a branch may make it do so."""
    return _jax.vary(interpretation.at_boundary(state), _jax.manual_now())
