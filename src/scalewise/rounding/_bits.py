"""Rounding in every rounding mode, by integer operations on the bits of float32 or float64."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format, Rest, Rounding, rounding_mode


@dataclasses.dataclass(frozen=True)
class Carrier:
    """A float type whose bits are rounded, and in which the rounded values are returned."""

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
        return int(np.asarray(float(x), self.float).view(self.uint))

    def floor_bits(self, x: Fraction) -> int:
        """Returns the bit pattern of the carrier's largest number that is at most ``x`` > 0."""
        exponent = self.min_exponent
        while x >= Fraction(2) ** (exponent + 1):
            exponent += 1
        units = int(x / Fraction(2) ** (exponent - self.mantissa_bits))
        return ((exponent - self.min_exponent) << self.mantissa_bits) + units


F32 = Carrier(np.float32, np.uint32, 23, -126)
F64 = Carrier(np.float64, np.uint64, 52, -1022)


def carrier_of(dtype: Any) -> Carrier:
    return F64 if dtype == jnp.float64 else F32


def fits(fmt: Format, carrier: Carrier) -> bool:
    lowest = carrier.min_exponent - carrier.mantissa_bits
    return (
        fmt.mantissa_bits <= carrier.mantissa_bits
        and fmt.max_exponent <= -carrier.min_exponent + 1
        and fmt.min_exponent - fmt.mantissa_bits >= lowest
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Mode:
    """A rounding mode together with what it needs to know of the numbers to round.

    Attributes:
        rounding: the rounding mode.
        negative: whether each number is negative.
        noise: uniform random bits of the carrier's width, for stochastic rounding.
        carrier: the type of the numbers.
    """

    rounding: Rounding
    negative: jax.Array
    noise: jax.Array | None
    carrier: Carrier

    def addend(self, odd: Any, dropped: Any) -> Any:
        c = self.carrier
        every = c.const((1 << c.bits) - 1)
        negative = jnp.where(self.negative, every, c.const(0))
        return self.rounding.addend(dropped, odd, negative, self.noise)

    def goes_up(self, rest: Rest, odd: bool) -> jax.Array:
        return self.rounding.goes_up(rest, jnp.full_like(rest.nonzero, odd), self.negative)

    def overflow(self, inside: Any, outside: Any) -> Any:
        """Returns ``outside`` where finite overflow gives infinity or NaN, else ``inside``."""
        match self.rounding.overflows:
            case (True, True):
                return outside
            case (False, False):
                return inside
            case (positive, _):
                return jnp.where(self.negative != positive, outside, inside)


def round_bits(
    x: jax.Array,
    fmt: Format,
    saturate: bool | str = False,
    rounding: str | Rounding = "nearest_even",
    noise: jax.Array | None = None,
    subnormals: bool = True,
) -> jax.Array:
    """Returns float32 or float64 ``x`` rounded to numbers of ``fmt``, all of which its dtype holds.

    The result is the same on every backend, under jit and eagerly: it doesn't depend on whether a
    backend flushes subnormals. ``noise`` are random bits of x's shape, for ``"stochastic"``: where
    the d lowest bits of a float are dropped, the d lowest of them are used. Without ``subnormals``,
    results below the smallest normal number become zero.
    """
    c = carrier_of(x.dtype)
    bits = lax.bitcast_convert_type(x, c.uint)
    sign = bits & c.const(1 << (c.bits - 1))
    magnitude = bits & c.const((1 << (c.bits - 1)) - 1)
    mode = Mode(rounding_mode(rounding), sign != 0, noise, c)
    rounded = _magnitude(magnitude, fmt, c, mode, saturate)
    infinity = c.const(c.bits_of(np.inf))
    top = c.const(c.bits_of(fmt.max))
    beyond = fmt.max if fmt.nan_code is None else np.nan
    beyond = infinity if fmt.infinities else c.const(c.bits_of(beyond))
    over = rounded > top
    if not fmt.zero:
        over &= rounded <= infinity  # above infinity: NaN, for values below the smallest number
    infinite = beyond
    finite_over = mode.overflow(top, beyond) if saturate is False else top
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
    rounded = jnp.where(magnitude > infinity, magnitude, rounded)  # NaN stays NaN
    if not fmt.signed:
        nan = c.const(c.bits_of(np.nan))
        rounded = jnp.where((sign != 0) & (magnitude != 0), nan, rounded)
        sign = jnp.zeros_like(sign)
    elif not fmt.negative_zero:
        sign = jnp.where(rounded == 0, c.const(0), sign)
    return lax.bitcast_convert_type(sign | rounded, x.dtype)


def _magnitude(
    magnitude: jax.Array, fmt: Format, c: Carrier, mode: Mode, saturate: bool | str
) -> jax.Array:
    rounded = _drop(magnitude, c.mantissa_bits - fmt.mantissa_bits, c, mode, _flip(fmt, c))
    if fmt.min_exponent < c.min_exponent:
        low = _among_subnormals(magnitude, fmt, c, mode)
        rounded = jnp.where(magnitude < c.const(1 << c.mantissa_bits), low, rounded)
    elif (
        fmt.subnormals and fmt.min_exponent > c.min_exponent
    ):  # if equal, both have the same subnormals
        first_normal = c.const(c.bits_of(fmt.smallest_normal))
        rounded = jnp.where(magnitude < first_normal, _subnormal(magnitude, fmt, c, mode), rounded)
    if fmt.zero and fmt.subnormals:
        return rounded
    return _below_smallest(magnitude, rounded, fmt, c, mode, saturate)


def _subnormal(magnitude: jax.Array, fmt: Format, c: Carrier, mode: Mode) -> jax.Array:
    """That number must be a normal number of the carrier."""
    quantum = fmt.min_exponent - fmt.mantissa_bits
    if mode.rounding.name != "nearest_even" or quantum < c.min_exponent + 2:
        return _on_grid(magnitude, quantum, c, mode)
    # Fewer operations with the same result: multiply by a power of two that makes the quantum 1,
    # round to an integer, multiply back. A backend only flushes values below half of the quantum.
    # (Adding and subtracting 2^(quantum + 23) would do it too, but XLA folds the two constants.)
    size = lax.bitcast_convert_type(magnitude, c.float)
    units = lax.round(size * np.asarray(2.0**-quantum, c.float), lax.RoundingMethod.TO_NEAREST_EVEN)
    return lax.bitcast_convert_type(units * np.asarray(2.0**quantum, c.float), c.uint)


def _flip(fmt: Format, c: Carrier) -> int:
    """Returns 1 if codes are odd where the truncated bits of the carrier are even, else 0.

    Without mantissa bits the last bit of a code is the last bit of its exponent field, which
    depends on the biases.
    """
    return (fmt.bias + 1 - c.min_exponent) % 2 if fmt.mantissa_bits == 0 else 0


def _drop(magnitude: jax.Array, drop: int, c: Carrier, mode: Mode, flip: int = 0) -> jax.Array:
    if drop == 0:
        return magnitude
    dropped = c.const((1 << drop) - 1)
    kept = c.const(((1 << c.bits) - 1) ^ ((1 << drop) - 1))
    odd = (magnitude >> c.const(drop)) & c.const(1)
    if flip:
        odd = odd ^ c.const(1)
    return (magnitude + mode.addend(odd, dropped)) & kept


def _among_subnormals(magnitude: jax.Array, fmt: Format, c: Carrier, mode: Mode) -> jax.Array:
    """Rounds subnormals of the carrier to a format with normal numbers in their range."""
    one = c.const(1)
    lowest = fmt.min_exponent - (c.min_exponent - c.mantissa_bits)
    lead = c.const(c.bits - 1) - lax.clz(
        magnitude | one
    )  # floor(log2), in units of the smallest subnormal
    binade = jnp.maximum(lead, c.const(lowest))
    drop = jnp.maximum(binade, c.const(fmt.mantissa_bits)) - c.const(fmt.mantissa_bits)
    dropped = (one << drop) - one
    odd = (magnitude >> drop) & one
    if (
        fmt.mantissa_bits == 0
    ):  # the last bit of the exponent field, which is 0 below the lowest binade
        first = (fmt.min_exponent + fmt.bias - lowest) % 2
        odd = jnp.where(lead >= c.const(lowest), (binade + c.const(first)) & one, c.const(0))
    return (magnitude + mode.addend(odd, dropped)) & ~dropped


def _on_grid(magnitude: jax.Array, quantum: int, c: Carrier, mode: Mode) -> jax.Array:
    """Rounds |x| < 2^(quantum + mantissa bits) to a multiple of 2^quantum, in integers.

    Numbers far below half of 2^quantum are treated alike unless they are zero. Stochastic rounding
    treats them exactly: it rounds up for ``floor(p * 2^w)`` of the 2^w values of w random bits,
    where p is the distance from the lower multiple over 2^quantum.
    """
    one, m = c.const(1), c.mantissa_bits
    exponent = magnitude >> c.const(m)
    significand = magnitude & c.const((1 << m) - 1)
    significand = jnp.where(exponent > 0, significand | c.const(1 << m), significand)
    # |x| is significand << up, in units of the carrier's smallest subnormal
    up = jnp.maximum(exponent, one) - one
    step = quantum - (c.min_exponent - m)  # log2 of the quantum in those units
    down = jnp.asarray(step, np.int32) - up.astype(np.int32)
    if mode.rounding.random:
        multiple = _drawn_multiple(significand, down, c, mode)
    else:
        far = down > c.bits - 1  # a shift by more than the width of the integer
        significand = jnp.where(far & (significand > 0), one, significand)
        shift = jnp.clip(down, 0, c.bits - 2).astype(c.uint)
        dropped = (one << shift) - one
        odd = (significand >> shift) & one
        multiple = (significand + mode.addend(odd, dropped)) >> shift
    if step >= m + 1:  # the multiples are normal numbers of the carrier: convert and scale
        size = multiple.astype(c.float) * np.asarray(2.0**quantum, c.float)
        return lax.bitcast_convert_type(size, c.uint)
    return from_units(multiple << c.const(step), c)


def _drawn_multiple(significand: jax.Array, down: jax.Array, c: Carrier, mode: Mode) -> jax.Array:
    """Returns ``significand / 2^down``, rounded stochastically to an integer."""
    assert mode.noise is not None
    one, width = c.const(1), c.bits
    shift = jnp.clip(down, 0, width - 1).astype(c.uint)
    dropped = (one << shift) - one
    near = (significand + mode.addend((significand >> shift) & one, dropped)) >> shift
    # if all bits of the significand are dropped, compare those of the `width` places below the
    # quantum with all random bits
    part = significand >> jnp.clip(down - width, 0, width - 1).astype(c.uint)
    return jnp.where(down < width, near, (mode.noise > ~part).astype(c.uint))


def from_units(units: jax.Array, c: Carrier) -> jax.Array:
    """Returns the carrier's bits of ``units`` times its smallest subnormal.

    The bits equal ``units`` below twice the smallest normal number.
    """
    linear_below = c.const(2 << c.mantissa_bits)
    lead = c.const(c.bits - 1) - lax.clz(jnp.maximum(units, c.const(1)))
    shift = jnp.maximum(lead, c.const(c.mantissa_bits)) - c.const(c.mantissa_bits)
    body = (units >> shift) & c.const((1 << c.mantissa_bits) - 1)
    normal = ((shift + c.const(1)) << c.const(c.mantissa_bits)) | body
    return jnp.where(units < linear_below, units, normal)


def _below_smallest(
    magnitude: jax.Array, rounded: jax.Array, fmt: Format, c: Carrier, mode: Mode, saturate: Any
) -> jax.Array:
    """Replaces ``rounded`` where |x| is below the format's smallest number.

    The result there is the smallest number or zero. A format without zero (E8M0) follows ONNX's
    table for E8M0 (rows "0" and "x < E8M0_MIN"): the result is the smallest number if it saturates;
    otherwise |x| is rounded as if the next lower number were half the smallest, with an odd code,
    and the result is NaN where that is chosen.
    """
    smallest = c.const(c.bits_of(fmt.smallest))
    below = magnitude < smallest
    if not fmt.zero and saturate is not False:
        return jnp.where(below, smallest, rounded)
    middle = fmt.smallest / 2 if fmt.zero else fmt.smallest * 3 / 4
    floor = c.floor_bits(middle)
    exact = Fraction(float(np.asarray(floor, c.uint).view(c.float))) == middle
    at = magnitude == c.const(floor)
    rest = Rest(
        nonzero=magnitude > 0,
        half=at if exact else jnp.zeros_like(at),
        above_half=magnitude > c.const(floor),
        drawn=_drawn(magnitude, fmt, c, mode) if mode.rounding.random else None,
    )
    under = c.const(0) if fmt.zero else c.const(c.bits_of(np.nan))
    return jnp.where(below, jnp.where(mode.goes_up(rest, not fmt.zero), smallest, under), rounded)


def _drawn(magnitude: jax.Array, fmt: Format, c: Carrier, mode: Mode) -> jax.Array:
    noise = mode.noise
    assert noise is not None
    if not fmt.zero:  # from half of the smallest number on, one binade, in which bits are linear
        low = c.floor_bits(fmt.smallest / 2)
        span = c.bits_of(fmt.smallest) - low  # a power of two
        above = magnitude - c.const(low)
        up = above + (noise & c.const(span - 1)) >= c.const(span)
        return (magnitude >= c.const(low)) & up
    # x * 2^w >= (2^w - noise) * smallest, exactly, in units of the format's quantum
    unit = fmt.min_exponent - fmt.mantissa_bits
    smallest = c.const(int(fmt.smallest / Fraction(2) ** unit))
    exponent = jnp.maximum(magnitude >> c.const(c.mantissa_bits), c.const(1))
    significand = magnitude - ((exponent - c.const(1)) << c.const(c.mantissa_bits))
    up = exponent.astype(np.int32) - 1 + (c.min_exponent - c.mantissa_bits) - unit + c.bits
    high, low = _shifted(significand, up, c)
    need_high, need_low = _product(~noise, smallest, c)
    need_low = need_low + smallest
    need_high = need_high + (need_low < smallest).astype(c.uint)
    return (high > need_high) | ((high == need_high) & (low >= need_low))


def _shifted(x: jax.Array, up: jax.Array, c: Carrier) -> tuple[jax.Array, jax.Array]:
    """Returns the high and low word of ``floor(x * 2^up)``; ``up`` is at most their width + 2."""

    def clipped(n: jax.Array) -> jax.Array:
        return jnp.clip(n, 0, c.bits - 1).astype(c.uint)

    zero = jnp.zeros_like(x)
    low = jnp.where(up < 0, x >> clipped(-up), jnp.where(up < c.bits, x << clipped(up), zero))
    rising = jnp.where(up > 0, x >> clipped(c.bits - up), zero)
    return jnp.where(up < c.bits, rising, x << clipped(up - c.bits)), low


def _product(a: jax.Array, b: Any, c: Carrier) -> tuple[jax.Array, jax.Array]:
    half = c.const(c.bits // 2)
    mask = c.const((1 << (c.bits // 2)) - 1)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    middle = a_high * b_low + ((a_low * b_low) >> half)  # below 2^w: (2^h - 1)^2 + 2^h - 1
    other = (middle & mask) + a_low * b_high
    return a_high * b_high + (middle >> half) + (other >> half), a * b
