"""The one loop over a jaxpr's equations, and what of it is the same in each run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jax.typing import ArrayLike

from .. import _jax
from .._jax import Jaxpr, ShapedArray, avals_of, jex
from ..primitives import params
from ._equation import Equation, contracts, operation_body
from ._floats import Value, map_floats
from ._interpretation import Applied, Interpretation, State


@dataclasses.dataclass(frozen=True, eq=False)
class Number:
    number: np.ndarray
    aval: ShapedArray


Atom = jex.Var | Number


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One equation of a body; no later one reads the variables ``last``, nor unread results."""

    equation: Equation
    reads: Sequence[Atom]
    writes: Sequence[jex.Var]
    last: Sequence[jex.Var]


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    constants: Sequence[jex.Var]
    inputs: Sequence[jex.Var]
    steps: Sequence[Step]
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
    steps: list[Step] = []
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
        steps.append(Step(equation, reads, eqn.outvars, last))
    body = Body(jaxpr.constvars, jaxpr.invars, steps[::-1], outputs)
    if kept is not None:
        kept[jaxpr, part] = body
    return body


def _atom(x: jex.Var | jex.Literal) -> Atom:
    if not isinstance(x, jex.Literal):
        return x
    (aval,) = avals_of([x])
    return Number(np.asarray(x.val, getattr(x.val, "dtype", aval.dtype)), aval)


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
