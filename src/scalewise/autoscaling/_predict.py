"""What is known of operands: standard deviations predicted from shapes alone, and uses.

Unit scaling predicts them so (arXiv 2303.11257). A symbolic dimension (``jax.export``) counts as 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ..interpret import Equation, Value
from ..primitives import Family, names, params
from ..scaled import at_least, predicted_size
from ..scalifying import ScaledValue, terms_of
from ._operand_settings import Role

SUMS = names(lambda row: row.family is Family.HOMOGENEOUS and row.autocast == "sum")


def of_argument(shape: tuple[int, ...]) -> float:
    """Returns log2 of an argument's standard deviation: 1 / sqrt(fan in) for a matrix, else 1."""
    return -math.log2(predicted_size(shape[:-1])) / 2 if len(shape) > 1 else 0.0


def predict(equation: Equation, family: Family, inputs: Sequence[Value]) -> float:
    """Returns log2 of the standard deviation of an equation's results, for independent operands."""
    floats = [x for x in inputs if isinstance(x, ScaledValue)]
    if not floats:
        return 0.0
    stds = [x.log2_std for x in floats]
    for i, number in enumerate(x.constant_value for x in floats):
        if number is not None:
            stds[i] = math.log2(abs(number)) if number and math.isfinite(number) else 0.0
    match family:
        case Family.STRUCTURAL | Family.ORDERED:
            return stds[0]
        case Family.ALIGNED:
            varying = [s for s, x in zip(stds, floats, strict=True) if x.constant_value is None]
            return max(varying or stds)
        case Family.HOMOGENEOUS:
            terms = predicted_size(floats[0].shape) / predicted_size(equation.out_avals[0].shape)
            return stds[0] + (math.log2(max(1, terms)) / 2 if equation.name in SUMS else 0)
        case Family.PRODUCT:
            return stds[0] + (stds[1] if equation.name == "mul" else -stds[1])
        case Family.POWER:
            return stds[0] * params.degree(equation)
        case Family.CONTRACTION:
            return sum(stds) + math.log2(max(1, terms_of(equation))) / 2
    return 0.0


# Families whose results have the numbers of an operand, or their sums and multiples.
KEEP = (Family.STRUCTURAL, Family.ALIGNED, Family.ORDERED, Family.PRODUCT)


def largest_constant(family: Family, inputs: Sequence[Value]) -> float:
    """Returns the largest magnitude of constants that may be among an equation's results."""
    if family not in KEEP:
        return 0.0
    known = [x for x in inputs if isinstance(x, ScaledValue)]
    sizes = [
        abs(x.largest_constant if x.constant_value is None else x.constant_value) for x in known
    ]
    return max(filter(math.isfinite, sizes), default=0.0)


def has_rows(shape: Sequence[int]) -> bool:
    """Returns whether an argument of this shape may be a mask: a vector is rather a bias."""
    return sum(at_least(n, 2) for n in shape) >= 2


def may_be_mask(family: Family, inputs: Sequence[Value]) -> bool:
    """Returns whether what may be a mask is among an equation's results, or was added to them.

    Other arguments, such as positions, count as well: a mask is one whose results an exponential
    reads (``Memo.in_exponential``).
    """
    return family in KEEP and any(x.may_be_mask for x in inputs if isinstance(x, ScaledValue))


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


def softmax_role(equation: Equation, family: Family, inputs: Sequence[Value]) -> str:
    """Returns ``"probabilities"`` of a softmax's results, ``"exponential"`` of its exponentials and
    their sums; else nothing."""
    if equation.name in ("exp", "exp2"):
        return "exponential"
    if equation.name == "ops.softmax":
        return "probabilities"
    known = [x for x in inputs if isinstance(x, ScaledValue) and x.constant_value is None]
    own = {role_of(x) for x in known}
    if equation.name == "div":
        return "probabilities" if own == {"exponential"} and len(known) == 2 else ""
    kept = family is Family.STRUCTURAL or equation.name in ("select_n", "reduce_sum")
    found = own.pop() if kept and len(own) == 1 else ""
    return found if found in ("exponential", "probabilities") else ""


def is_reread(value: ScaledValue, equation: Equation) -> bool:
    return equation.direction == "backward" and value.origin == "forward"
