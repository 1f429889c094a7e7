"""The Format class: the fields that define a floating-point format and all derived constants."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import numpy as np

from .._check import checked
from .._repr import changed_fields
from .._types import Converted, kept
from . import _codes

NaN = Literal["ieee", "all_ones", "negative_zero", "none"]


@checked
@dataclasses.dataclass(frozen=True)
class Format:
    """A floating-point format: the numbers that it represents, and their codes.

    A code consists of the sign s, the exponent field E and the mantissa field M, from the highest
    bit down. It represents ``(-1)^s * 2^(E - bias) * (1 + M / 2^mantissa_bits)`` if E > 0, and
    ``(-1)^s * 2^(1 - bias) * (M / 2^mantissa_bits)`` if E = 0 and the format has subnormals.

    Attributes:
        name: the name, in lower case by convention.
        exponent_bits: the width of the exponent field, 1 to 11.
        mantissa_bits: the width of the mantissa field, without the implicit bit, 0 to 52.
        bias: the exponent's bias, with which float64 represents every number of the format; by
            default 2^(exponent_bits - 1) - 1, as in IEEE 754.
        signed: whether there is a sign bit.
        subnormals: whether numbers with exponent field 0 are subnormal. Otherwise they are another
            binade of normal numbers, ``2^-bias * (1 + M / 2^mantissa_bits)``.
        infinities: whether there are infinities. With ``nan="ieee"`` infinity is the first code of
            the top binade, otherwise the largest code that isn't a NaN.
        nan: the codes of NaN. ``"ieee"``: those above infinity in the top binade; ``"all_ones"``:
            the code whose exponent and mantissa bits are all ones; ``"negative_zero"``: the code of
            -0; ``"none"``: the format has no NaN.
        negative_zero: whether the code of -0 represents -0.
        zero: whether code 0 represents zero (not in E8M0).

    Example:
        >>> import scalewise as sw
        >>> e6m9 = sw.Format("e6m9", exponent_bits=6, mantissa_bits=9)
        >>> e6m9.bias, e6m9.bits, float(e6m9.max)
        (31, 16, 4290772992.0)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: Converted[int, int | None] = kept(None)
    signed: bool = True
    subnormals: bool = True
    infinities: bool = True
    nan: NaN = "ieee"
    negative_zero: Converted[bool, bool | None] = kept(None)
    zero: bool = True

    def __post_init__(self):
        def refuse(field: str, accepted: str):
            raise ValueError(
                f"Format({self.name!r}): {field} is {getattr(self, field)!r}; expected {accepted}"
            )

        for field, low, high in (("exponent_bits", 1, 11), ("mantissa_bits", 0, 52)):
            value = getattr(self, field)
            if not low <= value <= high:
                refuse(field, f"an integer from {low} to {high}")
        if self.bias is None:
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        if abs(self.bias) > 2**16:  # 2^bias would take too long
            refuse("bias", "an integer with which float64 holds every number")
        if self.negative_zero is None:
            default = self.signed and self.zero and self.nan != "negative_zero"
            object.__setattr__(self, "negative_zero", default)
        if self.negative_zero and (not self.signed or self.nan == "negative_zero"):
            refuse("negative_zero", "False, since its code is taken or there is no sign")
        if self.nan == "negative_zero" and not (self.signed and self.zero):
            what = "a format without zero" if self.signed else "an unsigned format"
            refuse("nan", f"another encoding: {what} has no code for -0")
        if not self.zero and self.subnormals:
            refuse("zero", "True where there are subnormals, whose mantissa is 0 in the code of 0")
        if self.nan == "ieee" and (self.mantissa_bits == 0 or self.exponent_bits == 1):
            few = "without mantissa bits" if self.exponent_bits > 1 else "with one exponent bit"
            refuse("nan", f"'all_ones', 'negative_zero' or 'none' {few}")
        if self.max_code < 1:
            refuse("nan", "an encoding that leaves at least one positive number")
        # the least and the most that can be added to all exponents
        low, high = -1074 + self.mantissa_bits - self.min_exponent, 1023 - self.max_exponent
        if not low <= 0 <= high:
            fits = "an integer" if low > high else f"{self.bias - high} to {self.bias - low}"
            refuse("bias", f"{fits}, with which float64 holds every number")

    # -- layout ----------------------------------------------------------------------------------

    @property
    def bits(self) -> int:
        """The width of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def element(self) -> Format:
        """The format itself, where a block format has the format of its elements."""
        return self

    @property
    def bits_per_element(self) -> float:
        """The width of a code, where a block format adds the scales' share."""
        return self.bits

    @property
    def precision(self) -> int:
        """The significant bits of a normal number, including the implicit bit."""
        return self.mantissa_bits + 1

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype of NumPy or ml_dtypes that implements this format, or None."""
        known = CATALOGUE_DTYPES.get(self)
        return None if known is None else np.dtype(known)

    @property
    def code_dtype(self) -> np.dtype:
        """The narrowest unsigned integer dtype that holds a code."""
        return np.dtype(f"uint{next(w for w in (8, 16, 32, 64) if w >= self.bits)}")

    def __repr__(self) -> str:
        width = f"exponent_bits={self.exponent_bits}, mantissa_bits={self.mantissa_bits}"
        given = ("name", "exponent_bits", "mantissa_bits")
        changed = changed_fields(
            self, *given, bias=2 ** (self.exponent_bits - 1) - 1,
            negative_zero=self.signed and self.zero and self.nan != "negative_zero",
        )  # fmt: skip
        return f"Format({', '.join([repr(self.name), width, *changed])})"

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
        """The code of the NaN that ``encode`` returns (quiet, positive if possible), or None."""
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
        """Returns the number of a finite positive code, exactly."""
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
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
        """The smallest positive number that isn't subnormal."""
        return self.exact(1 << self.mantissa_bits) if self.subnormals else self.smallest

    @property
    def smallest_subnormal(self) -> Fraction | None:
        """The smallest positive subnormal number, or None in a format without subnormals."""
        return self.smallest if self.subnormals and self.mantissa_bits else None

    @property
    def eps(self) -> Fraction:
        """The spacing of the numbers from 1 to 2."""
        return Fraction(1, 2**self.mantissa_bits)

    @property
    def decimal_digits(self) -> float:
        """The decimal digits of a significand, ``precision * log10(2)``: 3.3 in FP16."""
        return self.precision * math.log10(2)

    @property
    def round_trip_digits(self) -> tuple[int, int]:
        """How many decimal digits survive a decimal number's way into the format and back, and how
        many a number of the format needs in decimal to be read back as itself; normal numbers.

        These are C's ``DIG`` and ``DECIMAL_DIG``, C++'s ``digits10`` and ``max_digits10``.
        """
        kept = math.floor((self.precision - 1) * math.log10(2))
        return kept, math.ceil(1 + self.precision * math.log10(2))

    @cached_property
    def max_exponent(self) -> int:
        """The exponent of the largest number, ``floor(log2(max))``."""
        return _log2(self.max)

    @cached_property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number, ``floor(log2(smallest_normal))``.

        The smallest spacing of the format's numbers is ``2^(min_exponent - mantissa_bits)``.
        """
        return _log2(self.smallest_normal)

    # -- codes -----------------------------------------------------------------------------------

    def values(self) -> np.ndarray:
        """Returns the numbers of all codes in order, as float64 (formats of up to 16 bits)."""
        if self.bits > 16:
            raise ValueError(
                f"values: {self.name} has {self.bits} bits; expected a format of up to 16 bits"
            )
        return self.decode(np.arange(2**self.bits, dtype=np.uint32))

    def decode(self, codes: Any) -> np.ndarray:
        """Returns the numbers of codes, integers from 0 to 2^bits - 1, exactly, as float64."""
        return _codes.decode(self, codes)

    def encode(
        self,
        values: Any,
        *,
        rounding: str = "nearest_even",
        saturate: bool | str = False,
        bits: Any = None,
    ) -> np.ndarray:
        """Returns the codes of numbers, each rounded once.

        Args:
            values: real numbers, any shape, of float64 or a narrower dtype.
            rounding: ``"nearest_even"`` (ties to the even code), ``"nearest_away"``,
                ``"toward_zero"``, ``"toward_positive"``, ``"toward_negative"``,
                ``"away_from_zero"``, ``"to_odd"``, ``"stochastic"``; for a scale format (one
                without zero) also ONNX's ``"up"``, ``"down"``, ``"nearest"`` (ties up).
            saturate: False: overflow becomes infinity, or NaN in a format without infinities, or
                the largest number in a format without either. True: overflow and infinities become
                the largest number. ``"finite"``: overflow of finite values does, infinities don't.
                In a format without zero, values that round below the smallest number become NaN if
                ``saturate`` is False, else the smallest number.
            bits: uniform random uint32 or uint64 of the values' shape, for ``"stochastic"``.

        Returns:
            Unsigned integers of the narrowest dtype that holds a code. NaN becomes code 0 in a
            format without NaN; negative numbers become NaN in an unsigned format.

        Example:
            >>> Format("e4m3", 4, 3).encode([1.0, 1.1, -300.0], rounding="toward_zero")
            array([ 56,  56, 247], dtype=uint8)
        """
        return _codes.encode(self, values, rounding, saturate, bits)

    def unsigned(self, name: str | None = None) -> Format:
        """Returns this format with a mantissa bit instead of the sign bit, for numbers >= 0.

        The width and the exponent's range stay, and the spacing halves. If NaN has the code of -0
        in this format, it has the code of all ones in the new one.

        Its name is by default like ``"ue5m11"``.

        Example:
            >>> Format("fp16", 5, 10).unsigned().decode([0x7800, 1]).tolist() == [1.0, 2.0**-25]
            True
        """
        if not self.signed:
            raise ValueError(f"unsigned: {self.name} is unsigned; expected a signed format")
        mantissa_bits = self.mantissa_bits + 1
        return dataclasses.replace(
            self, name=name or f"ue{self.exponent_bits}m{mantissa_bits}",
            mantissa_bits=mantissa_bits, signed=False,
            nan="all_ones" if self.nan == "negative_zero" else self.nan, negative_zero=False,
        )  # fmt: skip


def _log2(x: Fraction) -> int:
    n = x.numerator.bit_length() - x.denominator.bit_length()
    return n if Fraction(2) ** n <= x else n - 1


# of the catalogue's formats
CATALOGUE_DTYPES: dict[Format, Any] = {}
