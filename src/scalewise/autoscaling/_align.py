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
from ._rescale import TOP, clipped
from ._value import Exponent, ScaledValue

MASK = 20  # log2 of the least constant that is taken for a mask, such as -1e9
NEAR = 9  # log2 of how much larger than the others it may be without being taken for one


def aligned(
    inputs: Sequence[Value], limit: int, *, masks: bool = True
) -> tuple[list[Value], Exponent | None]:
    """Returns float operands with exponent 0, and what was taken off them; None without floats.

    Constants count like any other operand, or their data, below ``2**limit``, would overflow. One
    that may stand for an infinity (a mask, or an array made of constants and integers alone) is
    clipped at 2^20 if it is beyond that and beyond 2^9 times the others' largest number: the others
    would vanish beside it. Without ``masks`` none is, since each element of the result depends on
    it.
    """
    floats = [x for x in inputs if isinstance(x, ScaledValue)]
    if not floats:
        return list(inputs), None
    wanted = [(_wanted(x, limit), may_be_mask(x, constants=masks)) for x in floats]
    largest = _largest([e for e, mask in wanted if not mask])
    infinite = _largest([e for e, mask in wanted if mask])
    common: Exponent = 0 if largest is None else largest
    if infinite is not None:
        common = infinite if largest is None else _beside_mask(largest, infinite)
    return [_down_to(x, common) if isinstance(x, ScaledValue) else x for x in inputs], common


def _largest(exponents: Sequence[Exponent | None]) -> Exponent | None:
    known = [e for e in exponents if isinstance(e, int)]
    common: Exponent | None = max(known, default=None)
    for exponent in exponents:
        if exponent is not None and not isinstance(exponent, int):
            common = exponent if common is None else lax.max(jnp.int32(common), exponent)
    return common


def _beside_mask(largest: Exponent, mask: Exponent) -> Exponent:
    if isinstance(largest, int) and isinstance(mask, int):
        return max(largest, mask if mask - largest <= NEAR else min(mask, MASK - TOP))
    largest, mask = jnp.int32(largest), jnp.int32(mask)
    ordinary = (mask - largest <= NEAR) | (largest == ZERO_EXPONENT)
    return lax.max(largest, jnp.where(ordinary, mask, lax.min(mask, np.int32(MASK - TOP))))


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
    return x.exponent if isinstance(x.exponent, int) else jnp.int32(x.exponent)


def may_be_mask(x: ScaledValue, *, constants: bool = True) -> bool:
    if x.constant_value is not None:
        return constants and 2.0**MASK <= abs(x.constant_value) < math.inf
    return getattr(x, "independent", False)


def wanted_by_constant(constant_value: float, limit: int) -> int | None:
    """Returns the exponent at which a constant's data are below ``2**limit``."""
    if not constant_value or not math.isfinite(constant_value):
        return None
    return math.frexp(constant_value)[1] - limit


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
    if may_be_mask(x):
        data = clipped(data, 2.0**TOP)
    return ScaledValue(data, 0)
