"""Encode and decode: between numbers and codes, exactly, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

SATURATE = (False, True, "finite")


# ``fmt`` below is a ``Format``; its own file imports this one, so that arrows go one way.
def check_saturate(saturate: Any) -> None:
    """Raises ValueError unless ``saturate`` is False, True or "finite"."""
    if not any(saturate is s or saturate == s for s in SATURATE):
        raise ValueError(f"saturate is {saturate!r}; accepted: False, True, 'finite'")


def decode(fmt: Any, codes: Any) -> np.ndarray:
    """The numbers of codes (see ``Format.decode``)."""
    codes = np.asarray(codes)
    if not np.issubdtype(codes.dtype, np.integer):
        raise TypeError(f"codes of {fmt.name} are integers, not {codes.dtype}")
    if codes.size and (codes.min() < 0 or codes.max() >= 2**fmt.bits):
        raise ValueError(
            f"codes of {fmt.name} go from 0 to {2**fmt.bits - 1}; "
            f"got {codes.min()} to {codes.max()}"
        )
    codes = codes.astype(np.uint64)
    magnitude_bits = fmt.exponent_bits + fmt.mantissa_bits
    magnitude = codes & np.uint64(2**magnitude_bits - 1)
    negative = (codes >> np.uint64(magnitude_bits)) > 0
    assert fmt.bias is not None
    exponent = (magnitude >> np.uint64(fmt.mantissa_bits)).astype(np.int64)
    mantissa = (magnitude & np.uint64(2**fmt.mantissa_bits - 1)).astype(np.float64)
    low = exponent == 0
    implicit = np.where(low & fmt.subnormals, 0.0, 2.0**fmt.mantissa_bits)
    if fmt.subnormals:
        exponent = np.maximum(exponent, 1)
    x = np.ldexp(implicit + mantissa, (exponent - fmt.bias - fmt.mantissa_bits).astype(np.int32))
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
    elif fmt.signed and not fmt.negative_zero:
        x = np.where(magnitude == 0, 0.0, x)
    return x


def encode(fmt: Any, values: Any, saturate: bool | str) -> np.ndarray:
    """The codes of numbers, to nearest even (see ``Format.encode``)."""
    check_saturate(saturate)
    values = np.asarray(values)
    if values.dtype.kind not in "fiub" and values.dtype.kind != "V":
        raise TypeError(f"{fmt.name}.encode takes real numbers, not {values.dtype}")
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        x = values.astype(np.float64)
    size = np.abs(x)
    finite = np.isfinite(x)
    magnitude = _round_magnitude(fmt, np.where(finite, size, 0.0))
    over = finite & (magnitude > fmt.max_code)
    magnitude = np.where(over, _overflow(fmt, saturate in (True, "finite")), magnitude)
    magnitude = np.where(np.isinf(x), _overflow(fmt, saturate is True), magnitude)
    negative = np.signbit(x) & fmt.signed
    if not fmt.negative_zero:
        negative &= magnitude != 0
    code = magnitude + (negative.astype(np.int64) << (fmt.bits - 1) if fmt.signed else 0)
    nan = np.isnan(x) | (magnitude < 0)
    if not fmt.signed:
        nan |= x < 0
    if not fmt.zero:
        nan |= x == 0
    return np.where(nan, _nan(fmt), code).astype(fmt.code_dtype)


def _round_magnitude(fmt: Any, size: np.ndarray) -> np.ndarray:
    """Positive codes, unbounded above, of sizes rounded to nearest even: exact in float64."""
    assert fmt.bias is not None
    m = fmt.mantissa_bits
    _, exponent = np.frexp(size)
    exponent = np.where(size == 0, fmt.min_exponent, exponent.astype(np.int64) - 1)
    exponent = np.maximum(exponent, fmt.min_exponent)
    significand = np.ldexp(size, (m - exponent).astype(np.int32))
    down = np.floor(significand)
    rest = significand - down
    code = ((exponent + fmt.bias - 1) << m) + down.astype(np.int64)
    # the even code, not the even significand: without mantissa bits (E8M0) those differ
    code += (rest > 0.5) | ((rest == 0.5) & (code % 2 == 1))
    if not fmt.subnormals:
        smallest = float(fmt.smallest)
        first = int(fmt.zero)
        code = np.where(size < smallest, np.where(size > smallest / 2, first, 0), code)
    return code


def _overflow(fmt: Any, saturate: bool) -> int:
    if saturate:
        return fmt.max_code
    if fmt.infinity_code is not None:
        return fmt.infinity_code
    return fmt.max_code if fmt.nan_code is None else -1  # -1 stands for NaN


def _nan(fmt: Any) -> int:
    """NaN's code; a format without one has nothing to say, and says zero."""
    return 0 if fmt.nan_code is None else fmt.nan_code
