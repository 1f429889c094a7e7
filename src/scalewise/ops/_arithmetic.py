"""The arithmetic of a machine with one float format, each result rounded once; sums in it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._check import Count, checked, checked_axes
from .._resolve import as_format
from .._types import Converted, kept
from ..formats import ROUNDINGS, Format, FormatLike, RoundingMode
from ..rounding import from_float64, round_bits, to_float64
from ..scaled import power_of_two
from ._operation import operation, with_derivative_of

DETERMINISTIC = tuple(name for name, mode in ROUNDINGS.items() if not mode.random)
# Products and quotients of numbers between 2^-k and 2^k are normal numbers of the carrier.
NARROW_RANGE, WIDE_RANGE = 62, 510


@checked
@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """``+ - * /``, the square root and ``a * b + c`` of numbers of a format, correctly rounded.

    Each is the exact result rounded once, in any deterministic rounding. Numbers are carried in
    float32 for up to 11 significant bits and magnitudes between 2^-62 and 2^62, else in float64 for
    up to 25 bits. A carrier of P bits holds products of p-bit numbers exactly, since P >= 2p. Sums
    rounded to nearest may be rounded to the carrier first, since P >= 2p + 2 (Figueroa, 1995). In
    the other roundings the carrier's sum is corrected to round-to-odd by its exact error, after
    which a second rounding is the only one (Boldo and Melquiond, 2008); so are ``a * b + c`` in all
    roundings, and quotients and roots by their exact remainder, since XLA may multiply by a rounded
    reciprocal in place of a division, and approximate a root.

    NaN, infinities and signed zeros are those of IEEE 754: an exact sum of zero is +0, but -0
    toward negative unless both operands are +0.

    Attributes:
        fmt: the format, or a name or dtype of one.
        rounding: the name of any of :data:`scalewise.formats.ROUNDINGS` but ``"stochastic"``.

    Raises:
        ValueError: a format of more than 25 significant bits or with magnitudes beyond 2^-510 to
            2^510, or another rounding.

    Example:
        >>> from scalewise.formats import FP16
        >>> fp16 = Arithmetic(FP16)
        >>> float(fp16.add(fp16.enter(2048.0), fp16.enter(1.0)))
        2048.0
    """

    fmt: Converted[Format, FormatLike] = kept()
    rounding: RoundingMode = "nearest_even"

    def __post_init__(self):
        object.__setattr__(self, "fmt", as_format(self.fmt, "Arithmetic"))
        if self.fmt.precision > 25:
            raise ValueError(
                f"Arithmetic: {self.fmt.name} has {self.fmt.precision} significant bits; "
                "expected up to 25, since results are carried in float64"
            )
        if not self._within(WIDE_RANGE):
            raise ValueError(
                f"Arithmetic: {self.fmt.name} has magnitudes from {float(self.fmt.smallest):.3g} "
                f"to {float(self.fmt.max):.3g}; expected 2^-{WIDE_RANGE} to 2^{WIDE_RANGE}, whose "
                "products float64 holds"
            )
        if self.rounding not in DETERMINISTIC:
            raise ValueError(
                f"Arithmetic: rounding is {self.rounding!r}; expected one of "
                + ", ".join(map(repr, DETERMINISTIC))
            )

    def _within(self, exponent: int) -> bool:
        return self.fmt.smallest * 2**exponent >= 1 and self.fmt.max < 2**exponent

    @property
    def wide(self) -> bool:
        """Whether numbers are carried in float64."""
        return self.fmt.precision > 11 or not self._within(NARROW_RANGE)

    @property
    def to_nearest(self) -> bool:
        """Whether the rounding is to one of the nearest numbers."""
        return ROUNDINGS[self.rounding].max_error == 0.5

    @property
    def carrier(self) -> type[np.float32 | np.float64]:
        return np.float64 if self.wide else np.float32

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Returns the context for all methods: x64 mode if the carrier is float64."""
        return jax.enable_x64(True) if self.wide else contextlib.nullcontext()

    # -- in and out ------------------------------------------------------------------------------

    def enter(self, x: ArrayLike) -> jax.Array:
        """Rounds a float array to nearest, once; returns numbers of the format in the carrier."""
        x = jnp.asarray(x, None if hasattr(x, "dtype") else self.carrier)
        if x.dtype == jnp.float64:
            return round_bits(x, self.fmt).astype(self.carrier)
        if self.wide:
            return round_bits(to_float64(x), self.fmt)
        return round_bits(x.astype(np.float32), self.fmt)

    def leave(self, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Converts numbers of the format to another float dtype, to nearest if it is narrower."""
        if self.wide:
            return from_float64(x, np.dtype(dtype))
        return x.astype(dtype)

    def const(self, x: float) -> jax.Array:
        """Returns a constant in the carrier's dtype, unrounded."""
        return cast(jax.Array, np.asarray(x, self.carrier))  # which a trace holds as a literal

    # -- operations: what is exact by a theorem isn't rounded again ------------------------------

    def round(self, x: jax.Array) -> jax.Array:
        return round_bits(x, self.fmt, rounding=self.rounding)

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.round(a + b) if self.to_nearest else self._sum(a, b)

    def significand(self, a: jax.Array) -> jax.Array:
        """:meth:`round` of finite numbers in the format's normal range, in few operations."""
        uint = np.uint64 if self.wide else np.uint32
        drop = (52 if self.wide else 23) - self.fmt.mantissa_bits
        if drop == 0:
            return a
        mask, shift = uint((1 << drop) - 1), uint(63 if self.wide else 31)
        bits = lax.bitcast_convert_type(a, uint)
        odd, negative = (bits >> uint(drop)) & uint(1), uint(0) - (bits >> shift)
        bits = bits + ROUNDINGS[self.rounding].addend(mask, odd, negative, None)
        return lax.bitcast_convert_type(bits & ~mask, self.carrier)

    def sub(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.round(a - b) if self.to_nearest else self._sum(a, -b)

    def mul(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.round(a * b)

    def fma(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """Returns ``a * b + c``, rounded once."""
        return self._sum(a * b, c)

    def _sum(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns the sum of two carrier numbers, rounded once by its exact error (TwoSum)."""
        total, lost = two_sum(a, b)
        y = self.round(to_odd(total, lost))
        if self.rounding != "toward_negative":
            return y
        signs = bits_of(a) | bits_of(b)
        return jnp.where((total == 0) & (signs != 0), self.round(self.const(-0.0)), y)

    def div(self, a: jax.Array, b: jax.Array) -> jax.Array:
        t = self._reduced(a / b)
        left = a - t * b
        return self.round(to_odd(t, jnp.where(b < 0, -left, left)))

    def sqrt(self, a: jax.Array) -> jax.Array:
        t = self._reduced(jnp.sqrt(a))
        return self.round(to_odd(t, a - t * t))

    def _reduced(self, a: jax.Array) -> jax.Array:
        """``a`` to p + 1 bits: where roundings to p bits change is among these numbers.

        Products of them with numbers of the format, and their squares, are exact in the carrier.
        """
        return lax.reduce_precision(a, 11 if self.wide else 8, self.fmt.precision)

    def shift(self, a: jax.Array, k: int | jax.Array) -> jax.Array:
        """Returns ``a * 2^k`` for any integers k, also where 2^k is no number of the format."""
        y = self.shift_exactly(a, k)
        if not self.to_nearest:  # what leaves the carrier is neither infinite nor zero
            limit = 2.0 ** (2 * (WIDE_RANGE if self.wide else NARROW_RANGE))
            held = jnp.copysign(jnp.clip(jnp.abs(y), self.const(1 / limit), self.const(limit)), a)
            y = jnp.where(jnp.isfinite(a) & (a != 0), held, y)
        return self.round(y)

    def shift_exactly(self, a: jax.Array, k: int | jax.Array) -> jax.Array:
        """Returns ``a * 2^k`` where that is known to be a number of the format."""
        if isinstance(k, int):
            limit = 1022 if self.wide else 126
            return a * self.const(2.0 ** max(-limit, min(limit, k)))
        return a * self.power(k)

    def power(self, k: jax.Array) -> jax.Array:
        """2^k in the carrier, k clipped to its exponents: wider than any format it carries."""
        lowest, highest = (-1022, 1023) if self.wide else (-126, 127)
        return power_of_two(jnp.clip(k, lowest, highest), self.carrier)

    def exponent(self, a: jax.Array) -> jax.Array:
        """Returns floor(log2(|a|)) as int32, read from the bits; for 0 less than for any number."""
        mantissa_bits, bias = (52, 1023) if self.wide else (23, 127)
        return ((bits_of(a) >> mantissa_bits) & (2 * bias + 1)).astype(np.int32) - bias


def bits_of(a: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(a, np.int64 if a.dtype == jnp.float64 else np.int32)


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a sum and what its rounding has lost, exactly."""
    total = a + b
    shared = total - a
    return total, (a - (total - shared)) + (b - shared)


def to_odd(a: jax.Array, lost: jax.Array) -> jax.Array:
    """``a``, one unit of its last bit toward ``a + lost`` if they differ and that bit is 0.

    That rounds ``a + lost`` to odd where ``lost`` is less than a unit. A ``lost`` of NaN, beside an
    infinity or a NaN, changes nothing.
    """
    bits = bits_of(a)
    one = bits.dtype.type(1)
    inexact = (lost != 0) & (lost == lost) & ((bits & one) == 0)
    step = jnp.where((lost > 0) == (a > 0), one, -one)
    return lax.bitcast_convert_type(jnp.where(inexact, bits + step, bits), a.dtype)


Axis = int | tuple[int, ...] | None
ORDERS = ("sequential", "blocked", "pairwise", "compensated")


@checked
def accumulate(
    arithmetic: Arithmetic, terms: jax.Array, order: str, block: Count = 32
) -> jax.Array:
    """Returns the sum of numbers of a format along the last axis, each addition rounded.

    Args:
        arithmetic: whose format the terms are numbers of.
        terms: (..., n) in the arithmetic's carrier.
        order: ``"sequential"``: from the first to the last, error up to (n - 1)u; ``"blocked"``:
            sequential in runs of ``block``, then over their sums, (block + n / block)u;
            ``"pairwise"``: halves, (log2 n)u; ``"compensated"``: sequential with Kahan's
            correction, 2u + O(n u^2). u is the unit roundoff; all are of the sum of magnitudes.
        block: terms in a run, for ``"blocked"``.

    Returns:
        (...) in the carrier; of no terms, zero.

    Raises:
        ValueError: another order, or a block that isn't positive.
    """
    check_order(order)
    return operation(
        "accumulate", _accumulated, terms, arithmetic=arithmetic, order=order, block=block
    )


def _accumulated(terms: jax.Array, **options: Any) -> jax.Array:
    return with_derivative_of(_exact_sum, _rounded_sum, tuple(options.items()), terms)


def _rounded_sum(terms: jax.Array, *, arithmetic: Arithmetic, **options: Any) -> jax.Array:
    with arithmetic.context():
        total = add_up(arithmetic.enter(terms), arithmetic=arithmetic, **options)
        return arithmetic.leave(total, terms.dtype)


def _exact_sum(terms: jax.Array, **_: object) -> jax.Array:
    return jnp.sum(terms, axis=-1)


def add_up(terms: jax.Array, *, arithmetic: Arithmetic, order: str, block: int) -> jax.Array:
    """Adds numbers as :func:`accumulate` does, within an operation."""
    n = terms.shape[-1]
    if n == 0:
        return jnp.zeros(terms.shape[:-1], terms.dtype)
    match order:
        case "sequential":
            return _sequential(arithmetic, terms)
        case "blocked":
            runs = pad(terms, -n % block)
            runs = runs.reshape(*terms.shape[:-1], -1, block)
            return _sequential(arithmetic, _sequential(arithmetic, runs))
        case "pairwise":
            while terms.shape[-1] > 1:
                terms = pad(terms, terms.shape[-1] % 2)
                middle = terms.shape[-1] // 2
                terms = arithmetic.add(terms[..., :middle], terms[..., middle:])
            return terms[..., 0]
    return _kahan(arithmetic, terms)


def check_order(order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; expected one of {', '.join(map(repr, ORDERS))}")


def as_rows(x: jax.Array, axis: Axis, name: str) -> tuple[jax.Array, tuple[int, ...]]:
    """Moves axes (None: all) to the end as one axis; returns that array and the axes, sorted."""
    axes = checked_axes(name, axis, x.ndim)
    rows = jnp.moveaxis(x, axes, range(-len(axes), 0)) if axes else x[..., None]
    length = math.prod(x.shape[a] for a in axes)
    return rows.reshape(*rows.shape[: x.ndim - len(axes)], length), axes


def pad(terms: jax.Array, count: int) -> jax.Array:
    return jnp.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, count)]) if count else terms


def _sequential(arithmetic: Arithmetic, terms: jax.Array) -> jax.Array:
    def step(total: jax.Array, term: jax.Array) -> tuple[jax.Array, None]:
        return arithmetic.add(total, term), None

    return lax.scan(step, terms[..., 0], jnp.moveaxis(terms, -1, 0)[1:])[0]


def _kahan(arithmetic: Arithmetic, terms: jax.Array) -> jax.Array:
    """Kahan, "Further remarks on reducing truncation errors", CACM 8:1 (1965).

    In an unsigned format sums are rounded toward zero, so that what they lose isn't negative.
    """
    if not arithmetic.fmt.signed:
        arithmetic = dataclasses.replace(arithmetic, rounding="toward_zero")

    def step(carry, term):
        total, lost = carry
        term = arithmetic.add(term, lost)
        new = arithmetic.add(total, term)
        return (new, arithmetic.sub(term, arithmetic.sub(new, total))), None

    zero = jnp.zeros(terms.shape[:-1], terms.dtype)
    return lax.scan(step, (zero, zero), jnp.moveaxis(terms, -1, 0))[0][0]
