"""The table of rules: what each primitive does to (data, exponent) pairs."""

from __future__ import annotations

import dataclasses
import math

from ..primitives import PRIMITIVES, Family
from . import _contraction_rules as contraction_rules
from . import _families as families
from ._families import Function, fallback


@dataclasses.dataclass(frozen=True)
class Rule:
    family: Family
    rule: Function


FALLBACK = Rule(Family.FALLBACK, fallback)


class RuleTable(dict[str, Rule]):
    """Rules by primitive name; a name without one gets the fallback."""

    def __missing__(self, name: str) -> Rule:
        return FALLBACK


# Rules that serve a whole family.
FAMILIES: dict[Family, Function] = {
    Family.STRUCTURAL: families.structural,
    Family.ALIGNED: families.aligned,
    Family.HOMOGENEOUS: families.homogeneous,
    Family.COMPARISON: families.comparison,
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
    "rsqrt": families.root(2, sign=-1),
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
    """Returns the rules by primitive; those that are computed on plain numbers have none."""
    table = RuleTable()
    for name, row in PRIMITIVES.items():
        rule = PARTICULAR.get(name) or FAMILIES.get(row.family)
        if rule is not None:
            counts_as = Family.FALLBACK if row.family is Family.SPARSE else row.family
            table[name] = Rule(counts_as, rule)
    return table


RULES = _rules()
