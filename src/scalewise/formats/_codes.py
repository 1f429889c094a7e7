"""Exact conversion between numbers and codes in NumPy: encode and decode."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._roundings import Rest, Rounding, rounding_mode

SATURATE = (False, True, "finite")


# ``fmt`` below is a ``Format``, typed as Any because _format.py imports this file.
def check_saturate(saturate: Any) -> None:
    """Raises ValueError unless ``saturate`` is False, True or "finite"."""
    if not any(saturate is s or saturate == s for s in SATURATE):
        raise ValueError(f"saturate is {saturate!r}; expected one of False, True, 'finite'")


def check_codes(fmt: Any, codes: Any) -> None:
    """Raises ValueError for integers, a NumPy or JAX array, that aren't all codes of a format."""
    if not codes.size:
        return
    lowest, highest = int(codes.min()), int(codes.max())  # JAX compares 256 to a uint8 as 0
    if lowest < 0 or highest >= 2**fmt.bits:
        raise ValueError(
            f"codes of {fmt.name} are from {lowest} to {highest}; expected 0 to {2**fmt.bits - 1}"
        )


def decode(fmt: Any, codes: Any) -> np.ndarray:
    """Returns the numbers of codes (see ``Format.decode``)."""
    codes = np.asarray(codes)
    if not np.issubdtype(codes.dtype, np.integer):
        raise TypeError(f"codes of {fmt.name} are {codes.dtype}; expected integers")
    check_codes(fmt, codes)
    codes = codes.astype(np.uint64)
    magnitude_bits = fmt.exponent_bits + fmt.mantissa_bits
    magnitude = codes & np.uint64(2**magnitude_bits - 1)
    negative = (codes >> np.uint64(magnitude_bits)) > 0
    exponent = (magnitude >> np.uint64(fmt.mantissa_bits)).astype(np.int64)
    mantissa = (magnitude & np.uint64(2**fmt.mantissa_bits - 1)).astype(np.float64)
    low = exponent == 0
    implicit = np.where(low & fmt.subnormals, 0.0, 2.0**fmt.mantissa_bits)
    if fmt.subnormals:
        exponent = np.maximum(exponent, 1)
    exponent = (exponent - fmt.bias - fmt.mantissa_bits).astype(np.int32)
    with np.errstate(over="ignore"):  # in codes that become infinity or NaN below
        x = np.ldexp(implicit + mantissa, exponent)
    if fmt.zero:
        x = np.where(magnitude == 0, 0.0, x)
    if fmt.infinity_code is not None:
        x = np.where(magnitude == fmt.infinity_code, np.inf, x)
    if fmt.nan in ("ieee", "all_ones"):
        last = fmt.infinity_code if fmt.infinity_code is not None else fmt.max_code
        x = np.where(magnitude > last, np.nan, x)
    x = np.where(negative, -x, x)
    if fmt.nan == "negative_zero":
        x = np.where(negative & (magnitude == 0), np.nan, x)
    elif fmt.signed and fmt.zero and not fmt.negative_zero:
        x = np.where(magnitude == 0, 0.0, x)
    return x


def encode(
    fmt: Any, values: Any, rounding: str, saturate: bool | str, bits: Any = None
) -> np.ndarray:
    """Returns the codes of numbers (see ``Format.encode``)."""
    check_saturate(saturate)
    values = np.asarray(values)
    if values.dtype.kind not in "fiub" and values.dtype.kind != "V":
        raise TypeError(f"{fmt.name}.encode: values are {values.dtype}; expected real numbers")
    mode = rounding_mode(rounding, fmt)
    draw = _draw(mode, bits, values.shape)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        x = values.astype(np.float64)
    size, negative = np.abs(x), np.signbit(x)
    finite = np.isfinite(x)
    magnitude = _round_magnitude(fmt, np.where(finite, size, 0.0), negative, mode, draw)
    if not fmt.zero:  # no code for zero and results below the smallest number
        magnitude = np.where(finite & (magnitude < 0) & (saturate is not False), 0, magnitude)
    beyond = _overflow(fmt, saturate in (True, "finite"))
    leaves = np.where(negative, mode.overflows[1], mode.overflows[0])
    over = finite & (magnitude > fmt.max_code)
    magnitude = np.where(over, np.where(leaves, beyond, fmt.max_code), magnitude)
    magnitude = np.where(np.isinf(x), _overflow(fmt, saturate is True), magnitude)
    nan = np.isnan(x) | (magnitude < 0)
    if not fmt.signed:
        nan |= x < 0
    negative &= fmt.signed
    if fmt.zero and not fmt.negative_zero:
        negative &= magnitude != 0
    code = magnitude + (negative.astype(np.int64) << (fmt.bits - 1) if fmt.signed else 0)
    return np.where(nan, fmt.nan_code or 0, code).astype(fmt.code_dtype)


def _draw(mode: Rounding, bits: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    if not mode.random:
        if bits is not None:
            raise ValueError(f"bits is given; expected None for rounding={mode.name!r}")
        return None
    given = np.asarray(bits)
    if given.dtype.name not in ("uint32", "uint64") or given.shape != shape:
        raise ValueError(
            f"bits is {given.dtype} of shape {given.shape}; "
            f"expected uint32 or uint64 of the values' shape {shape} for rounding='stochastic'"
        )
    width = given.itemsize * 8
    kept = min(width, 53)  # a float64 has 53 significant bits
    return np.ldexp((given.astype(np.uint64) >> np.uint64(width - kept)).astype(np.float64), -kept)


def _round_magnitude(
    fmt: Any, size: np.ndarray, negative: np.ndarray, mode: Rounding, draw: np.ndarray | None
) -> np.ndarray:
    """Returns the codes of rounded magnitudes, unbounded above; -1 below the smallest number."""
    m = fmt.mantissa_bits
    _, exponent = np.frexp(size)
    exponent = np.where(size == 0, fmt.min_exponent, exponent.astype(np.int64) - 1)
    exponent = np.maximum(exponent, fmt.min_exponent)
    significand = np.ldexp(size, (m - exponent).astype(np.int32))
    down = np.floor(significand)
    rest = np.where((significand == 0) & (size > 0), 2.0**-1000, significand - down)
    code = ((exponent + fmt.bias - 1) << m) + down.astype(np.int64)
    # the parity of the code, which without mantissa bits (E8M0) is not that of the significand
    code += mode.goes_up(_rest(rest, draw), code % 2 == 1, negative)
    if fmt.subnormals:
        return code
    smallest = float(fmt.smallest)
    below = size < smallest
    if fmt.zero:  # round between zero (code 0) and the smallest number
        part = np.where(below, size / smallest, 0.0)
        part = np.where((part == 0) & below & (size > 0), 2.0**-1000, part)
        rest = _rest(part, draw)
        up = mode.goes_up(rest, np.zeros_like(below), negative)
        return np.where(below, up.astype(np.int64), code)
    # without zero, round between the smallest number (code 0) and half of it (as if code -1)
    rest = np.clip(np.where(below, 2 * (size / smallest) - 1, 0.0), 0, None)
    rest = np.where((rest == 0) & (size > 0), 2.0**-1000, rest)
    up = mode.goes_up(_rest(rest, draw), np.ones_like(below), negative) & (size > 0)
    return np.where(below, up.astype(np.int64) - 1, code)


def _rest(part: np.ndarray, draw: np.ndarray | None) -> Rest:
    """Returns the Rest of magnitudes at the fraction ``part`` (0 to 1) of the way to the upper.

    Of the 2^w values of w random bits, ``floor(part * 2^w)`` round up.
    """
    drawn = None if draw is None else part >= 1 - draw
    return Rest(part > 0, part == 0.5, part > 0.5, drawn)


def _overflow(fmt: Any, saturate: bool) -> int:
    """Returns the positive code that replaces an overflow; -1 stands for NaN."""
    if saturate:
        return fmt.max_code
    if fmt.infinity_code is not None:
        return fmt.infinity_code
    return fmt.max_code if fmt.nan_code is None else -1
