"""``assert_allclose``: compares results with exact numbers, in ulps of the results' format."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
from jax.typing import ArrayLike

from .._check import NonNegative, checked
from .._resolve import as_format
from ..formats import Format, FormatLike
from ..formats import format as format_
from ..rounding import EncodedArray
from ..scaled import ScaledArray

# An operator that computes in float32 and rounds once is off by half an ulp and float32's own
# error, which is below 2^-10 ulp of FP16. Functions of XLA and NumPy in float32 are off by some
# ulps themselves.
ULPS = MappingProxyType({"fp32": 4.0, "tf32": 1.0, "fp64": 4.0})
"""The default tolerance by format, in ulps; 0.51 for all others (one rounding to nearest)."""


@checked
def assert_allclose(
    actual: ArrayLike | ScaledArray | EncodedArray,
    exact: ArrayLike,
    *,
    format: FormatLike | None = None,
    ulps: NonNegative | None = None,
    magnitude: ArrayLike | None = None,
    saturate: bool = False,
) -> None:
    """Raises AssertionError unless each result is within some ulps of the exact number.

    An ulp is the spacing of the format's numbers at the exact number. It is that of the subnormals
    below the smallest normal number: a relative tolerance would demand of subnormals what the
    format doesn't have. An overflow counts as the next number beyond the format's largest, so that
    infinity is right for numbers that round to it. NaN is right only where the exact number is NaN
    or, in a format without infinities, beyond the largest.

    Args:
        actual: an operator's results, an array of any shape.
        exact: the numbers that they should be, float64 or wider than ``actual``'s format, of the
            same shape or broadcast to it; computed in another way, in float64 say.
        format: the format of the results; by default that of ``actual``'s dtype.
        ulps: the tolerance. By default one rounding to nearest, :data:`ULPS`: 0.51 for formats of
            at most 16 bits, 4 for float32 and float64.
        magnitude: for sums whose terms cancel, the size whose ulp counts instead of the exact
            number's: the sum of the terms' magnitudes. An operator that rounds each term is within
            half an ulp of that for each of them.
        saturate: True if the operator returns the format's largest number for larger ones.

    Raises:
        AssertionError: says how many elements are off, and of the worst its index, both numbers,
            the number that the exact one rounds to, and the error in ulps.
        TypeError: ``exact`` is no wider than the format.
        ValueError: shapes that don't match, or an unknown format.

    Example:
        >>> import jax.numpy as jnp
        >>> x = np.linspace(-4, 4, 1000)
        >>> assert_allclose(jnp.tanh(x).astype(jnp.float16), np.tanh(x))
        >>> x = x.astype(np.float16)
        >>> assert_allclose(np.float16(1) + x * x, 1 + x.astype(np.float64) ** 2)
        Traceback (most recent call last):
        AssertionError: 84 of 1000 results are off by more than 0.51 ulps of fp16; worst: 0.748 ...
    """
    fmt = _format_of(actual, format)
    allowed = ULPS.get(fmt.name, 0.51) if ulps is None else ulps
    got, want = _wide(actual), _exact(exact, fmt, got_shape=np.shape(_plain(actual)))
    errors = ulps_between(got, want, fmt, magnitude=magnitude, saturate=saturate)
    wrong = ~(errors <= allowed)
    if not wrong.any():
        return
    ranked = np.where(wrong, np.nan_to_num(errors, nan=np.inf), -1)
    worst = np.unravel_index(np.argmax(ranked), wrong.shape)
    index = list(map(int, worst))
    nearest = float(fmt.decode(fmt.encode(want[worst], saturate=saturate)))
    raise AssertionError(
        f"{np.count_nonzero(wrong)} of {wrong.size} results are off by more than {allowed:g} ulps "
        f"of {fmt.name}; worst: {errors[worst]:.3g} ulps at {index}, {float(got[worst])!r} for the "
        f"exact {float(want[worst])!r}, which rounds to {nearest!r}"
    )


@checked
def ulps_between(
    actual: ArrayLike | ScaledArray | EncodedArray,
    exact: ArrayLike,
    format: FormatLike,
    *,
    magnitude: ArrayLike | None = None,
    saturate: bool = False,
) -> np.ndarray:
    """Returns the errors of results in ulps of the exact numbers, float64 of the results' shape.

    Args:
        actual, exact, format, magnitude, saturate: as for :func:`assert_allclose`.

    Returns:
        0 where both are NaN or the same infinity; infinity where only one of them is NaN.

    Example:
        >>> ulps_between([1.5, np.inf], [1.5004, 65521.0], "fp16").round(3).tolist()
        [0.41, 0.469]
    """
    fmt = as_format(format, "ulps_between")
    got, want = _wide(actual), _exact(exact, fmt, np.shape(_plain(actual)))
    top = float(fmt.max)
    beyond = top if saturate else top + float(_spacing(np.asarray(top), fmt))
    same = (np.isnan(got) & np.isnan(want)) | (np.isinf(want) & (got == want))
    if not fmt.infinities and fmt.nan_code is not None and not saturate:
        overflowed = np.isnan(got) & (np.abs(want) > top)  # NaN stands for an overflow
        got = np.where(overflowed, np.sign(want) * beyond, got)
    unit = _spacing(want if magnitude is None else np.asarray(magnitude, np.float64), fmt)
    got, want = (np.clip(x, -beyond, beyond) for x in (got, want))
    with np.errstate(invalid="ignore"):
        errors = np.abs(got - want) / unit
    return np.where(same, 0.0, np.where(np.isnan(errors), np.inf, errors))


def _spacing(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Returns :func:`scalewise.formats.ulp` of each element, that of the largest for infinities."""
    finite = np.where(np.isfinite(x), np.abs(x), float(fmt.max))
    exponent = np.where(finite == 0, fmt.min_exponent, np.frexp(finite)[1] - 1)
    exponent = np.clip(exponent, fmt.min_exponent, fmt.max_exponent)
    return np.ldexp(1.0, exponent - fmt.mantissa_bits)


def _plain(x: ArrayLike | ScaledArray | EncodedArray) -> ArrayLike:
    if isinstance(x, ScaledArray):
        return x.astype(x.wide_dtype)
    return x.value() if isinstance(x, EncodedArray) else x


def _wide(x: ArrayLike | ScaledArray | EncodedArray) -> np.ndarray:
    array = np.asarray(_plain(x))
    if array.dtype.kind not in "fiuV":  # V: ml_dtypes
        raise TypeError(f"the results are {array.dtype}; expected real numbers")
    return array.astype(np.float64)


def _format_of(actual: object, format: FormatLike | None) -> Format:
    if format is not None:
        return as_format(format, "assert_allclose")
    if isinstance(actual, EncodedArray):
        return actual.format
    if isinstance(actual, ScaledArray):
        raise ValueError("assert_allclose: the results are a ScaledArray; give its format=")
    return format_(getattr(actual, "dtype", np.dtype(np.float64)))


def _exact(exact: ArrayLike, fmt: Format, got_shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(exact)
    bits = 8 * array.dtype.itemsize
    if array.dtype.kind not in "fiu" or (array.dtype.kind == "f" and bits <= fmt.bits < 64):
        raise TypeError(
            f"the exact numbers are {array.dtype}, no wider than {fmt.name}; expected float64"
        )
    try:
        return np.broadcast_to(array.astype(np.float64), got_shape)
    except ValueError:
        raise ValueError(
            f"the exact numbers have shape {array.shape}; expected the results', {got_shape}"
        ) from None
