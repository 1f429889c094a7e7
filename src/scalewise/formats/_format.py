"""A floating-point format: a few plain fields, from which all else is derived, exactly."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import ml_dtypes
import numpy as np

from . import _codes

NaN = Literal["ieee", "all_ones", "negative_zero", "none"]
NAN_ENCODINGS = ("ieee", "all_ones", "negative_zero", "none")

# Formats that NumPy or ml_dtypes can store, by name.
_DTYPES = {
    "fp64": np.float64,
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3": ml_dtypes.float8_e4m3,
    "e3m4": ml_dtypes.float8_e3m4,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
}


@dataclasses.dataclass(frozen=True)
class Format:
    """Which numbers a format holds, and by which codes.

    A code is sign, exponent field, mantissa field, from the highest bit down. With exponent field
    E > 0 it means ``(-1)^s * 2^(E - bias) * (1 + M / 2^mantissa_bits)``; with E = 0 it means
    ``(-1)^s * 2^(1 - bias) * (M / 2^mantissa_bits)`` where there are subnormals.

    Attributes:
        name: lower case by convention.
        exponent_bits: 1 to 11.
        mantissa_bits: fraction bits without the implicit one, 0 to 52.
        bias: of the exponent, such that float64 holds every number; by default
            2^(exponent_bits - 1) - 1, as in IEEE 754.
        signed: one bit for the sign.
        subnormals: whether exponent field 0 holds subnormals. If not, it is one more binade of
            normal numbers, ``2^-bias * (1 + M / 2^mantissa_bits)``.
        infinities: whether there are infinities: the first code of the top binade with IEEE NaNs,
            else the largest code that isn't a NaN.
        nan: ``"ieee"``: the rest of the top binade; ``"all_ones"``: only the code whose exponent
            and mantissa bits are all ones; ``"negative_zero"``: only the code of -0; ``"none"``.
        negative_zero: whether the code of -0 means -0.
        zero: whether code 0 means zero (not in E8M0).

    Raises:
        ValueError: a field out of its range, or fields that leave no finite number.

    Example:
        >>> e6m9 = Format("e6m9", exponent_bits=6, mantissa_bits=9)
        >>> e6m9.bias, e6m9.bits, float(e6m9.max)
        (31, 16, 4290772992.0)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    signed: bool = True
    subnormals: bool = True
    infinities: bool = True
    nan: NaN = "ieee"
    negative_zero: bool | None = None
    zero: bool = True

    def __post_init__(self):
        def refuse(field: str, accepted: str):
            raise ValueError(
                f"Format({self.name!r}): {field} is {getattr(self, field)!r}; accepted: {accepted}"
            )

        for field, low, high in (("exponent_bits", 1, 11), ("mantissa_bits", 0, 52)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                refuse(field, f"an integer from {low} to {high}")
        if self.bias is None:
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        if type(self.bias) is not int or abs(self.bias) > 2**16:  # 2^bias would not end
            refuse("bias", "an integer with which float64 holds every number")
        if self.nan not in NAN_ENCODINGS:
            refuse("nan", ", ".join(repr(n) for n in NAN_ENCODINGS))
        if self.negative_zero is None:
            default = self.signed and self.zero and self.nan != "negative_zero"
            object.__setattr__(self, "negative_zero", default)
        if self.negative_zero and (not self.signed or self.nan == "negative_zero"):
            refuse("negative_zero", "False, since its code is taken or there is no sign")
        if self.nan == "negative_zero" and not self.signed:
            refuse("nan", "another encoding: an unsigned format has no code for -0")
        if self.nan == "negative_zero" and not self.zero:
            refuse("nan", "another encoding: a format without zero has no code for -0")
        if not self.zero and self.subnormals:
            refuse("zero", "True where there are subnormals, whose mantissa is 0 in the code of 0")
        if self.nan == "ieee" and self.mantissa_bits == 0:
            refuse(
                "nan",
                "'all_ones', 'negative_zero' or 'none' without mantissa bits, since the top "
                "exponent then has one code, for infinity or for NaN",
            )
        if self.nan == "ieee" and self.exponent_bits == 1:
            refuse("nan", "'all_ones', 'negative_zero' or 'none' with one exponent bit")
        if self.max_code < 1:
            refuse("nan", "an encoding that leaves at least one positive number")
        low = -1074 + self.mantissa_bits - self.min_exponent  # of what can be added to exponents
        high = 1023 - self.max_exponent
        if not low <= 0 <= high:
            assert self.bias is not None
            fits = "an integer" if low > high else f"{self.bias - high} to {self.bias - low}"
            refuse("bias", f"{fits}, with which float64 holds every number")

    # -- layout ----------------------------------------------------------------------------------

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def precision(self) -> int:
        """Significant bits of a normal number, the implicit one included."""
        return self.mantissa_bits + 1

    @property
    def dtype(self) -> np.dtype | None:
        """The storage dtype of NumPy or ml_dtypes that holds just this format, or None."""
        known = CATALOGUE_DTYPES.get(self)
        return None if known is None else np.dtype(known)

    @property
    def code_dtype(self) -> np.dtype:
        """The smallest unsigned integer that holds a code."""
        return np.dtype(f"uint{next(w for w in (8, 16, 32, 64) if w >= self.bits)}")

    @cached_property
    def max_code(self) -> int:
        """The positive code of the largest finite number."""
        if self.nan == "ieee":
            return ((2**self.exponent_bits - 1) << self.mantissa_bits) - 1
        top = 2 ** (self.exponent_bits + self.mantissa_bits) - 1
        return top - (self.nan == "all_ones") - self.infinities

    @property
    def infinity_code(self) -> int | None:
        """The positive code of infinity, or None."""
        return self.max_code + 1 if self.infinities else None

    @property
    def nan_code(self) -> int | None:
        """The code of the NaN that ``encode`` makes (quiet, positive if it can be), or None."""
        if self.nan == "none":
            return None
        if self.nan == "negative_zero":
            return 1 << (self.bits - 1)
        top = 2 ** (self.exponent_bits + self.mantissa_bits) - 1
        if self.nan == "all_ones" or self.mantissa_bits == 0:
            return top
        return self.max_code + 1 + (1 << (self.mantissa_bits - 1))

    # -- numbers ---------------------------------------------------------------------------------

    def exact(self, code: int) -> Fraction:
        """The finite number of a positive code, exactly."""
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        assert self.bias is not None
        if exponent == 0 and (self.subnormals or (code == 0 and self.zero)):
            return Fraction(mantissa) * Fraction(2) ** (1 - self.bias - self.mantissa_bits)
        significand = Fraction((1 << self.mantissa_bits) + mantissa)
        return significand * Fraction(2) ** (exponent - self.bias - self.mantissa_bits)

    @cached_property
    def max(self) -> Fraction:
        """The largest finite number."""
        return self.exact(self.max_code)

    @cached_property
    def smallest(self) -> Fraction:
        """The smallest positive number."""
        return self.exact(1 if self.zero else 0)

    @cached_property
    def smallest_normal(self) -> Fraction:
        """The smallest positive number with full precision."""
        return self.exact(1 << self.mantissa_bits) if self.subnormals else self.smallest

    @property
    def smallest_subnormal(self) -> Fraction | None:
        """The smallest positive subnormal number, or None where there are none."""
        return self.smallest if self.subnormals and self.mantissa_bits else None

    @property
    def eps(self) -> Fraction:
        """The spacing of the numbers from 1 to 2."""
        return Fraction(1, 2**self.mantissa_bits)

    @cached_property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        return _log2(self.max)

    @cached_property
    def min_exponent(self) -> int:
        """floor(log2(smallest_normal)): no quantum is finer than ``2^(this - mantissa_bits)``."""
        return _log2(self.smallest_normal)

    # -- codes -----------------------------------------------------------------------------------

    def values(self) -> np.ndarray:
        """The number of each code, in the order of codes, float64 (up to 16 bits)."""
        if self.bits > 16:
            raise ValueError(f"{self.name} has 2^{self.bits} codes; values() lists up to 16 bits")
        return self.decode(np.arange(2**self.bits, dtype=np.uint32))

    def decode(self, codes: Any) -> np.ndarray:
        """The numbers of codes, exactly.

        Args:
            codes: integers from 0 to 2^bits - 1, any shape.

        Returns:
            float64 of the same shape.

        Raises:
            TypeError: codes aren't integers.
            ValueError: a code is out of range.
        """
        return _codes.decode(self, codes)

    def encode(
        self,
        values: Any,
        *,
        rounding: str = "nearest_even",
        saturate: bool | str = False,
        bits: Any = None,
    ) -> np.ndarray:
        """The codes of numbers, each rounded once.

        Args:
            values: real numbers, any shape; float64 and narrower are taken as they are.
            rounding: ``"nearest_even"`` (ties to the even code), ``"nearest_away"``,
                ``"toward_zero"``, ``"toward_positive"``, ``"toward_negative"``,
                ``"away_from_zero"``, ``"to_odd"``, ``"stochastic"``; for a format without zero (a
                scale) also ONNX's ``"up"``, ``"down"``, ``"nearest"`` (ties up).
            saturate: False: overflow goes to infinity, else NaN, else the largest number; True:
                overflow and infinities go to the largest number; ``"finite"``: only overflow does.
                Without a zero, zero and what rounds below the smallest number is NaN if False,
                else that number.
            bits: uniform random uint32 or uint64 of the values' shape, for ``"stochastic"``.

        Returns:
            Unsigned integers of the smallest width that holds a code. NaN in a format without one
            is code 0; a negative number in an unsigned format is NaN.

        Raises:
            TypeError: values aren't real numbers.
            ValueError: an unknown ``rounding`` or ``saturate``, or ``bits`` that don't fit.

        Example:
            >>> Format("e4m3", 4, 3).encode([1.0, 1.1, -300.0], rounding="toward_zero")
            array([ 56,  56, 247], dtype=uint8)
        """
        return _codes.encode(self, values, rounding, saturate, bits)

    def unsigned(self, name: str | None = None) -> Format:
        """The format whose sign bit is one more mantissa bit, for what is never negative.

        As wide as this one, with its exponents and twice its precision. NaN, if it had the code of
        -0, has the code of all ones.

        Args:
            name: ``"u"``, exponent and mantissa bits by default, like ``"ue5m11"``.

        Raises:
            ValueError: the format has no sign, or already 52 mantissa bits.

        Example:
            >>> Format("fp16", 5, 10).unsigned().decode([0x7800, 1]).tolist() == [1.0, 2.0**-25]
            True
        """
        if not self.signed:
            raise ValueError(f"{self.name} is unsigned already")
        mantissa_bits = self.mantissa_bits + 1
        return dataclasses.replace(
            self,
            name=name or f"ue{self.exponent_bits}m{mantissa_bits}",
            mantissa_bits=mantissa_bits,
            signed=False,
            nan="all_ones" if self.nan == "negative_zero" else self.nan,
            negative_zero=False,
        )


def _log2(x: Fraction) -> int:
    n = x.numerator.bit_length() - x.denominator.bit_length()
    return n if Fraction(2) ** n <= x else n - 1


CATALOGUE_DTYPES: dict[Format, Any] = {}


def register_dtype(fmt: Format) -> Format:
    """Connects a catalogue format with its storage dtype."""
    if fmt.name in _DTYPES:
        CATALOGUE_DTYPES[fmt] = _DTYPES[fmt.name]
    return fmt
