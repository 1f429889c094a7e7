"""Norms written out as ``sqrt(sum(square(x)))``, which overflow where the norm itself doesn't."""

from __future__ import annotations

from collections.abc import Sequence

from ...interpret import Equation
from ...primitives import having, params
from .._run._gradients import Operands

BETWEEN = having("in_norms")


def norms(equations: Sequence[Equation], operands: Operands) -> list[tuple[int, ...]]:
    """Returns the indices of each written-out norm's equations: the squares, the sums, what is
    added or divided by; the root last."""
    found = [_norm(i, equations, operands) for i, e in enumerate(equations) if e.name == "sqrt"]
    return [indices for indices in found if indices]


def _norm(root: int, equations: Sequence[Equation], operands: Operands) -> tuple[int, ...]:
    """Returns the norm that ends in a square root; () if its argument is no sum of squares."""
    found, pending, squares = {root}, [root], 0
    while pending:
        for index in (i for operand in operands.get(pending.pop(), ()) for i in operand):
            if index in found or equations[index].path[:-1] != equations[root].path[:-1]:
                continue  # a sum over the iterations of a loop isn't a norm's
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
    atoms = equation.eqn.invars
    match equation.name:
        case "square":
            return True
        case "integer_pow":
            return params.degree(equation) == 2
        case "mul":
            return atoms[0] is atoms[1]
    return False
