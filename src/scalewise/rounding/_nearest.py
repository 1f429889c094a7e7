"""Nearest even, as integer operations on the bits of float32 or float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format


@dataclasses.dataclass(frozen=True)
class Carrier:
    """The float type in which rounded values are returned."""

    float: Any
    uint: Any
    mantissa_bits: int
    min_exponent: int

    @property
    def bits(self) -> int:
        return np.dtype(self.uint).itemsize * 8

    def const(self, x: int) -> Any:
        return self.uint(x)

    def bits_of(self, x: Any) -> int:
        """The bit pattern of a number that the carrier holds exactly."""
        return int(np.asarray(float(x), self.float).view(self.uint))


F32 = Carrier(np.float32, np.uint32, 23, -126)
F64 = Carrier(np.float64, np.uint64, 52, -1022)


def carrier_of(dtype: Any) -> Carrier:
    return F64 if dtype == jnp.float64 else F32


def fits(fmt: Format, carrier: Carrier) -> bool:
    """Whether every number of the format is a number of the carrier's type."""
    lowest = carrier.min_exponent - carrier.mantissa_bits
    return (
        fmt.mantissa_bits <= carrier.mantissa_bits
        and fmt.max_exponent <= -carrier.min_exponent + 1
        and fmt.min_exponent - fmt.mantissa_bits >= lowest
    )


def nearest_even(x: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    """``x`` rounded to the nearest number of ``fmt``, ties to the even code, in x's own dtype.

    Integer operations only where float subnormals could be flushed by the backend, so the result
    is the same under jit and eagerly, on every backend.

    Args:
        x: float32 or float64.
        fmt: a format all of whose numbers x's dtype holds.
        saturate: False, True or "finite".
    """
    c = carrier_of(x.dtype)
    bits = lax.bitcast_convert_type(x, c.uint)
    sign = bits & c.const(1 << (c.bits - 1))
    magnitude = bits & c.const((1 << (c.bits - 1)) - 1)
    rounded = _magnitude(x, magnitude, fmt, c)
    infinity = c.const(c.bits_of(np.inf))
    over = rounded > c.const(c.bits_of(fmt.max))
    at_infinity = magnitude == infinity
    beyond = c.const(_overflow_bits(fmt, c))
    top = c.const(c.bits_of(fmt.max))
    if saturate is True:
        rounded = jnp.where(over, top, rounded)
    elif saturate == "finite":
        rounded = jnp.where(over, jnp.where(at_infinity, beyond, top), rounded)
    else:
        rounded = jnp.where(over, beyond, rounded)
    rounded = jnp.where(magnitude > infinity, magnitude, rounded)  # a NaN stays one
    if not fmt.signed:
        nan = c.const(c.bits_of(np.nan))
        rounded = jnp.where((sign != 0) & (magnitude != 0), nan, rounded)
        sign = jnp.zeros_like(sign)
    elif not fmt.negative_zero:
        sign = jnp.where(rounded == 0, c.const(0), sign)
    if not fmt.zero:
        rounded = jnp.where(magnitude == 0, c.const(c.bits_of(np.nan)), rounded)
    return lax.bitcast_convert_type(sign | rounded, x.dtype)


def _overflow_bits(fmt: Format, c: Carrier) -> int:
    """What overflow becomes without saturation: infinity, else NaN, else the largest number."""
    if fmt.infinities:
        return c.bits_of(np.inf)
    return c.bits_of(fmt.max if fmt.nan_code is None else np.nan)


def _magnitude(x: jax.Array, magnitude: jax.Array, fmt: Format, c: Carrier) -> jax.Array:
    """Bits of |x| rounded to fmt's precision, unbounded above."""
    drop = c.mantissa_bits - fmt.mantissa_bits
    rounded = _drop(magnitude, drop, c)
    if not fmt.subnormals:
        return _without_subnormals(magnitude, rounded, fmt, c)
    if fmt.min_exponent == c.min_exponent:  # subnormals begin where the carrier's do: one grid
        return rounded
    quantum = fmt.min_exponent - fmt.mantissa_bits
    first_normal = c.const(c.bits_of(fmt.smallest_normal))
    if quantum >= c.min_exponent + 2:
        # a power of two brings the quantum to 1; what a backend flushes is less than half of it.
        # (Adding and subtracting 2^(quantum + 23) would do too, but XLA folds the two constants.)
        size = lax.bitcast_convert_type(magnitude, c.float)
        units = lax.round(
            size * np.asarray(2.0**-quantum, c.float), lax.RoundingMethod.TO_NEAREST_EVEN
        )
        low = lax.bitcast_convert_type(units * np.asarray(2.0**quantum, c.float), c.uint)
    else:
        low = _on_grid(magnitude, quantum, c)
    return jnp.where(magnitude < first_normal, low, rounded)


def _drop(magnitude: jax.Array, drop: int, c: Carrier) -> jax.Array:
    """Rounds away the lowest bits, half to even; a carry moves into the exponent by itself."""
    if drop == 0:
        return magnitude
    odd = (magnitude >> c.const(drop)) & c.const(1)
    half = c.const((1 << (drop - 1)) - 1)
    mask = c.const(((1 << c.bits) - 1) ^ ((1 << drop) - 1))
    return (magnitude + half + odd) & mask


def _on_grid(magnitude: jax.Array, quantum: int, c: Carrier) -> jax.Array:
    """Rounds |x| < 2^(quantum + 23) to a multiple of 2^quantum without any float operation."""
    one = 1 << c.mantissa_bits
    exponent = magnitude >> c.const(c.mantissa_bits)
    implicit = jnp.where(exponent > 0, c.const(one), c.const(0))
    significand = (magnitude & c.const(one - 1)) | implicit
    # in units of the carrier's smallest subnormal the significand stands at `exponent - 1` bits up
    up = jnp.maximum(exponent, c.const(1)) - c.const(1)
    step = quantum - (c.min_exponent - c.mantissa_bits)  # the quantum in those units, as log2
    down = jnp.clip(
        jnp.asarray(step, np.int32) - up.astype(np.int32), 0, c.mantissa_bits + 2
    ).astype(c.uint)
    odd = (significand >> down) & c.const(1)
    bias = jnp.where(down > 0, (c.const(1) << (down - c.const(1))) - c.const(1) + odd, c.const(0))
    multiple = (significand + bias) >> down  # an integer below 2^(mantissa_bits + 1)
    units = multiple << jnp.asarray(step, c.uint)
    return _from_units(units, c)


def _from_units(units: jax.Array, c: Carrier) -> jax.Array:
    """Bits of ``units * 2^(smallest subnormal's exponent)``: linear below twice the normals."""
    linear_below = c.const(2 << c.mantissa_bits)
    lead = c.const(c.bits - 1) - lax.clz(jnp.maximum(units, c.const(1)))
    shift = jnp.maximum(lead, c.const(c.mantissa_bits)) - c.const(c.mantissa_bits)
    body = (units >> shift) & c.const((1 << c.mantissa_bits) - 1)
    normal = ((shift + c.const(1)) << c.const(c.mantissa_bits)) | body
    return jnp.where(units < linear_below, units, normal)


def _without_subnormals(magnitude, rounded, fmt: Format, c: Carrier) -> jax.Array:
    """Below the smallest number there is only zero (or, without a zero, only that number)."""
    smallest = c.const(c.bits_of(fmt.smallest))
    half = c.const(c.bits_of(fmt.smallest / 2))
    if not fmt.zero:
        if fmt.min_exponent < c.min_exponent:  # E8M0 in float32: 2^-127 is subnormal there
            tie = smallest + (smallest >> c.const(1))
            low = jnp.where(magnitude > tie, smallest << c.const(1), smallest)
            return jnp.where(magnitude < smallest << c.const(1), low, rounded)
        return jnp.where(magnitude < smallest, smallest, rounded)
    low = jnp.where(magnitude > half, smallest, c.const(0))
    return jnp.where(magnitude < smallest, low, rounded)
