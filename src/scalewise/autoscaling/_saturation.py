"""Counts the operands' numbers that a rounding has cut off."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import BlockFormat
from ..interpret import RoundedOperand
from ..scaled import exponent_of, power_of_two
from ..scaled._blocks import over_tiles
from ._blocks import Factor
from ._operand_settings import Operand
from ._products import plain
from ._value import ScaledValue, leading


def block_axis(setting: Operand, contracted: tuple[int, ...], ndim: int) -> int:
    return contracted[-1] if setting.hadamard > 1 else max(contracted, default=ndim - 1)


def rounded_operand(
    value: ScaledValue, operand: Factor, setting: Operand, contracted: tuple[int, ...]
) -> RoundedOperand:
    ((rounded, scale),) = plain([operand], jnp.float32)
    exact, rounded = value.data.astype(jnp.float32), rounded.astype(jnp.float32)
    own = 1.0 if scale is None else leading(scale, rounded)
    rounded = rounded if scale is None else rounded * own
    largest = _largest_beside(rounded, setting, contracted)
    saturated = _is_saturated(exact, rounded, largest, setting)
    limit = float(setting.element.max) * own if setting.scaling.source == "shapes" else math.inf
    return RoundedOperand(exact, rounded, saturated, limit)


def _largest_beside(rounded: jax.Array, setting: Operand, contracted: tuple[int, ...]) -> jax.Array:
    """Returns for each number the largest magnitude with the same scale."""
    size, fmt = jnp.abs(rounded), setting.format
    largest = partial(jnp.max, initial=0.0)  # of no numbers, too
    if not isinstance(fmt, BlockFormat):
        return largest(size, contracted if setting.per == "channel" else None, keepdims=True)
    kept = [a for a in range(size.ndim) if a not in contracted][-1:]
    spans = [(block_axis(setting, contracted, size.ndim), fmt.size)]
    spans += [(a, setting.tile) for a in kept if setting.tile > 1]
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
    element = setting.element
    unit = 2.0 ** (element.max_exponent - element.mantissa_bits)
    size = jnp.abs(rounded)
    own = power_of_two(exponent_of(size), size.dtype) * np.float32(element.eps)
    most = jnp.maximum(own, size * np.float32(unit / float(element.max)))
    if setting.rounding.startswith("nearest"):
        most = most / 2
    return (size == largest) & (jnp.abs(exact) - size > most)
