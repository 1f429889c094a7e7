"""The operands of contractions, rounded to the recipe's formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..formats import BlockFormat, Format
from ..interpret import Equation, RoundedOperand
from ..primitives import params
from ..rounding import encode
from ..scaled import (
    Amax,
    ScaledArray,
    Scaling,
    at_least,
    exponent_of,
    merge_blocks,
    power_of_two,
    quantize,
    quantize_measured,
    split_blocks,
)
from ._blocks import Blocks, in_blocks
from ._contraction_rules import contraction, features, grouped
from ._layout import loaded_after, stored_copy
from ._narrow import StoredValue, holds
from ._products import Operand, multiply, plain
from ._residuals import STORED, Residuals, load
from ._rules import RULES
from ._value import ScaledValue, leading, wide_dtype

NARROWED = "narrowed"  # key of a value's memo: a product of narrow operands has read it


@dataclasses.dataclass(frozen=True)
class OperandRounding(Residuals):
    """An interpretation that rounds the operands of contractions once, as the recipe says."""

    def operands(
        self, equation: Equation, values: Sequence[ScaledValue]
    ) -> tuple[tuple[Operand, Operand], Any]:
        """Returns a contraction's operands, rounded to the recipe's formats, and its exponent."""
        axes, formats = params.contracted_axes(equation), self.formats(equation, values)
        self.missing_units.check(equation, formats, self.device)
        if self.record is not None:
            pairs = zip(values, formats, strict=True)
            given = [value.data.dtype if fmt is None else fmt for value, fmt in pairs]
            self.record("contraction", equation, equation.out_avals[0].shape, given)
        made: dict[int, Operand] = {}
        for i in sorted(range(2), key=lambda i: _is_reread(values[i], equation)):
            other = _scales(made.get(1 - i))
            made[i] = self._operand(values[i], equation, formats[i], axes[i], i, other)
        a, b = made[0], made[1]
        return (a, b), values[0].exponent + values[1].exponent

    def formats(
        self, equation: Equation, values: Sequence[ScaledValue]
    ) -> list[Format | BlockFormat | None]:
        """Returns the formats to round a contraction's operands to; None: the flight dtype."""
        attention = _between_activations(equation, values)
        few = bool(self.recipe.storage) and not at_least(features(equation), self.recipe.features)
        chosen = []
        for value in values:
            backward = value.origin == "backward"
            fmt = self.recipe.backward if backward else self.recipe.forward
            element = fmt.element if isinstance(fmt, BlockFormat) else fmt
            if element is not None and (few or (attention and element.bits <= 8)):
                fmt = self.recipe.storage
            fmt = self.overrides.find(equation, fmt)
            as_it_is = isinstance(fmt, Format) and holds(value.data.dtype, fmt)
            chosen.append(None if as_it_is else fmt)
        if not attention:
            for value in values:
                value.memo[NARROWED] = True
        return chosen

    def _operand(
        self,
        value: ScaledValue,
        equation: Equation,
        fmt: Format | BlockFormat | None,
        contracted: tuple[int, ...],
        position: int,
        other: Any,
    ) -> Operand:
        """Returns one operand: its numbers, in a dtype that holds the format, and its scale.

        The scale is a power of two in the compute dtype; None for 1. An operand that the forward
        pass has stored is loaded after ``other``, the scales of the other operand, has been
        computed.
        """
        if fmt is None:
            value.memo[STORED] = True
            return value.data, None
        per_tensor = isinstance(fmt, Format) and self.recipe.per == "tensor"
        reread = _is_reread(value, equation)
        operand_id = f"{'.'.join(map(str, equation.order))}/{position}"
        if reread and not (per_tensor and self.recipe.scaling.reuses_copy):
            stored = self._stored(value, self.recipe.storage)
            value = load(loaded_after(stored, other) if isinstance(stored, StoredValue) else stored)
            reread = False
        copy = self._rounded(value, fmt, contracted, operand_id)
        if isinstance(copy, Blocks):
            return copy, None
        if not per_tensor:
            return Blocks(copy, fmt, value.data.dtype), None
        assert isinstance(copy.scale, jax.Array)
        data = copy.data if isinstance(copy.data, jax.Array) else copy.data.astype(jnp.float32)
        data = stored_copy(data)
        return loaded_after(data, other) if reread else data, copy.scale

    def product(
        self, equation: Equation, operands: Sequence[Operand], dtype: DTypeLike
    ) -> jax.Array:
        """Computes a contraction in ``dtype``; sums are accumulated in float32 at least."""
        return multiply(equation, operands, dtype, device=self.device).value()

    def _rounded(
        self,
        value: ScaledValue,
        fmt: Format | BlockFormat,
        contracted: tuple[int, ...],
        operand_id: str,
    ) -> ScaledArray | Blocks:
        """Returns a narrow copy of a value; the same copy for the same format, scaling and axes."""
        scaling, key = self.recipe.scaling, (fmt, contracted)
        if isinstance(fmt, Format) and self.recipe.per == "tensor":
            key = fmt
        if key not in value.memo:
            scaling = scaling.predicted(value.log2_std)
            if isinstance(fmt, BlockFormat):
                axis = max(contracted, default=value.data.ndim - 1)
                copy = in_blocks(value.data, fmt, scaling.of_blocks(), axis)
            elif self.recipe.per == "channel":
                kept = tuple(a for a in range(value.data.ndim) if a not in contracted)
                copy = quantize(value.data, fmt, scaling=scaling, axis=kept)
            else:
                copy = self.copied(value, fmt, scaling, operand_id)
            value.memo[key] = copy
        return value.memo[key]

    def copied(
        self, value: ScaledValue, fmt: Format, scaling: Scaling, operand_id: str
    ) -> ScaledArray:
        """Returns a narrow copy, with one scale, of the operand with this id."""
        return quantize_measured(value.data, self._measured(value), fmt, scaling)

    def rounded_operands(
        self, equation: Equation, inputs: Sequence[Any]
    ) -> Sequence[RoundedOperand]:
        if RULES[equation.name].rule not in (contraction, grouped):
            return ()
        values: list[ScaledValue] = [load(x) for x in inputs[:2]]
        formats, axes = self.formats(equation, values), params.contracted_axes(equation)
        operands, _ = self.operands(equation, values)
        found = []
        for value, operand, fmt, contracted in zip(values, operands, formats, axes, strict=True):
            if fmt is not None:
                ((rounded, scale),) = plain([operand], jnp.float32)
                exact, rounded = value.data.astype(jnp.float32), rounded.astype(jnp.float32)
                rounded = rounded if scale is None else rounded * leading(scale, rounded)
                largest = _largest(rounded, fmt, contracted, self.recipe.per)
                saturated = _saturated(exact, rounded, largest, fmt)
                found.append(RoundedOperand(exact, rounded, saturated))
        return found

    def to_send(self, value: ScaledValue, axis_name: Any, equation: Equation) -> ScaledArray | None:
        """Returns the narrow data that a collective sends, with all devices' scale, or None."""
        fmt = self.overrides.find(equation, self.recipe.collective)
        narrow = isinstance(fmt, Format) and not holds(value.data.dtype, fmt)
        self._recorded("collective", equation, value, fmt if narrow else None)
        if not narrow:
            return None
        x = value.data.astype(wide_dtype(value.data.dtype))
        scale, _ = Amax().scale(x, fmt, range(x.ndim))
        scale = lax.pmax(scale, axis_name)
        return ScaledArray(encode(x * (1 / scale), fmt), scale)


def _largest(
    rounded: jax.Array, fmt: Format | BlockFormat, contracted: tuple[int, ...], per: str
) -> jax.Array:
    """Returns for each number the largest magnitude with the same scale."""
    size = jnp.abs(rounded)
    if isinstance(fmt, BlockFormat):
        axis = max(contracted, default=rounded.ndim - 1)
        blocks = split_blocks(size, fmt.size, axis)
        largest = jnp.max(blocks, axis + 1, keepdims=True)
        return merge_blocks(jnp.broadcast_to(largest, blocks.shape), size.shape, axis)
    return jnp.max(size, contracted if per == "channel" else None, keepdims=True)


def _saturated(
    exact: jax.Array, rounded: jax.Array, largest: jax.Array, fmt: Format | BlockFormat
) -> jax.Array:
    """Returns whether numbers were cut off: rounded down by more than half a unit, to the largest.

    The unit is the larger of the number's own, for scales that are powers of two, and of the
    format's maximum, for others.
    """
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    unit = 2.0 ** (element.max_exponent - element.mantissa_bits)
    size = jnp.abs(rounded)
    own = power_of_two(exponent_of(size), size.dtype) * np.float32(element.eps)
    half = jnp.maximum(own, size * np.float32(unit / float(element.max))) / 2
    return (size == largest) & (jnp.abs(exact) - size > half)


def _is_reread(value: ScaledValue, equation: Equation) -> bool:
    """Returns whether a backward product reads a value of the forward pass."""
    return equation.direction == "backward" and value.origin == "forward"


def _scales(operand: Operand | None) -> Any:
    """Returns the scales of an operand, or its numbers if it has none; None for no operand."""
    if operand is None:
        return None
    numbers, scale = operand
    if isinstance(numbers, Blocks):
        return numbers.copy.scale if numbers.source is None else numbers.source
    return numbers if scale is None else scale


def _between_activations(equation: Equation, values: Sequence[ScaledValue]) -> bool:
    """Returns whether a product multiplies two computed arrays slice by slice, as attention does.

    Its operands are not arguments, and it has batch axes. A backward product counts if the forward
    product did; otherwise the forward product has rounded the operand that both share.
    """
    if equation.name != "dot_general" or not params.dot_dimensions(equation)[1][0]:
        return False
    if any(x.origin == "stored" for x in values):
        return False
    return equation.direction != "backward" or not any(map(is_narrowed, values))


def is_narrowed(value: ScaledValue) -> bool:
    """Returns whether a product of narrow operands has read the value."""
    return value.narrowed or NARROWED in value.memo
