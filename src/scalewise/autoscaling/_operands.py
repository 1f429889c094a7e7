"""The operands of contractions, rounded to the recipe's formats."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._types import PyTree
from ..formats import BlockFormat, Format
from ..interpret import Equation, RoundedOperand, Value
from ..primitives import params
from ..scaled import (
    Amax,
    ScaledArray,
    Scaling,
    amax,
    at_least,
    exponent_of,
    over_tiles,
    power_of_two,
    quantize,
)
from ..scalifying import (
    MULTIPLIES,
    Exponent,
    Memo,
    ScaledValue,
    features,
    leading,
    mixes_freely,
    wide_dtype,
    with_integers,
)
from ._blocks import Blocks, Factor, in_blocks
from ._history import OperandAmaxes
from ._keys import hadamard_signs, hadamard_transform, operand_key, place_of
from ._layout import loaded_after, narrow_copy, stored_copy
from ._operand_settings import GRADIENT, Operand, Role
from ._predict import between_activations, is_reread, role_of, role_read_later
from ._products import DeferredProduct, is_narrow, multiply, plain
from ._quantized import QuantizedOperand, QuantizedValue
from ._residuals import Residuals, before_cast, load
from ._setup import Setup
from ._units import reason_to_leave, warn_of_missing
from ._value import StoredValue, holds


@dataclasses.dataclass(frozen=True)
class Operands:
    """The policy for operands of contractions: each is rounded once, as the recipe says.

    Attributes:
        setup: with the recipe.
        key: of the program, for random roundings and signs; None for the key of seed 0.
        amaxes: of delayed scaling; None for scales of other strategies.
    """

    setup: Setup
    key: jax.Array | None = None
    amaxes: OperandAmaxes | None = dataclasses.field(default=None, compare=False)

    @functools.cached_property
    def residuals(self) -> Residuals:
        return Residuals(self.setup)

    def multiply(
        self, equation: Equation, values: Sequence[ScaledValue]
    ) -> ScaledValue | DeferredProduct:
        """Returns a contraction of two values, whose operands are rounded."""
        dtype = self.setup.flight(equation.out_avals[0])
        operands, exponent = self.operands(equation, values)
        device, units = self.setup.device, self.setup.recipe.emulate
        if equation.name == "dot_general" and any(map(is_narrow, operands)):
            return DeferredProduct(equation, operands, dtype, exponent, device=device, units=units)
        stored = isinstance(values[1], QuantizedOperand)
        product = multiply(equation, operands, dtype, device, units, stored)
        return ScaledValue(product.value(), exponent)

    def operands(
        self, equation: Equation, values: Sequence[ScaledValue]
    ) -> tuple[tuple[Factor, Factor], Exponent]:
        axes, wanted = params.contracted_axes(equation), self.settings(equation, values)
        settings, why = self.faster(equation, values, wanted, axes)
        known, given = _narrowed(values, settings), _narrowed(values, wanted)
        formats, told = [x and x.format for x in given], self.setup.without_units
        warn_of_missing(equation, formats, self.setup.device, told)
        if self.setup.record is not None:
            formats = [v.data.dtype if x is None else x for v, x in zip(values, known, strict=True)]
            self.setup.record("contraction", equation, equation.out_avals[0].shape, formats, why)
        exponent = values[0].exponent + values[1].exponent
        values, axes = self.transformed(equation, values, settings, axes)
        made: dict[int, Factor] = {}
        for i in sorted(range(2), key=lambda i: is_reread(values[i], equation)):
            other = _scales(made.get(1 - i))
            made[i] = self._operand(values[i], equation, settings[i], axes[i], i, other)
        operands = made[0], made[1]
        if any(isinstance(value, QuantizedOperand) for value in values):
            # XLA on a GPU joins products that have an operand in common: it would write the weights
            # of an attention's queries, keys and values side by side in each call
            operands = lax.optimization_barrier(operands)
        return operands, exponent

    def faster(
        self,
        equation: Equation,
        values: Sequence[ScaledValue],
        settings: list[Operand | None],
        axes: params.AxisPair,
    ) -> tuple[list[Operand | None], str | None]:
        """Returns the settings, or None for both and why ``Recipe.narrow`` leaves them alone."""
        device = self.setup.device
        if device is None or not self.setup.prefers_speed or not any(settings):
            return settings, None
        narrow = _narrowed(values, settings)
        own = zip(values, settings, axes, strict=True)
        made = [s is not None and self._purpose(s, a) in v.memo.made for v, s, a in own]
        why = reason_to_leave(equation, values, narrow, made, device)
        return ([None, None], why) if why else (settings, None)

    def multiplied(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        if equation.name not in MULTIPLIES:
            return list(inputs)
        kept = self.setup.overrides.find(equation, self) is not self
        return [x.as_operand() if isinstance(x, QuantizedValue) and not kept else x for x in inputs]

    def settings(self, equation: Equation, values: Sequence[ScaledValue]) -> list[Operand | None]:
        """Returns how to round a contraction's operands; None leaves the flight dtype."""
        attention = between_activations(equation, values)
        few, kept = self._has_few_features(equation), self.setup.overrides.setting(equation)
        products = kept or self.setup.recipe.products
        rule = self.setup.recipe.attention if attention and kept is None else None
        if rule and not rule.gradients and any(x.origin == "backward" for x in values):
            rule = None
        unset = attention and rule is None
        if rule is not None:
            wanted = [rule.operand(value.origin, role_of(value)) for value in values]
        elif kept is None and products.short_form is not None:
            x, gradient = products.operand("forward", "weight"), products.operand(*GRADIENT)
            wanted = [gradient if value.origin == "backward" else x for value in values]
        else:
            wanted = [products.operand(*use) for use in self.uses(equation, values, attention)]
        chosen: list[Operand | None] = []
        for value, own in zip(values, wanted, strict=True):
            fmt = None if own is None else own.format
            narrow = own is not None and own.format.element.bits <= 8
            if own is not None and kept is None and (few or (unset and narrow)):
                fmt = self.setup.recipe.residuals
            fmt = self.setup.overrides.find(equation, fmt)
            held = isinstance(fmt, Format) and holds(value.data.dtype, fmt)
            if fmt is None or held or value.integers or isinstance(value, QuantizedOperand):
                chosen.append(None)
            elif own is not None and fmt == own.format:
                chosen.append(own)
            else:
                chosen.append(self.setup.recipe.setting(fmt))
        both = len({x.hadamard if x else 0 for x in chosen}) == 1
        if not both or not mixes_freely(equation):
            chosen = [x and dataclasses.replace(x, hadamard=0) for x in chosen]
        if not attention:
            for value in values:
                value.memo.narrowed = True
        return chosen

    def _has_few_features(self, equation: Equation) -> bool:
        recipe = self.setup.recipe
        return bool(recipe.residuals) and not at_least(features(equation), recipe.features)

    def uses(
        self, equation: Equation, values: Sequence[ScaledValue], attention: bool
    ) -> list[tuple[str, Role]]:
        """Returns the product that a contraction is, a field's name, and its operands' roles."""
        carries = [value.origin == "backward" for value in values]
        if equation.direction != "backward" or not any(carries):
            left, right = (value.origin == "stored" for value in values)
            found: list[Role] = ["activation", "activation" if attention else "weight"]
            found = found[::-1] if left and not right else found
            for value, role in zip(values, found, strict=True):
                value.memo.role = value.memo.role or role
            return [("forward", role) for role in found]
        others = [v for v, backward in zip(values, carries, strict=True) if not backward]
        known: list[Role] = [role_read_later(value) for value in others]
        product = "input_gradient" if known == ["weight"] else "weight_gradient"
        return [(product, "gradient" if backward else known[0]) for backward in carries]

    def transformed(
        self,
        equation: Equation,
        values: Sequence[ScaledValue],
        settings: Sequence[Operand | None],
        axes: params.AxisPair,
    ) -> tuple[list[ScaledValue], params.AxisPair]:
        """Returns the values that are rounded next and their contracted axes, the blocks' last."""
        values, first = self._from_forward(equation, values), settings[0]
        if first is None or first.hadamard < 2:
            return list(values), axes
        last = axes[0].index(max(axes[0]))
        left, right = ((*own[:last], *own[last + 1 :], own[last]) for own in axes)
        axes = left, right
        key = None
        if first.signs == "random":
            key = operand_key(self.key, f"{place_of(equation)}/signs", *[x.data for x in values])
        signs = hadamard_signs(first.hadamard, key)
        done = []
        for value, own in zip(values, axes, strict=True):
            reread = is_reread(value, equation)
            purpose = "changed", "hadamard", first.hadamard, own[-1], reread
            if key is not None:
                value.memo.made.pop(purpose, None)

            def transform(x: ScaledValue, axis: int = own[-1]) -> jax.Array:
                return hadamard_transform(x.data, axis, signs).astype(x.data.dtype)

            done.append(self._changed(value, purpose, reread, transform, signs))
        return done, axes

    def _from_forward(
        self, equation: Equation, values: Sequence[ScaledValue]
    ) -> Sequence[ScaledValue]:
        """The axes that the forward product has contracted are those that this one keeps."""
        products = self.setup.overrides.setting(equation) or self.setup.recipe.products
        carries = [v.origin == "backward" for v in values]
        if products.backward_from == "original" or sum(carries) != 1:
            return values
        kept = self.setup.overrides.find(equation, self) is not self
        if equation.name != "dot_general" or kept or self._has_few_features(equation):
            return values
        i = carries.index(False)
        if isinstance(values[i], QuantizedOperand) or between_activations(equation, values):
            return values
        value, reread = values[i], is_reread(values[i], equation)
        role = role_read_later(value)
        setting = products.operand("forward", role)
        used = [a for axes in params.dot_dimensions(equation) for a in axes[i]]
        contracted = tuple(a for a in range(value.data.ndim) if a not in used)
        if setting is None or not contracted or value.integers:
            return values
        purpose = "changed", "forward", setting, contracted, reread
        batch = batch_axes(equation, i, setting)
        numbers = functools.partial(
            self.numbers, setting=setting, contracted=contracted, batch=batch
        )
        made = self._changed(value, purpose, reread, numbers)
        made = dataclasses.replace(made, role=role)
        return [made, values[1]] if i == 0 else [values[0], made]

    def _changed(
        self,
        value: ScaledValue,
        purpose: Hashable,
        reread: bool,
        change: Callable[[ScaledValue], jax.Array],
        signs: jax.Array | None = None,
    ) -> ScaledValue:
        def changed() -> ScaledValue:
            x = load(self.residuals.stored(value, self.setup.recipe.residuals)) if reread else value
            origin = "residual" if reread else x.origin
            memo = Memo(untransformed=None if signs is None else (x.data, signs))
            fields = {"lineage": None, "base": None, "memo": memo, "constant_value": None}
            return dataclasses.replace(x, data=change(x), origin=origin, **fields)

        return value.memo.once(purpose, changed)

    def numbers(
        self,
        value: ScaledValue,
        setting: Operand,
        contracted: tuple[int, ...],
        batch: tuple[int, ...] = (),
    ) -> jax.Array:
        x, axis = value.data, contracted[-1]
        signs = hadamard_signs(setting.hadamard, None)
        if setting.hadamard > 1:
            data = hadamard_transform(x, axis, signs).astype(x.dtype)
            value = dataclasses.replace(value, data=data, memo=Memo())
        copy = self.rounded(value, setting, contracted, "forward", batch)
        if not isinstance(copy, Blocks):
            copy = Blocks(copy, setting.format, x.dtype)
        data = copy.value(wide_dtype(x.dtype))
        if setting.hadamard > 1:
            data = hadamard_transform(data, axis, signs, inverse=True)
            data = lax.slice_in_dim(data, 0, x.shape[axis], axis=axis)
        return data.astype(x.dtype)

    def _operand(
        self,
        value: ScaledValue,
        equation: Equation,
        setting: Operand | None,
        contracted: tuple[int, ...],
        position: int,
        other: jax.Array | None,
    ) -> Factor:
        """Returns one operand: its numbers, in a dtype that holds the format, and its scale; None
        for 1.

        One that the forward pass has stored is loaded after the other's scales have been
        computed.
        """
        if isinstance(value, QuantizedOperand):
            return value.quantized.factor(equation, contracted)
        if setting is None:
            value.memo.unrounded = True
            return value.data, None
        reread = is_reread(value, equation)
        operand_id = f"{place_of(equation)}/{position}"
        # the copy that the forward product has made, where the backward one may multiply it
        reused = setting.per_tensor and setting.scaling.reuses_copy
        reused = reused and (
            self.setup.recipe.products.short_form is not None
            or self._purpose(setting, ()) in value.memo.made
        )
        if reread and not reused:
            stored = self.residuals.stored(value, self.setup.recipe.residuals)
            if isinstance(stored, StoredValue):
                scale = loaded_after(stored.scale, other)
                stored = dataclasses.replace(stored, scale=scale)
            value = load(stored)
            reread = False
        batch = batch_axes(equation, position, setting)
        copy = self.rounded(value, setting, contracted, operand_id, batch)
        if isinstance(copy, Blocks):
            return copy, None
        if not setting.per_tensor:
            if setting.per == "channel" and equation.name == "dot_general":
                assert isinstance(copy.scale, jax.Array)
                assert isinstance(copy.data, jax.Array)
                return copy.data, copy.scale
            return Blocks(copy, setting.format, value.data.dtype), None
        assert isinstance(copy.scale, jax.Array)
        data = copy.data if isinstance(copy.data, jax.Array) else copy.data.astype(jnp.float32)
        data = stored_copy(data)
        return data, loaded_after(copy.scale, other) if reread else copy.scale

    def rounded(
        self,
        value: ScaledValue,
        setting: Operand,
        contracted: tuple[int, ...],
        operand_id: str,
        batch: tuple[int, ...] = (),
    ) -> ScaledArray | Blocks:
        """Returns the narrow copy for a setting and axes; random ones are made for each operand."""
        purpose = self._purpose(setting, contracted)
        purpose = (purpose, batch) if batch else purpose
        if setting.rounding != "nearest_even" or setting.draws:
            purpose = purpose, operand_id
        if purpose in value.memo.made and self.amaxes is not None:
            # so that the ids don't depend on which operands are one array
            self.amaxes.record(operand_id, self._largest(value))
        make = functools.partial(self._copy, value, setting, contracted, operand_id, batch)
        return value.memo.once(purpose, make)

    def _purpose(self, setting: Operand, contracted: tuple[int, ...]) -> Hashable:
        # the copy of a short form is also the one that waits for the backward pass
        if setting != self.setup.recipe.setting(setting.format):
            return "copy", setting, contracted
        return ("copy", setting.format, *(() if setting.per_tensor else (contracted,)))

    def _copy(
        self,
        value: ScaledValue,
        setting: Operand,
        contracted: tuple[int, ...],
        operand_id: str,
        batch: tuple[int, ...],
    ) -> ScaledArray | Blocks:
        fmt, rounding = setting.format, setting.rounding
        scaling, x = setting.scaling.predicted(value.log2_std), value.data
        wide, signs = value.memo.untransformed or (before_cast(value), None)
        source = x if wide is None or signs is None else wide
        key = operand_key(self.key, operand_id, source) if setting.draws else None
        kept = tuple(a for a in range(x.ndim) if a not in contracted)
        if isinstance(fmt, BlockFormat):
            axis = _block_axis(setting, contracted, x.ndim)
            rows = _rows(x.shape, contracted, batch)
            tile = (rows[-1], setting.tile) if setting.tile > 1 and rows else None
            known = self.setup.device, wide, signs
            return in_blocks(x, fmt, scaling.of_blocks(), axis, rounding, tile, key, *known)
        if setting.per == "channel":
            return quantize(x, fmt, scaling=scaling, axis=kept, rounding=rounding, key=key)
        if rounding == "nearest_even":
            return self.copied(value, fmt, scaling, operand_id)
        return quantize(x, fmt, scaling=scaling, rounding=rounding, key=key)

    def copied(
        self, value: ScaledValue, fmt: Format, scaling: Scaling, operand_id: str
    ) -> ScaledArray:
        if self.amaxes is None or scaling.source == "shapes":
            known = isinstance(scaling, Amax) or value.memo.extreme is None
            measured = self.residuals.measured(value) if known else value.data
            return narrow_copy(value.data, measured, fmt, scaling)
        largest = self._largest(value)
        self.amaxes.record(operand_id, largest)
        scaling = self.amaxes.strategy(operand_id, largest, scaling)
        return narrow_copy(value.data, value.data, fmt, scaling)

    def rounded_operands(
        self, equation: Equation, inputs: Sequence[Value]
    ) -> Sequence[RoundedOperand]:
        if equation.name not in MULTIPLIES:
            return ()
        multiplied = with_integers(equation, self.multiplied(equation, inputs[:2]))
        values: list[ScaledValue] = [load(x) for x in multiplied]
        if not all(isinstance(x, ScaledValue) for x in values):
            return ()  # integers alone, or complex numbers
        settings, axes = self.settings(equation, values), params.contracted_axes(equation)
        settings, _ = self.faster(equation, values, settings, axes)
        operands, _ = self.operands(equation, values)
        given, axes = self.transformed(equation, values, settings, axes)
        rounded = zip(given, operands, settings, axes, strict=True)
        return [
            _rounded_operand(x, y, s, a, batch_axes(equation, i, s))
            for i, (x, y, s, a) in enumerate(rounded)
            if s is not None
        ]

    def _largest(self, value: ScaledValue) -> jax.Array:
        def largest() -> jax.Array:
            measured = self.residuals.measured(value, arguments=False).astype(jnp.float32)
            return amax(measured, range(measured.ndim), False)

        return value.memo.once("largest", largest)

    def magnitudes(self, inputs: Sequence[Value]) -> jax.Array:
        return jnp.stack([self._largest(load(x)) for x in inputs[:2]])


def batch_axes(equation: Equation, position: int, setting: Operand) -> tuple[int, ...]:
    """Returns an operand's batch axes, along which no tile lies; () for a setting without tiles."""
    if setting.tile == 1 or equation.name != "dot_general":
        return ()
    return params.dot_dimensions(equation)[1][position]


def _narrowed(
    values: Sequence[ScaledValue], settings: Sequence[Operand | None]
) -> list[Operand | QuantizedValue | None]:
    pairs = zip(values, settings, strict=True)
    return [v.quantized if isinstance(v, QuantizedOperand) else s for v, s in pairs]


def _scales(operand: Factor | None) -> PyTree:
    if operand is None:
        return None
    numbers, scale = operand
    if isinstance(numbers, Blocks):
        copied = numbers.copy.scale
        copied = copied.data if isinstance(copied, ScaledArray) else copied  # of two levels
        return copied if numbers.source is None else numbers.source
    return numbers if scale is None else scale


def _block_axis(setting: Operand, contracted: tuple[int, ...], ndim: int) -> int:
    return contracted[-1] if setting.hadamard > 1 else max(contracted, default=ndim - 1)


def _rows(shape: tuple[int, ...], contracted: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    """Returns the axes of which the last has the rows of a tile."""
    kept = [a for a in range(len(shape)) if a not in contracted]
    return [a for a in kept if a not in batch and shape[a] != 1] or kept


def _rounded_operand(
    value: ScaledValue,
    operand: Factor,
    setting: Operand,
    contracted: tuple[int, ...],
    batch: tuple[int, ...],
) -> RoundedOperand:
    ((rounded, scale),) = plain([operand], jnp.float32)
    exact, rounded = value.data.astype(jnp.float32), rounded.astype(jnp.float32)
    own = 1.0 if scale is None else leading(scale, rounded)
    rounded = rounded if scale is None else rounded * own
    largest = _largest_beside(rounded, setting, contracted, batch)
    saturated = _is_saturated(exact, rounded, largest, setting)
    top = float(setting.format.element.max)
    limit = top * own if setting.scaling.source == "shapes" else math.inf
    return RoundedOperand(exact, rounded, saturated, limit)


def _largest_beside(
    rounded: jax.Array, setting: Operand, contracted: tuple[int, ...], batch: tuple[int, ...]
) -> jax.Array:
    """Returns for each number the largest magnitude with the same scale."""
    size, fmt = jnp.abs(rounded), setting.format
    largest = functools.partial(jnp.max, initial=0.0)  # of no numbers, too
    if not isinstance(fmt, BlockFormat):
        return largest(size, contracted if setting.per == "channel" else None, keepdims=True)
    spans = [(_block_axis(setting, contracted, size.ndim), fmt.size)]
    rows = _rows(size.shape, contracted, batch)[-1:]
    spans += [(a, setting.tile) for a in rows if setting.tile > 1]
    for span in spans:
        size = over_tiles(largest, size, span)
    return size


def _is_saturated(
    exact: jax.Array, rounded: jax.Array, largest: jax.Array, setting: Operand
) -> jax.Array:
    """Returns whether numbers were cut off: rounded down by more than half a unit, to the largest.

    By more than a unit if they aren't rounded to nearest. The unit is the larger of the number's
    own, for scales that are powers of two, and of the format's maximum, for others.
    """
    element = setting.format.element
    unit = 2.0 ** (element.max_exponent - element.mantissa_bits)
    size = jnp.abs(rounded)
    own = power_of_two(exponent_of(size), size.dtype) * np.float32(element.eps)
    most = jnp.maximum(own, size * np.float32(unit / float(element.max)))
    if setting.rounding.startswith("nearest"):
        most = most / 2
    return (size == largest) & (jnp.abs(exact) - size > most)
