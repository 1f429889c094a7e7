"""The table of rules: what each primitive does to (data, exponent) pairs."""

from __future__ import annotations

import dataclasses
import math

from ..primitives import PRIMITIVES, Family
from ._contraction_rules import (
    all_gather,
    contraction,
    gram,
    grouped,
    psum,
    scaled_product,
    sparse,
)
from ._families import (
    Function,
    aligned,
    comparison,
    contractive,
    convert,
    cube_root,
    fallback,
    homogeneous,
    invariant,
    ordered,
    power,
    product,
    product_of_all,
    remainder,
    root,
    select_n,
    structural,
)


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
    Family.STRUCTURAL: structural,
    Family.ALIGNED: aligned,
    Family.HOMOGENEOUS: homogeneous,
    Family.COMPARISON: comparison,
    Family.INVARIANT: invariant,
    Family.ORDERED: ordered,
    Family.CONTRACTION: contraction,
    Family.SPARSE: sparse,
}
# Rules of single primitives, which precede their family's.
PARTICULAR: dict[str, Function] = {
    "convert_element_type": convert,
    "all_gather": all_gather,
    "all_gather_invariant": all_gather,
    "psum": psum,
    "psum_invariant": psum,
    "rem": remainder,
    "select_n": select_n,
    "mul": product(1),
    "div": product(-1),
    "integer_pow": power,
    "square": power,
    "sqrt": root(1),
    "rsqrt": root(-1),
    "cbrt": cube_root,
    "reduce_prod": product_of_all,
    "sin": contractive(1.0),
    "asinh": contractive(1.0),
    "tanh": contractive(1.0, bounded=True),
    "atan": contractive(1.0, bounded=True),
    "erf": contractive(2 / math.sqrt(math.pi), bounded=True),
    "ragged_dot": grouped,
    "ragged_dot_general": grouped,
    "scaled_dot": scaled_product,
    "symmetric_product": gram,
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
