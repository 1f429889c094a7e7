"""Rounding in every direction, as operations on the bits of float32 or float64."""

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

    def floor_bits(self, x: Fraction) -> int:
        """The bit pattern of the largest of the carrier's numbers that isn't above a positive x."""
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
    """Whether every number of the format is a number of the carrier's type."""
    lowest = carrier.min_exponent - carrier.mantissa_bits
    return (
        fmt.mantissa_bits <= carrier.mantissa_bits
        and fmt.max_exponent <= -carrier.min_exponent + 1
        and fmt.min_exponent - fmt.mantissa_bits >= lowest
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Mode:
    """A rounding mode applied to given numbers.

    Attributes:
        rounding: the mode.
        negative: which inputs are negative.
        noise: uniform random bits of the carrier's width, for stochastic rounding.
        carrier: the type of the numbers.
    """

    rounding: Rounding
    negative: jax.Array
    noise: jax.Array | None
    carrier: Carrier

    def addend(self, odd: Any, dropped: Any) -> Any:
        """What to add before the low bits are cut off: see :class:`scalewise.formats.Rounding`."""
        c = self.carrier
        every = c.const((1 << c.bits) - 1)
        negative = jnp.where(self.negative, every, c.const(0))
        return self.rounding.addend(dropped, odd, negative, self.noise)

    def goes_up(self, rest: Rest, odd: bool) -> jax.Array:
        """Whether magnitudes become the higher of two neighbours, the lower one's code given."""
        return self.rounding.goes_up(rest, jnp.full_like(rest.nonzero, odd), self.negative)

    def overflow(self, inside: Any, outside: Any) -> Any:
        """``outside`` where a finite overflow leaves the finite numbers, else ``inside``."""
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
    """``x`` rounded to a number of ``fmt``, in x's own dtype.

    Operations that no backend's flushing of float subnormals can change, so the result is the same
    under jit and eagerly, on every backend.

    Args:
        x: float32 or float64.
        fmt: a format all of whose numbers x's dtype holds.
        saturate: False, True or "finite".
        rounding: one of ``formats.ROUNDINGS``, or its name.
        noise: random bits of x's shape (uint32, uint64), for ``"stochastic"``. Where the d low bits
            of a float are dropped, the lowest d of them decide.
        subnormals: False flushes results below the smallest normal number to zero.
    """
    c = carrier_of(x.dtype)
    bits = lax.bitcast_convert_type(x, c.uint)
    sign = bits & c.const(1 << (c.bits - 1))
    magnitude = bits & c.const((1 << (c.bits - 1)) - 1)
    mode = Mode(rounding_mode(rounding), sign != 0, noise, c)
    rounded = _magnitude(magnitude, fmt, c, mode, saturate)
    infinity = c.const(c.bits_of(np.inf))
    top = c.const(c.bits_of(fmt.max))
    beyond = c.const(_overflow_bits(fmt, c))
    over = rounded > top
    if not fmt.zero:
        over &= rounded <= infinity  # NaN: below all numbers
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
    """Bits of |x| rounded to fmt's numbers, unbounded above."""
    rounded = _drop(magnitude, c.mantissa_bits - fmt.mantissa_bits, c, mode, _flip(fmt, c))
    if fmt.min_exponent < c.min_exponent:
        low = _among_subnormals(magnitude, fmt, c, mode)
        rounded = jnp.where(magnitude < c.const(1 << c.mantissa_bits), low, rounded)
    elif fmt.subnormals and fmt.min_exponent > c.min_exponent:  # if equal, it is the carrier's grid
        first_normal = c.const(c.bits_of(fmt.smallest_normal))
        rounded = jnp.where(magnitude < first_normal, _subnormal(magnitude, fmt, c, mode), rounded)
    if fmt.zero and fmt.subnormals:
        return rounded
    return _below_smallest(magnitude, rounded, fmt, c, mode, saturate)


def _subnormal(magnitude: jax.Array, fmt: Format, c: Carrier, mode: Mode) -> jax.Array:
    """Rounds |x| below the format's smallest normal number, itself a normal one of the carrier."""
    quantum = fmt.min_exponent - fmt.mantissa_bits
    if mode.rounding.name != "nearest_even" or quantum < c.min_exponent + 2:
        return _on_grid(magnitude, quantum, c, mode)
    # the same in fewer operations: a power of two brings the quantum to 1, and what a backend
    # flushes is less than half of it. (Adding and subtracting 2^(quantum + 23) would do too, but
    # XLA folds the two constants.)
    size = lax.bitcast_convert_type(magnitude, c.float)
    units = lax.round(size * np.asarray(2.0**-quantum, c.float), lax.RoundingMethod.TO_NEAREST_EVEN)
    return lax.bitcast_convert_type(units * np.asarray(2.0**quantum, c.float), c.uint)


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
    odd = (magnitude >> c.const(drop)) & c.const(1)
    if flip:
        odd = odd ^ c.const(1)
    return (magnitude + mode.addend(odd, dropped)) & kept


def _among_subnormals(magnitude: jax.Array, fmt: Format, c: Carrier, mode: Mode) -> jax.Array:
    """Rounds the carrier's subnormals where the format has normal numbers among them."""
    one = c.const(1)
    lowest = fmt.min_exponent - (c.min_exponent - c.mantissa_bits)
    lead = c.const(c.bits - 1) - lax.clz(magnitude | one)  # log2, in units of the smallest
    binade = jnp.maximum(lead, c.const(lowest))
    drop = jnp.maximum(binade, c.const(fmt.mantissa_bits)) - c.const(fmt.mantissa_bits)
    dropped = (one << drop) - one
    odd = (magnitude >> drop) & one
    if fmt.mantissa_bits == 0:  # the exponent field's last bit; below the lowest binade, that of 0
        assert fmt.bias is not None
        first = (fmt.min_exponent + fmt.bias - lowest) % 2
        odd = jnp.where(lead >= c.const(lowest), (binade + c.const(first)) & one, c.const(0))
    return (magnitude + mode.addend(odd, dropped)) & ~dropped


def _on_grid(magnitude: jax.Array, quantum: int, c: Carrier, mode: Mode) -> jax.Array:
    """Rounds |x| < 2^(quantum + mantissa bits) to a multiple of 2^quantum, by integers alone.

    Far below half a quantum only the fact that a number isn't zero is kept, but by a stochastic
    rounding, which goes up for ``floor(p * 2^w)`` of the 2^w values of its w random bits, p the
    distance from the lower multiple in quanta: the exact probability where w bits can express it.
    """
    one, m = c.const(1), c.mantissa_bits
    exponent = magnitude >> c.const(m)
    significand = magnitude & c.const((1 << m) - 1)
    significand = jnp.where(exponent > 0, significand | c.const(1 << m), significand)
    # in units of the carrier's smallest subnormal the significand stands `exponent - 1` bits up
    up = jnp.maximum(exponent, one) - one
    step = quantum - (c.min_exponent - m)  # the quantum in those units, as log2
    down = jnp.asarray(step, np.int32) - up.astype(np.int32)
    if mode.rounding.random:
        multiple = _drawn_multiple(significand, down, c, mode)
    else:
        far = down > c.bits - 1  # further than an integer has bits
        significand = jnp.where(far & (significand > 0), one, significand)
        shift = jnp.clip(down, 0, c.bits - 2).astype(c.uint)
        dropped = (one << shift) - one
        odd = (significand >> shift) & one
        multiple = (significand + mode.addend(odd, dropped)) >> shift
    if step >= m + 1:  # far enough up to be normal numbers of the carrier: a float does the rest
        size = multiple.astype(c.float) * np.asarray(2.0**quantum, c.float)
        return lax.bitcast_convert_type(size, c.uint)
    return from_units(multiple << c.const(step), c)


def _drawn_multiple(significand: jax.Array, down: jax.Array, c: Carrier, mode: Mode) -> jax.Array:
    """``significand / 2^down``, rounded up or down as the random bits say."""
    assert mode.noise is not None
    one, width = c.const(1), c.bits
    shift = jnp.clip(down, 0, width - 1).astype(c.uint)
    dropped = (one << shift) - one
    near = (significand + mode.addend((significand >> shift) & one, dropped)) >> shift
    # all of the significand is dropped: its highest `width` bits below the quantum stand against
    # all random bits
    part = significand >> jnp.clip(down - width, 0, width - 1).astype(c.uint)
    return jnp.where(down < width, near, (mode.noise > ~part).astype(c.uint))


def from_units(units: jax.Array, c: Carrier) -> jax.Array:
    """Bits of ``units * 2^(smallest subnormal's exponent)``: linear below twice the normals."""
    linear_below = c.const(2 << c.mantissa_bits)
    lead = c.const(c.bits - 1) - lax.clz(jnp.maximum(units, c.const(1)))
    shift = jnp.maximum(lead, c.const(c.mantissa_bits)) - c.const(c.mantissa_bits)
    body = (units >> shift) & c.const((1 << c.mantissa_bits) - 1)
    normal = ((shift + c.const(1)) << c.const(c.mantissa_bits)) | body
    return jnp.where(units < linear_below, units, normal)


def _below_smallest(
    magnitude: jax.Array, rounded: jax.Array, fmt: Format, c: Carrier, mode: Mode, saturate: Any
) -> jax.Array:
    """``rounded``, but below the format's smallest number either that or what stands below it.

    That is zero, or in a format without zero (E8M0) NaN. ONNX's table for E8M0, "0" and
    "x < E8M0_MIN": saturating, all that becomes the smallest number; else it is rounded as if half
    of the smallest number were the number below, under an odd code.
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
    """Whether random bits send magnitudes below the smallest number up to it."""
    noise = mode.noise
    assert noise is not None
    if not fmt.zero:  # from half of the smallest number on: one binade, whose bits are linear
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
    """High and low word of ``floor(x * 2^up)`` for an x below 2^(mantissa bits + 1).

    ``up`` is at most 2 more than a word has bits.
    """

    def clipped(n: jax.Array) -> jax.Array:
        return jnp.clip(n, 0, c.bits - 1).astype(c.uint)

    zero = jnp.zeros_like(x)
    low = jnp.where(up < 0, x >> clipped(-up), jnp.where(up < c.bits, x << clipped(up), zero))
    rising = jnp.where(up > 0, x >> clipped(c.bits - up), zero)
    return jnp.where(up < c.bits, rising, x << clipped(up - c.bits)), low


def _product(a: jax.Array, b: Any, c: Carrier) -> tuple[jax.Array, jax.Array]:
    """High and low word of the product of two words."""
    half = c.const(c.bits // 2)
    mask = c.const((1 << (c.bits // 2)) - 1)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    middle = a_high * b_low + ((a_low * b_low) >> half)  # below 2^w: (2^h - 1)^2 + 2^h - 1
    other = (middle & mask) + a_low * b_high
    return a_high * b_high + (middle >> half) + (other >> half), a * b
