"""Simple relations between the numbers of two arrays: a format, a factor, an added vector."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...formats import format as format_
from ...rounding import format_params
from .._tape._arithmetic import nearest
from ._match import SAME, arrangements, difference, laid_out
from ._values import Array

FORMATS = ("bf16", "fp16", "e4m3fn", "e5m2", "e4m3fnuz", "e3m2fn", "e2m3fn", "e2m1fn")
INTEGERS = {"int8": 127, "int4": 7}


def rounded_to(x: Array, y: Array) -> str:
    """Returns the format to which ``x`` is rounded in ``y``, with its scale; "" if it isn't.

    The scale is 1, or brings the largest magnitude of all numbers or of each row or column to the
    format's largest number.
    """
    theirs = laid_out(y.array, x.array)
    if theirs is None or not np.isfinite(x.array).all():
        return ""
    for words, amax in _largest(np.asarray(x.array, np.float64)):
        for name in FORMATS:
            scale = 1.0 if amax is None else amax / float(format_(name).max)
            if _near(theirs, nearest(x.array / scale, format_params(name)) * scale):
                return name + words
        for name, top in INTEGERS.items():
            scale = 1.0 if amax is None else amax / top
            if amax is not None and _near(theirs, np.round(x.array / scale) * scale):
                return name + words
    return ""


def _largest(x: np.ndarray) -> Iterator[tuple[str, np.ndarray | None]]:
    yield "", None
    size = np.abs(x)
    axes = (None, *range(x.ndim)) if x.ndim > 1 else (None,)
    for axis in axes if x.size else ():
        amax = np.max(size, axis, keepdims=True)
        words = " with a scale" if axis is None else f" with a scale along axis {axis}"
        yield words, np.where(amax > 0, amax, 1.0)


def _near(x: np.ndarray, y: np.ndarray) -> bool:
    """One number in a hundred may be on the other side of a tie."""
    close = np.abs(x - y) <= SAME * np.maximum(np.abs(x), np.abs(y))  # no NaN is
    return bool(np.mean(close) >= 0.99) if x.size else False


def fewer_digits(a: float, b: float) -> bool:
    """Returns whether one number is the other with fewer decimal digits, or in a narrow format."""
    for x, y in ((a, b), (b, a)):
        fewer = [float(f"{x:.{n}e}") for n in range(1, 7)]
        fewer += [float(nearest(x, format_params(fmt))) for fmt in FORMATS[:2]]
        if any(abs(z - y) <= SAME * abs(y) for z in fewer):
            return True
    return False


def relation(x: Array, y: Array, noise: float) -> tuple[str, str] | None:
    """Returns the kind of a simple relation between two arrays, and words for it.

    Args:
        noise: the relative difference that roundings leave.
    """
    fmt, back = rounded_to(x, y), rounded_to(y, x)
    if fmt or back:
        which = "second" if fmt else "first"
        return "quantised", f"the {which}'s are the other's rounded to {fmt or back}"
    found = (_simple(x, theirs, noise) for _, theirs in arrangements(y.array, x.array.shape))
    return next(filter(None, found), None)


def _simple(x: Array, theirs: np.ndarray, noise: float) -> tuple[str, str] | None:
    own = np.asarray(x.array, np.float64)
    with np.errstate(all="ignore"):
        ratio = theirs / own
    usable = np.isfinite(ratio) & (np.abs(own) >= x.unit)
    if not usable.any():
        return None
    factor = float(np.median(ratio[usable]))
    if difference(own * factor, theirs) <= noise:
        return "constant", f"the second's are {factor:.6g} times the first's"
    rows = tuple(range(own.ndim - 1))
    if own.ndim > 1:
        if difference(own + np.mean(theirs - own, rows, keepdims=True), theirs) <= noise:
            return "missing", "the second's have another vector added to all rows"
        columns = [np.median(r[u]) if u.any() else 1.0 for r, u in zip(
            np.moveaxis(ratio, -1, 0), np.moveaxis(usable, -1, 0), strict=True)]  # fmt: skip
        if difference(own * columns, theirs) <= noise:
            return "weight", "the second's columns are multiplied by another vector"
    return None
