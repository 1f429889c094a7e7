"""Brings operands to one exponent, for operations of ``rounds="every_op"`` that mix elements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..interpret import Value
from ..scaled import HIGHEST, LOWEST, ZERO_EXPONENT, power_of_two
from ._families import INFINITE
from ._search import TOP, clipped
from ._value import Exponent, ScaledValue

MASK = 20  # log2 of the least constant that is taken for a mask, such as -1e9


def aligned(inputs: Sequence[Value], limit: int) -> tuple[list[Value], Exponent | None]:
    """Returns float operands with exponent 0, and the one that was taken off them; None without
    floats.

    Constants count like any other operand, or their data would overflow. One that stands for an
    infinity (a mask) is only kept large: the others keep what exceeds 2^-20 of it. So are arrays
    made of constants and integers alone, such as a mask that is added.
    """
    floats = [x for x in inputs if isinstance(x, ScaledValue)]
    if not floats:
        return list(inputs), None
    wanted = [_wanted(x, limit) for x in floats]
    known = [e for e in wanted if isinstance(e, int)]
    common: Exponent | None = max(known, default=None)
    for exponent in wanted:
        if exponent is not None and not isinstance(exponent, int):
            common = exponent if common is None else lax.max(jnp.int32(common), exponent)
    common = 0 if common is None else common
    return [_down_to(x, common) if isinstance(x, ScaledValue) else x for x in inputs], common


def chosen(which: jax.Array, cases: Sequence[Value]) -> list[Value]:
    """Returns the cases of a selection such that one without a chosen element has no exponent.

    Otherwise numbers of any size that a program computes and discards (a series where it diverges)
    would flush those that it keeps.
    """

    def one(number: int, x: ScaledValue) -> ScaledValue:
        if isinstance(x.exponent, int) or jnp.ndim(x.exponent) or x.constant_value is not None:
            return x
        used = jnp.any(which == which.dtype.type(number))
        exponent = jnp.where(used, x.exponent, np.int32(ZERO_EXPONENT))
        return dataclasses.replace(x, exponent=exponent)

    floats = [x for x in cases if isinstance(x, ScaledValue)]
    if sum(_wanted(x, TOP) is not None for x in floats) < 2:  # beside zeros and infinities
        return list(cases)
    return [one(i, x) if isinstance(x, ScaledValue) else x for i, x in enumerate(cases)]


def _wanted(x: ScaledValue, limit: int) -> Exponent | None:
    if x.constant_value is not None:
        return wanted_by_constant(x.constant_value, limit)
    if isinstance(x.exponent, int):
        return x.exponent
    exponent = jnp.int32(x.exponent)
    return lax.min(exponent, np.int32(MASK - TOP)) if may_be_mask(x) else exponent


def may_be_mask(x: ScaledValue) -> bool:
    return getattr(x, "independent", False)


def wanted_by_constant(constant_value: float, limit: int) -> int | None:
    """Returns the exponent at which a constant's data are below ``2**limit`` (a mask's, TOP)."""
    if not constant_value or not math.isfinite(constant_value):
        return None
    exponent = math.frexp(constant_value)[1]
    return MASK - TOP if exponent > MASK else exponent - limit


def finite_factor(x: Value) -> Value:
    """Returns a factor that stands for an infinity as 2^MASK: a sum with it keeps leading bits."""
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


def _down_to(x: ScaledValue, common: Exponent) -> ScaledValue:
    """Returns ``x`` with its data divided by ``2**(common - exponent)``, exponent 0.

    ``common`` is at least the operand's own exponent. Data below 2^-126 of the other operand become
    zero rather than a subnormal remainder. A mask is clipped to the format's range.
    """
    down, least = x.exponent - common, x.data.dtype.type(2.0**-126)
    if isinstance(down, int):
        exact = x.data.dtype.type(2.0 ** max(-126, min(126, down)))
        data = x.data * exact * least if down < -126 else x.data * exact
    else:
        factor = power_of_two(lax.clamp(LOWEST, down, HIGHEST)).astype(x.data.dtype)
        rest = lax.select(down < -126, least, x.data.dtype.type(1))
        data = x.data * factor * rest  # in two steps: an infinity times zero would be NaN
    if may_be_mask(x) or (x.constant_value is not None and abs(x.constant_value) >= 2.0**MASK):
        data = clipped(data, 2.0**TOP)
    return ScaledValue(data, 0)
