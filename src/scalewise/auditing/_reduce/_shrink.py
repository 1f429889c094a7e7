"""Smaller inputs with which a slice still shows an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...primitives import having, params
from .._bisect import fewest
from ._render import Slice

ELEMENTWISE = having("elementwise")
ELEMENTS = 4  # kept of results that are computed one by one
SHRINKING = 24  # smaller inputs that are tried: each has a shape of its own, which is compiled
Arrays = dict[str, np.ndarray]


def shrunk(
    piece: Slice, arrays: Arrays, low: Any, wide: Any, shows: Callable[[Arrays], bool]
) -> Arrays:
    """Returns the inputs of the worst elements, or rows and columns; then as few as show it."""
    *first, last = piece.operations
    equation = last.equation
    assert equation is not None
    if not all(o.equation is not None and o.equation.name in ELEMENTWISE for o in first):
        return arrays
    if equation.name in ELEMENTWISE:
        at = _worst(low, wide)[:ELEMENTS]
        few = _of_shape(arrays, wide.shape, lambda x: x.reshape(-1)[at])
        return few if few is not None and shows(few) else arrays
    if equation.name == "dot_general" and not first:
        return _product(piece, arrays, low, wide, shows)
    if equation.name.startswith("reduce_") and len(equation.in_avals) == 1:
        return _reduced(equation, arrays, low, wide, shows)
    return arrays


def _worst(low: Any, wide: Any) -> np.ndarray:
    low, wide = (np.asarray(x).astype(np.float64).reshape(-1) for x in (low, wide))
    with np.errstate(all="ignore"):
        error = np.abs(low - wide) / np.where(wide == 0, 1, np.abs(wide))
    lost = np.isfinite(wide) & ~np.isfinite(low)
    return np.argsort(-np.where(lost, np.inf, np.nan_to_num(error, posinf=0)), kind="stable")


def _of_shape(
    arrays: Arrays, shape: tuple[int, ...], take: Callable[[np.ndarray], np.ndarray]
) -> Arrays | None:
    """Returns the inputs with those of one shape reduced; None if another isn't a scalar."""
    if not all(x.shape in (shape, ()) for x in arrays.values()):
        return None
    return {name: take(x) if x.shape == shape and shape else x for name, x in arrays.items()}


def _reduced(equation: Any, arrays: Arrays, low: Any, wide: Any, shows: Any) -> Arrays:
    shape = equation.in_avals[0].shape
    axes = params.reduced_axes(equation)
    free = [axis for axis in range(len(shape)) if axis not in axes]
    at = np.unravel_index(_worst(low, wide)[0], np.shape(wide)) if np.shape(wide) else ()
    keys: list[Any] = [slice(None)] * len(shape)
    for axis, i in zip(free, at, strict=True):
        keys[axis] = slice(i, i + 1)
    few = _of_shape(arrays, shape, lambda x: x[tuple(keys)])
    if few is None or not shows(few):
        return arrays
    for axis in axes:
        few = _halved(few, dict.fromkeys(few, axis), shows)
    return few


def _product(piece: Slice, arrays: Arrays, low: Any, wide: Any, shows: Any) -> Arrays:
    equation, names = piece.operations[-1].equation, list(piece.inputs)
    if equation is None or len(names) != 2:
        return arrays
    contracted, batch = params.dot_dimensions(equation)
    at = list(np.unravel_index(_worst(low, wide)[0], wide.shape)) if wide.shape else []
    few, position = {}, len(batch[0])
    for side, name in enumerate(names):
        keys: list[Any] = [slice(None)] * arrays[name].ndim
        for i, axis in enumerate(batch[side]):
            keys[axis] = slice(at[i], at[i] + 1)
        for axis in range(arrays[name].ndim):
            if axis not in (*batch[side], *contracted[side]):
                keys[axis] = slice(at[position], at[position] + 1)
                position += 1
        few[name] = arrays[name][tuple(keys)]
    if not shows(few):
        return arrays
    for left, right in zip(*contracted, strict=True):
        few = _halved(few, dict(zip(names, (left, right), strict=True)), shows)
    return few


def _halved(arrays: Arrays, axes: dict[str, int], shows: Callable[[Arrays], bool]) -> Arrays:
    size = max((x.shape[axes[n]] for n, x in arrays.items() if x.ndim), default=1)
    calls = iter(range(SHRINKING))

    def few(at: list[int]) -> Arrays:
        return {n: np.take(x, at, axes[n]) if x.ndim else x for n, x in arrays.items()}

    def still(at: list[int]) -> bool:
        return bool(at) and next(calls, None) is not None and shows(few(at))

    return few(fewest(range(size), still))
