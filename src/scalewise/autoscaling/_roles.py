"""The uses of a contraction's operands: weights or activations, in attention or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..interpret import Equation
from ..primitives import params
from ._operand_settings import Role
from ._value import ScaledValue


def roles(equation: Equation, values: Sequence[ScaledValue], attention: bool) -> tuple[Role, Role]:
    if attention:
        return "activation", "activation"
    left, right = (value.origin == "stored" for value in values)
    return ("weight", "activation") if left and not right else ("activation", "weight")


def role_of(value: ScaledValue) -> Role | Literal[""]:
    return value.memo.role or value.role


def role_read_later(value: ScaledValue) -> Role:
    return role_of(value) or ("weight" if value.origin == "stored" else "activation")


def between_activations(equation: Equation, values: Sequence[ScaledValue]) -> bool:
    """Returns whether a product multiplies two computed arrays slice by slice, as attention does.

    Its operands are not arguments, and it has batch axes. A backward product counts if the forward
    product did; otherwise the forward product has rounded the operand that both share.
    """
    if equation.name != "dot_general" or not params.dot_dimensions(equation)[1][0]:
        return False
    if any(x.origin == "stored" for x in values):
        return False
    read = any(value.narrowed or value.memo.narrowed for value in values)
    return equation.direction != "backward" or not read


def is_reread(value: ScaledValue, equation: Equation) -> bool:
    return equation.direction == "backward" and value.origin == "forward"
