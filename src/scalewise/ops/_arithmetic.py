"""The arithmetic of a machine that has one float format: every operation rounded to it, once."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..rounding import from_float64, round_bits, to_float64

ROUNDINGS = ("nearest_even", "toward_zero")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """``+ - * /`` and the square root of numbers of a format, each correctly rounded to it.

    Numbers are carried in float32 where that is provably no different: for up to 11 significant
    bits, since 24 >= 2p + 2 makes rounding to float32 first innocuous (Figueroa, 1995; towards zero
    too, because an inexact quotient or root keeps 2^-2p away from every number of p bits), and
    magnitudes between 2^-63 and 2^63, whose products float32 neither overflows nor flushes. Else
    in float64, for up to 25 bits.

    Attributes:
        fmt: the format.
        rounding: ``"nearest_even"`` or ``"toward_zero"``.

    Raises:
        ValueError: a format of more than 25 significant bits, or another rounding.

    Example:
        >>> from scalewise.formats import FP16
        >>> fp16 = Arithmetic(FP16)
        >>> float(fp16.add(fp16.enter(2048.0), fp16.enter(1.0)))
        2048.0
    """

    fmt: Format
    rounding: str = "nearest_even"

    def __post_init__(self):
        if self.fmt.precision > 25:
            raise ValueError(
                f"Arithmetic: {self.fmt.name} has {self.fmt.precision} significant bits; "
                "accepted: up to 25, since results are carried in float64"
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"Arithmetic: rounding is {self.rounding!r}; accepted: "
                + ", ".join(map(repr, ROUNDINGS))
            )

    @property
    def wide(self) -> bool:
        """Whether numbers are carried in float64."""
        small = float(self.fmt.smallest) >= 2.0**-63 and float(self.fmt.max) < 2.0**63
        return not (self.fmt.precision <= 11 and small)

    @property
    def carrier(self) -> Any:
        return np.float64 if self.wide else np.float32

    @property
    def unit(self) -> float:
        """The unit roundoff u: half the spacing at 1, or the whole towards zero."""
        return 2.0 ** -(self.fmt.precision - (self.rounding == "toward_zero"))

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What has to stand around all that follows: float64, where it is the carrier."""
        return jax.enable_x64(True) if self.wide else contextlib.nullcontext()

    # -- in and out ------------------------------------------------------------------------------

    def enter(self, x: Any) -> jax.Array:
        """Any float array as numbers of the format: rounded to nearest once, in the carrier."""
        x = jnp.asarray(x, None if hasattr(x, "dtype") else self.carrier)
        if x.dtype == jnp.float64:
            return round_bits(x, self.fmt).astype(self.carrier)
        if self.wide:
            return round_bits(to_float64(x), self.fmt)
        return round_bits(x.astype(np.float32), self.fmt)

    def leave(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Numbers of the format in another float type, to nearest where it is too narrow."""
        if self.wide:
            return from_float64(x, np.dtype(dtype))
        return x.astype(dtype)

    def const(self, x: float) -> Any:
        """A number of the carrier, as it is."""
        return np.asarray(x, self.carrier)

    # -- operations: what is exact by a theorem isn't rounded again ------------------------------

    def round(self, x: jax.Array) -> jax.Array:
        return round_bits(x, self.fmt, rounding=self.rounding)

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.round(a + b)

    def significand(self, a: jax.Array) -> jax.Array:
        """:meth:`round` of finite numbers in the format's normal range, in few operations."""
        uint = np.uint64 if self.wide else np.uint32
        drop = (52 if self.wide else 23) - self.fmt.mantissa_bits
        if drop == 0:
            return a
        bits = lax.bitcast_convert_type(a, uint)
        if self.rounding == "nearest_even":
            bits = bits + (uint((1 << (drop - 1)) - 1) + ((bits >> uint(drop)) & uint(1)))
        return lax.bitcast_convert_type(bits & ~uint((1 << drop) - 1), self.carrier)

    def sub(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.round(a - b)

    def mul(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.round(a * b)

    def div(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self.round(a / b)

    def sqrt(self, a: jax.Array) -> jax.Array:
        return self.round(jnp.sqrt(a))

    def shift(self, a: jax.Array, k: Any) -> jax.Array:
        """``a * 2^k``, k any integers (``ldexp``); 2^k itself need be no number of the format."""
        return self.round(self.shift_exactly(a, k))

    def shift_exactly(self, a: jax.Array, k: Any) -> jax.Array:
        """``a * 2^k`` where that is known to be a number of the format."""
        if isinstance(k, int):
            return a * self.const(2.0**k)
        return a * self.power(k)

    def power(self, k: jax.Array) -> jax.Array:
        """2^k in the carrier, k clipped to its exponents: wider than any format it carries."""
        if self.wide:
            field = jnp.clip(k, -1022, 1023).astype(np.int64) + 1023
            return lax.bitcast_convert_type(field << 52, np.float64)
        field = jnp.clip(k, -126, 127).astype(np.int32) + 127
        return lax.bitcast_convert_type(field << 23, np.float32)

    def exponent(self, a: jax.Array) -> jax.Array:
        """floor(log2(|a|)) as int32, by the bits; of zero, less than that of any number."""
        if self.wide:
            bits = lax.bitcast_convert_type(a, np.int64)
            return ((bits >> 52) & 0x7FF).astype(np.int32) - 1023
        bits = lax.bitcast_convert_type(a, np.int32)
        return ((bits >> 23) & 0xFF) - 127
