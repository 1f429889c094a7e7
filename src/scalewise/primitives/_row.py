"""The meaning of the table's columns, and sets of primitives with a property."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from types import MappingProxyType

from ._table import TABLE


class Family(enum.Enum):
    """How a primitive's result depends on its operands' scales, or why it has no scale."""

    STRUCTURAL = "moves elements of one operand, and keeps its exponent"
    ALIGNED = "mixes elements of several operands, which are first brought to one exponent"
    HOMOGENEOUS = "scales as its one operand does"
    COMPARISON = "compares operands at one exponent; returns no float"
    INVARIANT = "doesn't depend on its operand's scale"
    PRODUCT = "exponents add or subtract"
    POWER = "the exponent is multiplied"
    CONTRACTIVE = "odd and never larger than a small operand, whose scale it keeps"
    ORDERED = "sorts; each result keeps its operand's exponent"
    CONTRACTION = "operands are rounded to the recipe's formats, exponents add"
    FALLBACK = "computed on plain numbers in the compute dtype"
    SPARSE = "a product of a sparse matrix, whose operands stay wide"
    CALL = "its body is interpreted"
    NO_FLOATS = "no floats"
    KERNEL = "a kernel, foreign program or Python function: gets plain numbers"
    REFERENCE = "interpreted on the values in the array"
    INTERNAL = "exists only while JAX traces, differentiates or compares"


# The dtype in which autocast runs a primitive, and why.
AUTOCAST = MappingProxyType({
    "low": "a contraction: products of narrow numbers, summed in float32 by the hardware",
    "range": "float32: exponentials, logarithms and powers leave FP16's range (256 * 256)",
    "sum": "float32: a narrow accumulator stagnates at 2048 (FP16) or 256 (BF16)",
    "difference": "float32: cancellation exposes earlier rounding; in FP16 x - max(x) = -20 is off "
    "by 0.008, its exponential by 0.8 %",
    "function": "float32: applies a function that was traced for one dtype",
    "-": "the widest dtype among the operands, constants apart",
})  # fmt: skip

FACTS = MappingProxyType({
    "exact": "results are operands' values, possibly negated, which need no rounding",
    "elementwise": "a real function of the operands' elements at each index",
    "series": "elementwise, by a loop or a long expansion",
    "chooses": "returns some of its operands' elements",
    "selects": "one of the operands' elements at each index",
    "same_order": "the operand's elements in the same order",
    "keeps_constant": "the result of an operand whose elements are equal has equal elements",
    "single": "needs float32 at least: a library's kernel, its caller, or complex numbers",
    "packed": "its result holds several matrices, or one beside what is left of its operand, of "
    "different magnitudes",
    "own_dtype": "depends on the bits of its operand's dtype, or holds code traced for that dtype",
    "drops": "may leave elements of its operands out, so that one which isn't finite may be gone",
    "keeps_scale": "no larger than the largest operand, whose scale `every_op` therefore keeps",
    "reduces": "each result is found from many elements of its operand",
    "recomputed": "a backward pass computes it again from its operand rather than read it",
    "stable": "recomputed with a relative error of at most a small multiple of its operand's, or "
    "within a rounding error of one (tanh)",
    "costly": "recomputed by several operations for each element: its result is stored if it is "
    "read twice",
    "in_norms": "may stand between the squares and the root of a norm that is written out",
    "adds": "adds or subtracts two operands",
    "accumulates": "adds elements of another operand to, or subtracts them from, some of its first",
    "whole": "its results are whole numbers: of nearby operands, one may be the next number",
    "indexes": "its integers are indices of its operand's elements",
    "host": "calls a Python function on the host",
    "contraction": "multiplies and adds, in a form that no rule of contractions covers",
    "bilinear": "linear in one operand, given the others, whatever its family",
    "collective": "exchanges data between the devices of a mesh",
    "direct": "lowered to one operation of its operands' types, or re-issues traced jaxprs",
})  # fmt: skip

# How a primitive makes a NaN of numbers without one.
NANS = MappingProxyType({
    "difference": "infinity minus infinity",
    "product": "0 times infinity, or infinity minus infinity",
    "quotient": "0 / 0, or infinity / infinity",
    "negative": "of a negative number",
    "infinite": "of infinity",
    "beyond_1": "of a number beyond 1",
    "pole": "of a pole",
})  # fmt: skip

# How a primitive makes an infinity of finite numbers, other than by their size or a division by 0.
POLES = MappingProxyType({
    "log": "the logarithm of 0",
    "root": "the inverse root of 0",
    "power": "a negative power of 0",
    "one": "of 1 or -1",
    "pole": "of a pole",
})  # fmt: skip

CAUSES = {"nan": NANS, "pole": POLES}

# The facts that another one implies.
IMPLIED = MappingProxyType({
    "selects": frozenset({"exact", "elementwise", "chooses", "drops", "keeps_scale"}),
    "same_order": frozenset({"exact", "keeps_constant"}),
    "adds": frozenset({"elementwise", "direct"}),
    "stable": frozenset({"recomputed"}),
    "costly": frozenset({"recomputed"}),
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Primitive:
    """A primitive, as the table describes it.

    Attributes:
        name: as JAX prints it.
        family: how the result depends on its operands' scales.
        autocast: a key of :data:`AUTOCAST`.
        facts: keys of :data:`FACTS`.
        body: name of the parameter that holds the jaxpr which a call stands for, or None.
        nan, pole: how it makes a NaN and an infinity, a text of :data:`NANS` and of :data:`POLES`;
            "" if it makes none, or an infinity by a division by 0.
    """

    name: str
    family: Family
    autocast: str
    facts: frozenset[str]
    body: str | None = None
    nan: str = ""
    pole: str = ""

    @property
    def full(self) -> bool:
        """Whether autocast runs the primitive in float32."""
        wide = bool(self.facts & {"single", "own_dtype"})
        return self.autocast not in ("low", "-") or wide


def parsed(table: str) -> dict[str, Primitive]:
    """Returns the primitives of a table, by name.

    Raises:
        ValueError: a word is in no column's vocabulary, or a name occurs twice.
    """
    rows: dict[str, Primitive] = {}
    for line in re.sub(r"\n +", " ", table).splitlines():
        if not line or line.startswith("#"):
            continue
        columns, _, members = line.partition(":")
        family, autocast, *facts = columns.split()
        given = dict(f.split("=") for f in facts if "=" in f)
        known = frozenset(f for f in facts if "=" not in f)
        known = known.union(*(IMPLIED.get(f, ()) for f in known))
        body = given.pop("body", None)
        unknown = not known <= set(FACTS) or any(
            x not in CAUSES.get(k, ()) for k, x in given.items()
        )
        named = members.split()
        if rows.keys() & set(named) or autocast not in AUTOCAST or unknown or not named:
            raise ValueError(f"primitives/_table.py: a name twice or an unknown word in {line!r}")
        causes = {k: CAUSES[k][x] for k, x in given.items()}
        kind = Family[family.upper()]
        rows |= {x: Primitive(x, kind, autocast, known, body, **causes) for x in named}
    return rows


PRIMITIVES = MappingProxyType(parsed(TABLE))


def names(holds: Callable[[Primitive], object]) -> frozenset[str]:
    """Returns the names of the primitives whose rows satisfy a predicate."""
    return frozenset(name for name, row in PRIMITIVES.items() if holds(row))


def having(fact: str) -> frozenset[str]:
    """Returns the names of the primitives with one of :data:`FACTS`.

    Example:
        >>> "reshape" in having("exact"), "add" in having("exact")
        (True, False)
    """
    if fact not in FACTS:
        raise ValueError(f"{fact!r} is no fact of a primitive; expected one of {', '.join(FACTS)}")
    return names(lambda row: fact in row.facts)
