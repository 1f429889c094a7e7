"""The values that the backward pass reads: kept, stored narrow, or computed again."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax

from ..formats import Format
from ..interpret import Equation, Value, is_quantization
from ..primitives import having, params
from ..scaled import at_least, is_known
from ..scalifying import RULES, Memo, ScaledValue
from ._layout import separate_copy
from ._products import DeferredProduct
from ._quantized import QuantizedValue
from ._setup import Setup
from ._value import Copy, Lineage, StoredValue, holds, may_be_masked, store_value

RECOMPUTED, STABLE = having("recomputed"), having("stable")
SAME_ORDER = having("same_order")
COSTLY, REDUCTIONS = having("costly"), having("reduces")
FEW = 16  # the least elements per result of a reduction that makes a statistic
DEEPEST = 48  # most operations between a value and its source


def before_cast(x: ScaledValue) -> jax.Array | None:
    """Returns the argument that a value was cast from, as float32 weights are; None for others."""
    if x.lineage is None or x.lineage.equation.name != "convert_element_type":
        return None
    source = x.lineage.inputs[0]
    is_argument = isinstance(source, ScaledValue) and source.origin == "stored"
    return source.data if is_argument and source.exponent == x.exponent == 0 else None


def is_statistic(equation: Equation, inputs: Sequence[Value]) -> bool:
    """Returns whether a result is a statistic, much smaller than the array it was computed from.

    A reduction of at least ``FEW`` elements to one, or an elementwise function of such results.
    """
    floats = [x for x in inputs if isinstance(x, ScaledValue)]
    size = math.prod(equation.out_avals[0].shape)
    if equation.name in REDUCTIONS:
        return bool(floats) and at_least(floats[0].data.size, size * FEW)
    arrays = [x for x in floats if x.constant_value is None]
    if equation.name not in RECOMPUTED or not arrays or not is_known(size):
        return False
    return all(x.is_statistic for x in arrays) and any(at_least(x.data.size, size) for x in arrays)


def _is_stable(equation: Equation, floats: Sequence[ScaledValue]) -> bool:
    if equation.name in STABLE:
        return not is_quantization(equation)
    # a sum may cancel, unless one addend is a constant, 1 - tanh(x), or all have one sign, x + x^3
    if equation.name == "add" and len(floats) == 2:
        return all(map(_odd, floats))
    return equation.name in ("add", "sub") and len(floats) == 1


def _odd(x: ScaledValue) -> bool:
    """Returns whether a value is its source times a factor that is never negative."""
    if x.lineage is None:
        return True
    equation = x.lineage.equation
    floats = [i for i in x.lineage.inputs if isinstance(i, ScaledValue)]
    arrays = [i for i in floats if i.constant_value is None]
    if len(arrays) != 1:
        return False
    match equation.name:
        case "integer_pow":
            kept = params.degree(equation) % 2 == 1
        case "mul":
            kept = all(i.constant_value > 0 for i in floats if i.constant_value is not None)
        case "convert_element_type":
            kept = True
        case name:
            kept = name in SAME_ORDER
    return kept and _odd(arrays[0])


FOR_SCALE, FOR_BACKWARD = 0, 1  # the purposes of a separate copy


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The policy for values of the forward pass that the backward pass reads: in which form each
    waits for it."""

    setup: Setup

    def _is_small(self, value: ScaledValue) -> bool:
        return value.is_statistic or not at_least(value.data.size, self.setup.recipe.min_size)

    def stays_wide(self, value: ScaledValue, fmt: Format | None) -> bool:
        if fmt is None or not value.is_computed:
            return True
        return self._is_small(value) or holds(value.data.dtype, fmt)

    def with_lineage(
        self, equation: Equation, inputs: Sequence[Value], result: ScaledValue
    ) -> ScaledValue:
        """Returns a result of the forward pass that knows how it is computed again."""
        how, statistic = self._lineage(equation, inputs, result), is_statistic(equation, inputs)
        if how is None and not statistic:
            return result
        return dataclasses.replace(result, lineage=how, is_statistic=statistic)

    def _lineage(
        self, equation: Equation, inputs: Sequence[Value], result: ScaledValue
    ) -> Lineage | None:
        """Returns how a result is computed again; None if it is stored, as small arrays are.

        A result that is stored unrounded isn't computed again from a source that would be rounded
        for it. A device that ``Recipe.narrow`` makes faster stores the source of a softmax or norm.
        """
        if equation.name not in RECOMPUTED or len(equation.out_avals) != 1:
            return None
        kept = functools.partial(self.stays_wide, fmt=self.setup.recipe.residuals)
        floats = [x for x in inputs if isinstance(x, ScaledValue) and x.constant_value is None]
        large = [x for x in floats if not self._is_small(x)]
        sources = (x if x.lineage is None else x.lineage.source for x in large)
        sources = {id(s): s for s in sources if s is not None}
        depth = 1 + max((x.lineage.depth for x in large if x.lineage), default=0)
        if len(sources) > 1 or depth > DEEPEST:
            return None
        source = next(iter(sources.values()), None)
        own = [x.lineage.normalises for x in floats if x.lineage]
        normalises = any(own) or any(x.is_statistic for x in floats)
        rounded = source is not None and not kept(source)
        rounded = rounded and not (normalises and self.setup.prefers_speed)
        if rounded and (kept(result) or not _is_stable(equation, floats)):
            return None
        costly = equation.name in COSTLY or any(x.lineage.costly for x in large if x.lineage)
        return Lineage(equation, tuple(inputs), source, costly, normalises, depth)

    def masked(self, value: Value) -> None:
        """Notes that an exponential reads a value, and the one that it is computed again from."""
        if isinstance(value, ScaledValue):
            source = None if value.lineage is None else value.lineage.source
            for x in filter(None, (value, source)):
                x.memo.in_exponential = True

    def read_late(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        """Returns an equation's operands as the backward pass reads them."""
        fmt = self.setup.overrides.find(equation, self.setup.recipe.residuals)
        fmt = fmt if isinstance(fmt, Format) else None
        late = [self.for_backward(x, fmt) for x in inputs]
        if self.setup.record is not None:
            for x in inputs:
                self._record(equation, x, fmt)
        return late

    def _record(self, equation: Equation, value: Value, fmt: Format | None) -> None:
        if not isinstance(value, ScaledValue) or not value.is_computed:
            return
        source = value if value.lineage is None else value.lineage.source or value
        narrow = [x for x in (value, source) if ("stored", fmt) in x.memo.made]
        stored = narrow[0] if narrow else source
        if not stored.memo.explained:
            stored.memo.explained = True
            self.setup.recorded("residual", equation, stored, fmt if narrow else None)

    def for_backward(self, value: Value, fmt: Format | None) -> Value:
        if not isinstance(value, ScaledValue) or not value.is_computed:
            return value
        how = value.lineage
        source = value if how is None else how.source
        if source is None or (source is value and self._is_small(value)):
            return value
        # the compiler chooses: it has kernels for a softmax or a norm, and products store operands
        chosen = value.memo.unrounded or (how is not None and how.normalises)
        if chosen and (
            self.setup.prefers_speed
            or (self.stays_wide(value, fmt) and self.stays_wide(source, fmt))
        ):
            return value
        if ("copy", fmt) in value.memo.made and not self.stays_wide(value, fmt):
            return load(self.stored(value, fmt))

        def copy() -> Copy:
            stored = self.stored(source, fmt)
            wide = stored is source
            return Copy(source, self._separate_copy(source, FOR_BACKWARD) if wide else load(stored))

        return source.memo.once(("again", fmt), copy).value(value, self._apply_rule)

    def _separate_copy(self, value: ScaledValue, purpose: int) -> ScaledValue:
        if value.base is None:
            data = separate_copy(value.data, purpose)
        else:  # a product is stored without its scales
            data = value.base.value(separate_copy(value.base.raw, purpose))
        return dataclasses.replace(value, data=data, lineage=None, base=None, memo=Memo())

    def _apply_rule(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        return RULES[equation.name].rule(self.setup.flight, equation, inputs)

    def measured(self, value: ScaledValue, *, arguments: bool = True) -> jax.Array:
        """Returns the value's numbers, to find a scale from: as a copy if that saves memory; or
        the largest alone, if it is known.

        A device reads an argument, or the source of a costly function, once to find the scale and
        once to round. Without the copy its compiler would store a wide result between the two.
        """
        source = value if value.lineage is None else value.lineage.source
        if value.memo.extreme is not None:
            return value.memo.extreme
        if source is None or not at_least(value.data.size, self.setup.recipe.min_size):
            return value.data
        costly = value.lineage is not None and value.lineage.costly
        if not costly and not (arguments and source.origin == "stored"):
            return value.data
        copy = lambda: Copy(source, self._separate_copy(source, FOR_SCALE))  # noqa: E731
        return source.memo.once("measured", copy).value(value, self._apply_rule).data

    def stored(self, value: ScaledValue, fmt: Format | None) -> ScaledValue | StoredValue:
        if fmt is None or self.stays_wide(value, fmt) or may_be_masked(value, fmt):
            return value
        return store_value(value, fmt)


def load(x: Value) -> Value:
    """Returns a stored value, a quantized argument or a deferred product as a
    :class:`ScaledValue`; others unchanged."""
    return x.load() if isinstance(x, StoredValue | DeferredProduct | QuantizedValue) else x


def load_product(x: Value) -> Value:
    return x.load() if isinstance(x, DeferredProduct) else x
