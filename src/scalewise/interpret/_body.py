"""Prepares a jaxpr for interpretation: computes once what is the same in each run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from .._jax import Jaxpr, ShapedArray, avals_of, jex
from ._equation import Equation, contracts


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
