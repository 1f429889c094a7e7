"""Norms written out as ``sqrt(sum(square(x)))``, which overflow where the norm itself doesn't."""

from __future__ import annotations

from collections.abc import Sequence

import jax.extend.core as jex

from ...interpret import Equation

BETWEEN = frozenset({"add", "reduce_sum", "div", "convert_element_type"})


def norms(seen: Sequence[Equation]) -> list[tuple[int, ...]]:
    """The rows of each written-out norm: squares, sums, what is added or divided by, the root last.

    Args:
        seen: the equations that round, in the order of their rows.
    """
    made = {v: row for row, equation in enumerate(seen) for v in equation.eqn.outvars}
    found = [_back(row, seen, made) for row, e in enumerate(seen) if e.name == "sqrt"]
    return [rows for rows in found if rows]


def _back(root: int, seen: Sequence[Equation], made: dict[jex.Var, int]) -> tuple[int, ...]:
    """From a square root back to the squares it is the sum of; () if it isn't of such."""
    met, waiting, squares = {root}, [root], 0
    while waiting:
        for atom in seen[waiting.pop()].eqn.invars:
            row = made.get(atom) if isinstance(atom, jex.Var) else None
            if row is None or row in met:
                continue
            if _is_square(seen[row]):
                squares += 1
            elif seen[row].name in BETWEEN:
                waiting.append(row)
            else:
                continue
            met.add(row)
    sums = any(seen[row].name == "reduce_sum" for row in met)
    return (*sorted(met - {root}), root) if squares and sums else ()


def _is_square(equation: Equation) -> bool:
    atoms = equation.eqn.invars
    match equation.name:
        case "square":
            return True
        case "integer_pow":
            return equation.params["y"] == 2
        case "mul":
            return atoms[0] is atoms[1]
    return False
