"""The values that the backward pass reads: kept, stored narrow, or computed again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._jax import ShapedArray
from ..devices import Device, MatrixUnits, device_for
from ..formats import Format
from ..interpret import Equation, Value
from ..scaled import at_least
from ._families import RuleContext
from ._layout import separate_copy
from ._narrow import holds, store_value
from ._overrides import FormatOverrides
from ._products import DeferredProduct
from ._quantized import QuantizedValue
from ._recipe import Recipe
from ._rules import RULES
from ._units import MissingUnits
from ._value import Copy, Memo, ScaledValue, StoredValue, wide_dtype

FOR_SCALE, FOR_BACKWARD = 0, 1  # the purposes of a separate copy


@dataclasses.dataclass(frozen=True)
class Residuals(RuleContext):
    """An interpretation that decides in which form a value waits for the backward pass.

    Attributes:
        recipe: the formats.
        traced: an argument came with an integer exponent, so exponents are numbers at run time.
        overrides: the recipe's ``keep``, and what of it has been met.
        record: called with each decision on a format, by ``explain``; see ``_explain._Recorder``.
        missing_units: what has been said of formats that the device's units don't multiply.
    """

    recipe: Recipe
    traced: bool = False
    overrides: FormatOverrides = dataclasses.field(default_factory=lambda: FormatOverrides(()))
    record: Callable[..., None] | None = None
    missing_units: MissingUnits = dataclasses.field(default_factory=MissingUnits)

    @property
    def device(self) -> Device | None:
        return device_for(self.recipe.device)

    @property
    def units(self) -> MatrixUnits | None:
        return self.recipe.emulate

    @property
    def prefers_speed(self) -> bool:
        device = self.device
        known = device is not None and device.platform != "cpu" and device.bandwidth > 0
        return known and self.recipe.narrow == "faster"

    def flight_dtype(self, aval: ShapedArray) -> DTypeLike:
        kept = self.recipe.flight == "program" and not self.traced
        return aval.dtype if kept and aval.dtype == jnp.bfloat16 else wide_dtype(aval.dtype)

    def _recorded(self, kind: str, equation: Equation, value: Value, fmt: Format | None) -> None:
        if self.record is not None and getattr(value, "constant_value", None) is None:
            self.record(kind, equation, value.data.shape, [fmt or value.data.dtype])

    def _is_small(self, value: ScaledValue) -> bool:
        return value.is_statistic or not at_least(value.data.size, self.recipe.min_size)

    def _stays_wide(self, value: ScaledValue, fmt: Format | None) -> bool:
        if fmt is None or not value.is_computed:
            return True
        return self._is_small(value) or holds(value.data.dtype, fmt)

    def _for_backward(self, value: Value, fmt: Format | None) -> Value:
        if not isinstance(value, ScaledValue) or not value.is_computed:
            return value
        how = value.lineage
        source = value if how is None else how.source
        if source is None or (source is value and self._is_small(value)):
            return value
        # the compiler chooses: it has kernels for a softmax or a norm, and products store operands
        chosen = value.memo.unrounded or (how is not None and how.normalises)
        if chosen and (
            self.prefers_speed or (self._stays_wide(value, fmt) and self._stays_wide(source, fmt))
        ):
            return value
        if fmt in value.memo.copies and not self._stays_wide(value, fmt):
            return load(self._stored(value, fmt))
        if fmt not in source.memo.again:
            if self._stays_wide(source, fmt):
                copy = self._separate_copy(source, FOR_BACKWARD)
            else:
                copy = load(self._stored(source, fmt))
            source.memo.again[fmt] = Copy(source, copy)
        return source.memo.again[fmt].value(value, self._apply_rule)

    def _separate_copy(self, value: ScaledValue, purpose: int) -> ScaledValue:
        if value.base is None:
            data = separate_copy(value.data, purpose)
        else:  # a product is stored without its scales
            data = value.base.value(separate_copy(value.base.raw, purpose))
        return dataclasses.replace(value, data=data, lineage=None, base=None, memo=Memo())

    def _apply_rule(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        return RULES[equation.name].rule(self, equation, inputs)

    def _measured(self, value: ScaledValue, *, arguments: bool = True) -> jax.Array:
        """Returns the value's numbers, to find a scale from: as a copy if that saves memory; or
        the largest alone, if it is known.

        A device reads an argument, or the source of a costly function, once to find the scale and
        once to round. Without the copy its compiler would store a wide result between the two.
        """
        source = value if value.lineage is None else value.lineage.source
        if value.memo.extreme is not None:
            return value.memo.extreme
        if source is None or not at_least(value.data.size, self.recipe.min_size):
            return value.data
        costly = value.lineage is not None and value.lineage.costly
        if not costly and not (arguments and source.origin == "stored"):
            return value.data
        if source.memo.measured is None:
            source.memo.measured = Copy(source, self._separate_copy(source, FOR_SCALE))
        return source.memo.measured.value(value, self._apply_rule).data

    def _stored(self, value: ScaledValue, fmt: Format | None) -> ScaledValue | StoredValue:
        return value if fmt is None or self._stays_wide(value, fmt) else store_value(value, fmt)


def load(x: Value) -> Value:
    """Returns a stored value, a quantized argument or a deferred product as a
    :class:`ScaledValue`; others unchanged."""
    return x.load() if isinstance(x, StoredValue | DeferredProduct | QuantizedValue) else x


def load_product(x: Value) -> Value:
    return x.load() if isinstance(x, DeferredProduct) else x
