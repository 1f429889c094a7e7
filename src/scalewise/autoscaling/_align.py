"""Exponents of ``Recipe.results``: common ones of operands, those found from data, and marks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..interpret import Equation, Value
from ..scaled import HIGHEST, LOWEST, ZERO_EXPONENT, is_known, power_of_two, scaled_down
from ._families import INFINITE
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


TOP = 15  # log2 of the largest data: FP16 ends just below 2^16


def rescaled(options: tuple, data: jax.Array, exponent: jax.Array) -> list[jax.Array]:
    """Returns data with an exponent found from them; in float32, unless they are rounded, once."""
    measure, fmt, rounds = options
    down, found = scaled_down(data, measure, fmt)
    exponent = jnp.where(found == ZERO_EXPONENT, found, found + exponent)
    if not rounds:
        return [down, exponent]
    clip = bound_of(measure, data.size) > TOP
    return [to_format(down, data.astype(jnp.float32), fmt, clip=clip), exponent]


def rounded(options: tuple, data: jax.Array) -> list[jax.Array]:
    fmt, clip = options
    return [to_format(data, data, fmt, clip=clip)]


def bound_of(measure: str, size: int) -> int:
    """Returns log2 of the largest magnitude of ``size`` data after :func:`scaled_down`."""
    if measure == "l2" and is_known(size):  # one element may hold the whole sum of squares
        return 1 + math.ceil(math.log2(max(1, size)) / 2)
    return TOP if measure == "max" else TOP + 1


def to_format(data: jax.Array, signs: jax.Array, fmt: Format, *, clip: bool) -> jax.Array:
    """Rounds float32 data to the nearest numbers of FP16 or BF16, in its dtype.

    FP16's subnormals are kept. A number too small for them becomes the smallest one rather than
    zero, since it may be a divisor or the argument of a logarithm; ``signs`` are the numbers
    before they were scaled down, which may have made some of them zero. Rounds by
    ``reduce_precision``, which flushes subnormals, since XLA drops a convert there and back.
    With ``clip``, finite data may exceed the format's largest number, and become that.
    """
    if clip:
        data = clipped(data, float(fmt.max))
    whole = lax.reduce_precision(data, fmt.exponent_bits, fmt.mantissa_bits)
    if fmt.exponent_bits == 8:
        return whole.astype(fmt.dtype)
    size, unit = lax.abs(data), np.float32(float(fmt.smallest))
    few = lax.round(data * np.float32(1 / unit), lax.RoundingMethod.TO_NEAREST_EVEN) * unit
    few = lax.select(size < unit, lax.sign(signs).astype(jnp.float32) * unit, few)
    return lax.select(size < np.float32(float(fmt.smallest_normal)), few, whole).astype(fmt.dtype)


def clipped(data: jax.Array, top: float) -> jax.Array:
    limit = data.dtype.type(top)
    infinite = lax.abs(data) == data.dtype.type(np.inf)
    return lax.select(infinite, data, lax.clamp(-limit, data, limit))


def zeros_exponent(exponent: Exponent) -> jax.Array:
    """Returns :data:`ZERO_EXPONENT` for an exponent that roots or powers have made of it."""
    beyond = lax.abs(jnp.int32(exponent)) > -ZERO_EXPONENT // 4
    return jnp.where(beyond, np.int32(ZERO_EXPONENT), jnp.int32(exponent))


SCOPE = "scalewise.rescale"


@jax.custom_jvp
def rescale(x: jax.Array) -> jax.Array:
    """Returns ``x``; under ``Recipe.results``, finds its scale from data in the forward pass.

    For recipes that only propagate scales (``recipes.scalify``), where a program's numbers leave
    unit size, for example after many products. The scale is found by the recipe's ``rescale``, or
    by the root mean square. The gradient passes unchanged.

    Args:
        x: an array of floats.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> float(sw.autoscale(lambda x: rescale(x * x), "scalify")(jnp.float32(3)))
        9.0
    """
    return _marked(x)


@rescale.defjvp
def _(primals, tangents):
    return _marked(primals[0]), tangents[0]


@jax.custom_vjp
def rescale_gradient(x: jax.Array) -> jax.Array:
    """Returns ``x``; the scale of its gradient is found from the data, as by :func:`rescale`."""
    return x


rescale_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (_marked(gradient),))


def _marked(x: jax.Array) -> jax.Array:
    with jax.named_scope(SCOPE):
        return jnp.copy(x)


def is_rescale(equation: Equation) -> bool:
    return equation.name.startswith("copy") and SCOPE in equation.scope
