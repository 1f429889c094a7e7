"""Rules for ``rescale="never"``: scales from operands' scales and shapes, never from data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..interpret import Equation, Value, rebind
from ..primitives import Family, names, params
from ..scaled import EXPONENTS, predicted_size, static_scale
from ..scaled import RULES as SCALE_RULES
from ._families import RuleContext, wrap
from ._predict import terms_of
from ._rules import FALLBACK, RULES, Rule

# Primitives whose rules find the exponent of their result from data.
READ_DATA = names(lambda row: row.family is Family.CONTRACTIVE) | {"reduce_prod"}


def propagating_rule(name: str) -> Rule:
    """Returns the rule of a primitive that reads no data to find a scale."""
    if name == "integer_pow":
        return Rule(Family.POWER, _power)
    return FALLBACK if name in READ_DATA else RULES[name]


def _power(by: RuleContext, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    (x,) = inputs
    exponent = SCALE_RULES["integer_pow"].scale(EXPONENTS, x.exponent, params.degree(equation))
    return wrap(equation, rebind(equation, [x.data], x.data.dtype), exponent)


def static_exponent(equation: Equation) -> int:
    """Returns log2 of the static scale of a sum: sqrt(n), rounded, for n terms; else 0."""
    if equation.name in ("dot_general", "conv_general_dilated"):
        terms = terms_of(equation)
    elif equation.name == "reduce_sum":
        whole, rest = equation.in_avals[0].shape, equation.out_avals[0].shape
        terms = predicted_size(whole) // predicted_size(rest)
    else:
        return 0
    return math.frexp(static_scale(terms))[1] - 1
