"""The table of rules: what each primitive does to (data, exponent) pairs.

Where an operation of :mod:`scalewise.scaled` has the same rule, its scale is the same function.
"""

from __future__ import annotations

import dataclasses
import math

from .._check import checked
from .._jax import jex
from ..primitives import PRIMITIVES, Family
from ..scaled._rules import INVERSE_ROOT
from . import _contraction_rules as contraction_rules
from . import _families as families
from ._families import Function, fallback


@dataclasses.dataclass(frozen=True)
class Rule:
    family: Family
    rule: Function


FALLBACK = Rule(Family.FALLBACK, fallback)


class RuleTable(dict[str, Rule]):
    def __missing__(self, name: str) -> Rule:
        return FALLBACK


# Rules that serve a whole family.
FAMILIES: dict[Family, Function] = {
    Family.STRUCTURAL: families.structural,
    Family.ALIGNED: families.aligned,
    Family.HOMOGENEOUS: families.homogeneous,
    Family.COMPARISON: families.aligned,
    Family.INVARIANT: families.invariant,
    Family.ORDERED: families.ordered,
    Family.CONTRACTION: contraction_rules.contraction,
    Family.SPARSE: contraction_rules.sparse,
}
# Rules of single primitives, which precede their family's.
PARTICULAR: dict[str, Function] = {
    "convert_element_type": families.convert,
    "all_gather": contraction_rules.all_gather,
    "all_gather_invariant": contraction_rules.all_gather,
    "psum": contraction_rules.psum,
    "psum_invariant": contraction_rules.psum,
    "rem": families.remainder,
    "select_n": families.select_n,
    "mul": families.product("mul"),
    "div": families.product("div"),
    "integer_pow": families.power,
    "square": families.power,
    "sqrt": families.root(2),
    "rsqrt": families.root(2, INVERSE_ROOT),
    "cbrt": families.root(3),
    "reduce_prod": families.product_of_all,
    "sin": families.contractive(1.0),
    "asinh": families.contractive(1.0),
    "tanh": families.contractive(1.0, bounded=True),
    "atan": families.contractive(1.0, bounded=True),
    "erf": families.contractive(2 / math.sqrt(math.pi), bounded=True),
    "ragged_dot": contraction_rules.grouped,
    "ragged_dot_general": contraction_rules.grouped,
    "scaled_dot": contraction_rules.scaled_product,
    "symmetric_product": contraction_rules.gram,
}


def _rules() -> RuleTable:
    table = RuleTable()
    for name, row in PRIMITIVES.items():
        rule = PARTICULAR.get(name) or FAMILIES.get(row.family)
        if rule is not None:
            counts_as = Family.FALLBACK if row.family is Family.SPARSE else row.family
            table[name] = Rule(counts_as, rule)
    return table


RULES = _rules()


@checked
def register(primitive: jex.Primitive, family: Family) -> None:
    """Gives a primitive of your own the rule of a family, for ``autoscale`` and the audit.

    Without one, a primitive gets plain numbers in float32, which is always right, and its results
    begin with a scale of 1. With one, ``autoscale`` computes it on the data alone and finds the
    result's scale by the family's rule, and the audit knows how a loss scale passes through it.

    Args:
        primitive: any primitive that JAX doesn't define. Its lowering and its derivatives are
            your own.
        family: a family with a rule: ``Family.HOMOGENEOUS`` for ``f(c x) = c f(x)``, c > 0;
            ``STRUCTURAL`` for moved elements of one operand; ``ALIGNED`` for elements or sums of
            several operands; ``INVARIANT`` for ``f(c x) = f(x)``; ``COMPARISON`` for operands at
            one scale, without float results; ``ORDERED`` for sorts.

    Raises:
        ValueError: a family without a rule of its own, or a primitive of JAX.
    """
    if primitive.name in PRIMITIVES:
        raise ValueError(f"register: {primitive.name!r} is a primitive of JAX, which has its rule")
    allowed = [f for f in FAMILIES if f not in (Family.CONTRACTION, Family.SPARSE)]
    if family not in allowed:
        names = ", ".join(f"Family.{f.name}" for f in allowed)
        raise ValueError(f"register: no rule serves all of Family.{family.name}; expected {names}")
    RULES[primitive.name] = Rule(family, FAMILIES[family])
