"""Products of a backward pass: which computes the gradient of a weight, which that of an input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from ...interpret import Equation
from ...primitives import Family, names

Operands = Mapping[int, Sequence[Sequence[int]]]  # by equation and operand: where it comes from

PRODUCTS = names(lambda row: row.family is Family.CONTRACTION)


def gradients(equations: Sequence[Equation], operands: Operands) -> dict[int, str]:
    """Returns ``"weight"`` or ``"input"`` for each product of a backward pass, by its index.

    A backward product multiplies a gradient by one operand of a forward product of the same source
    line, and gives the gradient of the other one. That is a weight if it is an argument of the
    program or a part of one, and an input if an equation has computed it. Products for which this
    doesn't tell are left out: those of loops that are compiled as a whole, for example.
    """
    forward: dict[tuple[str, int, str] | None, list[int]] = {}
    backward = []
    for i, equation in enumerate(equations):
        if equation.name in PRODUCTS and equation.source is not None:
            if equation.direction == "backward":
                backward.append(i)
            else:
                forward.setdefault(equation.source, []).append(i)
    found = {}
    for i in backward:
        equation = equations[i]
        own = [_operand(equation, operands.get(i, ()), at) for at in range(2)]
        result = sorted(equation.out_avals[0].shape)
        kinds = {
            "input" if other[0] else "weight"
            for j in forward.get(equation.source, ())
            for residual, other in _both_ways(equations[j], operands.get(j, ()))
            if residual in own and other[1] == result
        }
        if len(kinds) == 1:
            found[i] = kinds.pop()
    return found


Operand: TypeAlias = tuple[tuple[int, ...], list[int]]  # its origin, its axes' lengths


def _both_ways(
    equation: Equation, operands: Sequence[Sequence[int]]
) -> Iterator[tuple[Operand, Operand]]:
    a, b = (_operand(equation, operands, at) for at in range(2))
    yield a, b
    yield b, a


def _operand(equation: Equation, operands: Sequence[Sequence[int]], at: int) -> Operand:
    """Returns where an operand comes from, and its axes' lengths: transposes don't matter."""
    origin = tuple(operands[at]) if at < len(operands) else ()
    return origin, sorted(equation.in_avals[at].shape)
