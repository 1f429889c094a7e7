"""Rounding in every direction, as operations on the bits of float32 or float64."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class Mode:
    """A rounding of a magnitude, resolved for the signs at hand.

    Attributes:
        name: one of ``formats.ROUNDINGS``.
        negative: which inputs are negative.
        noise: uniform random bits of the carrier's width, for stochastic rounding.
    """

    name: str
    negative: jax.Array
    noise: jax.Array | None = None

    def addend(self, kept_odd: Any, dropped: Any, one: Any) -> Any:
        """What to add before the dropped bits are cut off, given as ``dropped = 2^bits - 1``.

        Args:
            kept_odd: the lowest bit that stays.
            dropped: a mask of the bits that go; a constant or an array.
            one: the integer 1 of the carrier.
        """
        half = dropped >> one
        match self.name:
            case "nearest_even":
                return half + kept_odd * jnp.minimum(dropped, one)
            case "nearest_away":
                return dropped - half
            case "away_from_zero":
                return dropped
            case "toward_positive":
                return jnp.where(self.negative, dropped & ~dropped, dropped)
            case "toward_negative":
                return jnp.where(self.negative, dropped, dropped & ~dropped)
            case "stochastic":
                assert self.noise is not None
                return self.noise & dropped
        return dropped & ~dropped  # toward zero; to odd sets a bit afterwards

    @property
    def carries_to_infinity(self) -> jax.Array | bool:
        """Whether a finite overflow leaves the finite numbers (IEEE 754-2019, 7.4)."""
        match self.name:
            case "toward_zero" | "to_odd":
                return False
            case "toward_positive":
                return ~self.negative
            case "toward_negative":
                return self.negative
        return True


def round_bits(
    x: jax.Array,
    fmt: Format,
    saturate: bool | str = False,
    rounding: str = "nearest_even",
    noise: jax.Array | None = None,
    subnormals: bool = True,
) -> jax.Array:
    """``x`` rounded to a number of ``fmt``, in x's own dtype.

    Operations that no backend's flushing of float subnormals can change, so the result is the same
    under jit and eagerly, on every backend.

    Args:
        x: float32 or float64.
        fmt: a format all of whose numbers x's dtype holds.
        saturate: False, True or "finite".
        rounding: one of ``formats.ROUNDINGS``.
        noise: random bits of x's shape (uint32, uint64), for ``"stochastic"``.
        subnormals: False flushes results below the smallest normal number to zero.
    """
    c = carrier_of(x.dtype)
    bits = lax.bitcast_convert_type(x, c.uint)
    sign = bits & c.const(1 << (c.bits - 1))
    magnitude = bits & c.const((1 << (c.bits - 1)) - 1)
    mode = Mode(rounding, sign != 0, noise)
    rounded = _magnitude(magnitude, fmt, c, mode, saturate)
    infinity = c.const(c.bits_of(np.inf))
    top = c.const(c.bits_of(fmt.max))
    beyond = c.const(_overflow_bits(fmt, c))
    over = rounded > top
    if not fmt.zero:
        over &= rounded <= infinity  # NaN: below all numbers
    finite_over, infinite = beyond, beyond
    if mode.carries_to_infinity is not True:
        finite_over = jnp.where(jnp.asarray(mode.carries_to_infinity), beyond, top)
    if saturate is not False:
        finite_over = top
    if saturate is True:
        infinite = top
    if finite_over is infinite:
        rounded = jnp.where(over, infinite, rounded)
    else:
        at_infinity = magnitude == infinity
        rounded = jnp.where(over, jnp.where(at_infinity, infinite, finite_over), rounded)
    if not subnormals and fmt.subnormals:
        first_normal = c.const(c.bits_of(fmt.smallest_normal))
        rounded = jnp.where(rounded < first_normal, c.const(0), rounded)
    rounded = jnp.where(magnitude > infinity, magnitude, rounded)  # a NaN stays one
    if not fmt.signed:
        nan = c.const(c.bits_of(np.nan))
        rounded = jnp.where((sign != 0) & (magnitude != 0), nan, rounded)
        sign = jnp.zeros_like(sign)
    elif not fmt.negative_zero:
        sign = jnp.where(rounded == 0, c.const(0), sign)
    return lax.bitcast_convert_type(sign | rounded, x.dtype)


def _overflow_bits(fmt: Format, c: Carrier) -> int:
    """What overflow becomes without saturation: infinity, else NaN, else the largest number."""
    if fmt.infinities:
        return c.bits_of(np.inf)
    return c.bits_of(fmt.max if fmt.nan_code is None else np.nan)


def _magnitude(
    magnitude: jax.Array, fmt: Format, c: Carrier, mode: Mode, saturate: bool | str
) -> jax.Array:
    """Bits of |x| rounded to fmt's precision, unbounded above."""
    rounded = _drop(magnitude, c.mantissa_bits - fmt.mantissa_bits, c, mode, _flip(fmt, c))
    if not fmt.zero:
        return _without_zero(magnitude, rounded, fmt, c, mode, saturate)
    if not fmt.subnormals:
        return _without_subnormals(magnitude, rounded, fmt, c, mode)
    if fmt.min_exponent == c.min_exponent:  # subnormals begin where the carrier's do: one grid
        return rounded
    if fmt.min_exponent < c.min_exponent:
        low = _among_subnormals(magnitude, fmt, c, mode)
        return jnp.where(magnitude < c.const(1 << c.mantissa_bits), low, rounded)
    quantum = fmt.min_exponent - fmt.mantissa_bits
    first_normal = c.const(c.bits_of(fmt.smallest_normal))
    if mode.name == "nearest_even" and quantum >= c.min_exponent + 2:
        # a power of two brings the quantum to 1; what a backend flushes is less than half of it.
        # (Adding and subtracting 2^(quantum + 23) would do too, but XLA folds the two constants.)
        size = lax.bitcast_convert_type(magnitude, c.float)
        units = lax.round(
            size * np.asarray(2.0**-quantum, c.float), lax.RoundingMethod.TO_NEAREST_EVEN
        )
        low = lax.bitcast_convert_type(units * np.asarray(2.0**quantum, c.float), c.uint)
    else:
        low = _on_grid(magnitude, quantum, c, mode)
    return jnp.where(magnitude < first_normal, low, rounded)


def _flip(fmt: Format, c: Carrier) -> int:
    """1 where a code is odd when the carrier's bits are even.

    Without mantissa bits the last bit of a code is that of its exponent field, so biases count.
    """
    assert fmt.bias is not None
    return (fmt.bias + 1 - c.min_exponent) % 2 if fmt.mantissa_bits == 0 else 0


def _drop(magnitude: jax.Array, drop: int, c: Carrier, mode: Mode, flip: int = 0) -> jax.Array:
    """Rounds away the lowest bits; a carry moves into the exponent by itself."""
    if drop == 0:
        return magnitude
    dropped = c.const((1 << drop) - 1)
    kept = c.const(((1 << c.bits) - 1) ^ ((1 << drop) - 1))
    if mode.name == "nearest_even":  # the same as the general line, two operations shorter
        odd = (magnitude >> c.const(drop)) & c.const(1)
        if flip:
            odd = odd ^ c.const(1)
        return (magnitude + (c.const((1 << (drop - 1)) - 1) + odd)) & kept
    if mode.name == "to_odd":
        inexact = (magnitude & dropped) != 0
        if flip:  # the odd neighbour is the one whose last bit is clear
            up = inexact & ((magnitude & c.const(1 << drop)) != 0)
            return (magnitude & kept) + jnp.where(up, c.const(1 << drop), c.const(0))
        return (magnitude & kept) | jnp.where(inexact, c.const(1 << drop), c.const(0))
    return (magnitude + mode.addend(None, dropped, c.const(1))) & kept


def _among_subnormals(magnitude: jax.Array, fmt: Format, c: Carrier, mode: Mode) -> jax.Array:
    """Rounds the carrier's subnormals where the format has normal numbers among them."""
    one = c.const(1)
    lowest = fmt.min_exponent - (c.min_exponent - c.mantissa_bits)
    lead = c.const(c.bits - 1) - lax.clz(magnitude | one)  # log2, in units of the smallest
    binade = jnp.maximum(lead, c.const(lowest))
    drop = jnp.maximum(binade, c.const(fmt.mantissa_bits)) - c.const(fmt.mantissa_bits)
    last = one << drop
    dropped = last - one
    odd = (magnitude >> drop) & one
    if fmt.mantissa_bits == 0:  # the exponent field's last bit; a lone subnormal binade is 0
        field = jnp.where(lead >= c.const(lowest), binade - c.const(lowest - 1), c.const(0))
        odd = field & one
    if mode.name == "to_odd":
        up = ((magnitude & dropped) != 0) & (odd == 0)
        return (magnitude & ~dropped) + jnp.where(up, last, c.const(0))
    return (magnitude + mode.addend(odd, dropped, one)) & ~dropped


def _on_grid(magnitude: jax.Array, quantum: int, c: Carrier, mode: Mode) -> jax.Array:
    """Rounds |x| < 2^(quantum + mantissa bits) to a multiple of 2^quantum, by integers alone.

    Below half a quantum only the fact that a number isn't zero is kept, but for stochastic
    rounding, whose odds go on down to 2^-31 of a quantum (float64: 2^-62).
    """
    one, m = c.const(1), c.mantissa_bits
    exponent = magnitude >> c.const(m)
    significand = magnitude & c.const((1 << m) - 1)
    significand = jnp.where(exponent > 0, significand | c.const(1 << m), significand)
    # in units of the carrier's smallest subnormal the significand stands `exponent - 1` bits up
    up = jnp.maximum(exponent, one) - one
    step = quantum - (c.min_exponent - m)  # the quantum in those units, as log2
    down = jnp.asarray(step, np.int32) - up.astype(np.int32)
    room = c.bits - 1 - m - 1  # how far the significand can be moved up to keep its low bits
    far = jnp.maximum(down - (m + 1 + room), 0)  # further down than an integer has bits
    if mode.name == "stochastic":
        significand = significand << c.const(room)
        significand = jnp.where(
            far > 0, significand >> jnp.minimum(far, c.bits - 1).astype(c.uint), significand
        )
        down = jnp.clip(down + room - far, 0, c.bits - 1).astype(c.uint)
    else:
        significand = jnp.where((far > 0) & (significand > 0), one, significand)
        down = jnp.clip(down, 0, c.bits - 2).astype(c.uint)
    dropped = (one << down) - one
    odd = (significand >> down) & one
    multiple = (significand + mode.addend(odd, dropped, one)) >> down
    if mode.name == "to_odd":
        multiple = multiple | ((significand & dropped) != 0).astype(c.uint)
    if step >= m + 1:  # far enough up to be normal numbers of the carrier: a float does the rest
        size = multiple.astype(c.float) * np.asarray(2.0**quantum, c.float)
        return lax.bitcast_convert_type(size, c.uint)
    return from_units(multiple << c.const(step), c)


def from_units(units: jax.Array, c: Carrier) -> jax.Array:
    """Bits of ``units * 2^(smallest subnormal's exponent)``: linear below twice the normals."""
    linear_below = c.const(2 << c.mantissa_bits)
    lead = c.const(c.bits - 1) - lax.clz(jnp.maximum(units, c.const(1)))
    shift = jnp.maximum(lead, c.const(c.mantissa_bits)) - c.const(c.mantissa_bits)
    body = (units >> shift) & c.const((1 << c.mantissa_bits) - 1)
    normal = ((shift + c.const(1)) << c.const(c.mantissa_bits)) | body
    return jnp.where(units < linear_below, units, normal)


def _without_subnormals(magnitude, rounded, fmt: Format, c: Carrier, mode: Mode) -> jax.Array:
    """Below the smallest number there is only zero."""
    smallest, zero = c.const(c.bits_of(fmt.smallest)), c.const(0)
    half = c.const(c.bits_of(fmt.smallest / 2))
    match mode.name:
        case "nearest_even":
            up = magnitude > half
        case "nearest_away":
            up = magnitude >= half
        case "away_from_zero" | "to_odd":
            up = magnitude > zero
        case "toward_positive":
            up = (magnitude > zero) & ~mode.negative
        case "toward_negative":
            up = (magnitude > zero) & mode.negative
        case "stochastic":
            up = _drawn(lax.bitcast_convert_type(magnitude, c.float) / float(fmt.smallest), c, mode)
        case _:
            up = magnitude != magnitude
    return jnp.where(magnitude < smallest, jnp.where(up, smallest, zero), rounded)


def _without_zero(
    magnitude, rounded, fmt: Format, c: Carrier, mode: Mode, saturate: bool | str
) -> jax.Array:
    """Zero, and what rounds below the smallest number, is that number if saturating, else NaN.

    ONNX's table for E8M0: "0" and "x < E8M0_MIN". What lies just under the smallest number is
    rounded as if half of it were the number below, under an odd code.
    """
    smallest = c.const(c.bits_of(fmt.smallest))
    if fmt.min_exponent < c.min_exponent:  # E8M0 in float32: 2^-127 is a subnormal, on its own grid
        twice = smallest << c.const(1)
        if mode.name == "to_odd":  # 2^-127 has code 0
            low = jnp.where(magnitude > smallest, twice, smallest)
        else:
            dropped = smallest - c.const(1)
            low = (magnitude + mode.addend(c.const(0), dropped, c.const(1))) & ~dropped
        rounded = jnp.where(magnitude < twice, low, rounded)
    if saturate is not False:
        return jnp.where(magnitude < smallest, smallest, rounded)
    tie = c.const(c.bits_of(fmt.smallest * 3 / 4))
    match mode.name:
        case "nearest_even" | "nearest_away":  # the code below 0 would be odd
            up = magnitude >= tie
        case "away_from_zero":
            up = magnitude > c.const(0)
        case "toward_positive":
            up = (magnitude > c.const(0)) & ~mode.negative
        case "toward_negative":
            up = (magnitude > c.const(0)) & mode.negative
        case "stochastic":
            # integers: floats of this size may be subnormals, which backends flush
            half = c.const(c.bits_of(fmt.smallest / 2))
            whole = (smallest - half).astype(c.float)
            up = _drawn((magnitude - half).astype(c.float) / whole, c, mode) & (magnitude >= half)
        case _:
            up = magnitude != magnitude
    nan = c.const(c.bits_of(np.nan))
    return jnp.where(magnitude < smallest, jnp.where(up, smallest, nan), rounded)


def _drawn(odds: jax.Array, c: Carrier, mode: Mode) -> jax.Array:
    """True with probability ``odds`` (0 to 1)."""
    assert mode.noise is not None
    draw = (mode.noise >> c.const(c.bits - c.mantissa_bits)).astype(c.float)
    return odds > draw * np.asarray(2.0**-c.mantissa_bits, c.float)
