"""A jaxpr at its place in a program: what of walking it is the same in each run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from . import _compat
from ._equation import Equation, contracts


@dataclasses.dataclass(frozen=True, eq=False)
class Number:
    """A literal."""

    number: np.ndarray
    aval: Any


Atom = jex.Var | Number


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One equation of a body.

    Attributes:
        equation: with its scope and path.
        reads: its operands.
        writes: variables of its results.
        last: what nobody reads after it, results that nobody reads at all among them.
    """

    equation: Equation
    reads: Sequence[Atom]
    writes: Sequence[jex.Var]
    last: Sequence[jex.Var]


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """Steps in their order, and the variables that the constants, inputs and outputs belong to."""

    constants: Sequence[jex.Var]
    inputs: Sequence[jex.Var]
    steps: Sequence[Step]
    outputs: Sequence[Atom]


def body_of(
    jaxpr: _compat.Jaxpr,
    within: Equation | None = None,
    part: tuple[int, ...] = (),
    *,
    keep: bool = False,
) -> Body:
    """An open jaxpr as it is walked at one place.

    Args:
        jaxpr: open.
        within: the equation whose body it is. Its name stack is put before the equations' own (JAX
            begins a new one in each loop body), and so is its position; where JAX doesn't know
            who wrote an equation, its line is taken.
        part: which of the equation's bodies, behind its position.
        keep: whether the equations keep bodies of their own; what is within one that does, does.

    Returns:
        The body, the one that ``within`` has kept if there is one: a jaxpr that occurs at several
        places has a body at each.
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


def _atom(x: Any) -> Atom:
    if isinstance(x, jex.Literal):
        return Number(np.asarray(x.val, x.aval.dtype), x.aval)  # type: ignore[attr-defined]
    return x
