"""Operands of one exponent, for the operations of ``store="every_op"`` that mix elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..scaled import power_of_two
from ._families import INFINITE
from ._search import HIGHEST, LOWEST, TOP, clipped
from ._value import ScaledValue

MASK = 20  # log2 of what is meant as "minus infinity" when somebody writes -1e9


def aligned(inputs: Sequence[Any], limit: int) -> tuple[list[Any], Any]:
    """Float operands brought to one exponent, which is returned and taken off them.

    A constant counts like any other operand, lest its data overflow. One that is meant as an
    infinity (a mask) only asks to be far away: the others keep what they have above 2^-20. So do
    arrays made of constants and integers alone, as a mask that is added is.

    Args:
        inputs: values with wide data; what isn't a value stays.
        limit: a constant's data are brought below ``2**limit``.

    Returns:
        The operands, their exponents 0; and the exponent, None without a float operand.
    """
    floats = [x for x in inputs if isinstance(x, ScaledValue)]
    if not floats:
        return list(inputs), None
    wanted = [_wanted(x, limit) for x in floats]
    known = [e for e in wanted if isinstance(e, int)]
    common: Any = max(known, default=None)
    for exponent in wanted:
        if exponent is not None and not isinstance(exponent, int):
            common = exponent if common is None else lax.max(jnp.int32(common), exponent)
    common = 0 if common is None else common
    return [_down_to(x, common) if isinstance(x, ScaledValue) else x for x in inputs], common


def _wanted(x: ScaledValue, limit: int) -> Any:
    """The exponent that an operand asks for: an integer, an int32 array or None."""
    if x.constant_value is not None:
        return wanted_by_constant(x.constant_value, limit)
    if isinstance(x.exponent, int):
        return x.exponent
    exponent = jnp.int32(x.exponent)
    return lax.min(exponent, np.int32(MASK - TOP)) if may_be_mask(x) else exponent


def may_be_mask(x: ScaledValue) -> bool:
    """Whether an operand is an array made of constants and integers, which may be a mask."""
    return getattr(x, "independent", False)


def wanted_by_constant(constant_value: float, limit: int) -> int | None:
    """The exponent at which a constant's data are below ``2**limit``; for a mask, at the end."""
    if not constant_value or not math.isfinite(constant_value):
        return None
    exponent = math.frexp(constant_value)[1]
    return MASK - TOP if exponent > MASK else exponent - limit


def finite_factor(x: Any) -> Any:
    """A factor that is meant as an infinity (``(1 - mask) * finfo.min``) as one of 2^MASK.

    What it is added to has to keep something at the scale of their sum.
    """
    if (
        not isinstance(x, ScaledValue)
        or x.constant_value is None
        or not math.isfinite(x.constant_value)
    ):
        return x
    if abs(x.constant_value) < 2.0 ** (1016 if x.data.dtype == jnp.float64 else INFINITE):
        return x
    far = math.copysign(2.0**MASK, x.constant_value)
    return ScaledValue(jnp.full_like(x.data, math.copysign(0.5, far)), MASK + 1, constant_value=far)


def _down_to(x: ScaledValue, common: Any) -> ScaledValue:
    """``x.data`` at an exponent that isn't lower than its own; taken off it.

    Below 2^-126 of the other operand there is nothing to keep, and nothing is kept: what was left
    would pass for a number. A mask is held at the format's ends.
    """
    down, least = x.exponent - common, x.data.dtype.type(2.0**-126)
    if isinstance(down, int):
        factor: Any = x.data.dtype.type(2.0 ** max(-126, min(126, down)))
        data = x.data * factor * least if down < -126 else x.data * factor
    else:
        factor = power_of_two(lax.clamp(LOWEST, down, HIGHEST)).astype(x.data.dtype)
        rest = lax.select(down < -126, least, x.data.dtype.type(1))
        data = x.data * factor * rest  # an infinity times zero would be NaN
    if may_be_mask(x) or (x.constant_value is not None and abs(x.constant_value) >= 2.0**MASK):
        data = clipped(data, 2.0**TOP)
    return ScaledValue(data, 0)
