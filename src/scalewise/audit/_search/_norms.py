"""Norms written out as ``sqrt(sum(square(x)))``, which overflow where the norm itself doesn't."""

from __future__ import annotations

from collections.abc import Sequence

import jax.extend.core as jex

from ...interpret import Equation
from ...primitives import having, params

BETWEEN = having("in_norms")


def norms(equations: Sequence[Equation]) -> list[tuple[int, ...]]:
    """Returns the indices of each written-out norm's equations: the squares, the sums, what is
    added or divided by; the root last.

    Args:
        equations: the recorded equations by index.
    """
    producer = {v: i for i, equation in enumerate(equations) for v in equation.eqn.outvars}
    found = [_norm(i, equations, producer) for i, e in enumerate(equations) if e.name == "sqrt"]
    return [indices for indices in found if indices]


def _norm(
    root: int, equations: Sequence[Equation], producer: dict[jex.Var, int]
) -> tuple[int, ...]:
    """Returns the norm that ends in a square root; () if its argument is no sum of squares."""
    found, pending, squares = {root}, [root], 0
    while pending:
        for atom in equations[pending.pop()].eqn.invars:
            index = producer.get(atom) if isinstance(atom, jex.Var) else None
            if index is None or index in found:
                continue
            if is_square(equations[index]):
                squares += 1
            elif equations[index].name in BETWEEN:
                pending.append(index)
            else:
                continue
            found.add(index)
    sums = any(equations[i].name == "reduce_sum" for i in found)
    return (*sorted(found - {root}), root) if squares and sums else ()


def is_square(equation: Equation) -> bool:
    """Returns whether an equation multiplies a value by itself."""
    atoms = equation.eqn.invars
    match equation.name:
        case "square":
            return True
        case "integer_pow":
            return params.degree(equation) == 2
        case "mul":
            return atoms[0] is atoms[1]
    return False
