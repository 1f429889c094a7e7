"""Rules for ``rescale="never"``: scales from operands' scales and shapes, never from data."""

from __future__ import annotations

import math

from ..interpret import Equation
from ..primitives import Family, names
from ..scaled import predicted_size, static_scale
from ._families import propagated_power
from ._predict import terms_of
from ._rules import FALLBACK, RULES, Rule

# Primitives whose rules find the exponent of their result from data.
READ_DATA = names(lambda row: row.family is Family.CONTRACTIVE) | {"reduce_prod"}


def propagating_rule(name: str) -> Rule:
    """Returns the rule of a primitive that reads no data to find a scale."""
    if name == "integer_pow":
        return Rule(Family.POWER, propagated_power)
    return FALLBACK if name in READ_DATA else RULES[name]


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
