"""The scale with the smallest squared error: a search over scales that are no powers of two.

The error of ``s * round(x / s)`` is a quadratic function of ``s`` as long as no element's code
changes, so it has a local minimum for each assignment of codes, and many of them where a few large
elements carry the error. The search evaluates it on a geometric grid that is dense around the scale
of the largest magnitude, and moves from the best points of the grid to the minimum for their codes,
``sum(x * q) / sum(q * q)``, as in Lloyd's algorithm (IEEE Trans. Inf. Theory 28:2, 1982).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..rounding import round_to
from ._amax import amax

GRID = 256  # candidates by default: 64 an octave near the largest magnitude's scale
# Of more elements behind one scale, so many stand for all while the grid is searched: the largest,
# each for itself, and a regular sample of the others. Of so many in all, fewer for each scale.
SKETCH, SKETCHES, FEWEST = 8192, 1 << 21, 1024
STARTS, STEPS = 4, 3  # points of the grid from which steps are made, on all elements


class Fit(NamedTuple):
    """Scales and their squared errors, (groups, 1) both; where Lloyd's step goes from them."""

    error: jax.Array
    scale: jax.Array
    better: jax.Array


def least_squares_scale(
    x: jax.Array, fmt: Format, axes: Sequence[int], candidates: int | None
) -> jax.Array:
    """Returns the scale of the finite elements over the axes, which are kept with length 1."""
    axes = tuple(a % x.ndim for a in axes)
    kept = [a for a in range(x.ndim) if a not in axes]
    top = amax(x, axes, True)
    top = jnp.where(top > 0, top, jnp.ones_like(top))
    # the largest magnitude becomes the format's, or one of at most 2^16: squares stay in range
    largest = float(fmt.max) / 2.0 ** max(0, fmt.max_exponent - 15)
    unit = jnp.maximum(top / np.asarray(largest, x.dtype), np.finfo(x.dtype).tiny * 4)
    rows = jnp.where(jnp.isfinite(x), jnp.abs(x) / unit, 0).transpose(*kept, *axes)
    n = math.prod(x.shape[a] for a in axes)
    rows = rows.reshape(-1, n)
    if not rows.size:
        return unit
    sketch, weights = _sketch(rows)
    grid = jnp.asarray(_grid(n, candidates or GRID), x.dtype)
    one = jnp.ones((len(rows), 1), x.dtype)
    errors = lax.map(lambda s: _fit(sketch, weights, fmt, s * one).error[:, 0], grid)
    starts = lax.top_k(-errors.T, min(STARTS, len(grid)))[1]
    best = lax.map(lambda i: _descend(rows, fmt, grid[i][:, None]), starts.T)
    chosen = jnp.argmin(best.error, axis=0)[None]
    scale = jnp.take_along_axis(best.scale, chosen, axis=0)[0]
    return unit * scale.reshape(unit.shape)


def _grid(n: int, count: int) -> np.ndarray:
    """Returns candidate scales in units of the largest magnitude's, from twice that down.

    Half of them lie in the first two octaves. A scale at which most elements would saturate is not
    the best, and the largest of n magnitudes is at most ``sqrt(n)`` times their root mean square.
    """
    near = max(1, count // 2)
    far = min(12.0, 0.5 * math.log2(n))
    low = np.arange(math.ceil((count - near) * far / 8)) * 8 / max(1, count - near)
    return 2.0 ** np.concatenate([1 - 2 * np.arange(near) / near, -1 - low])


def _sketch(rows: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns a sample of each row and its weights; None as weights if it is the whole row."""
    groups, n = rows.shape
    size = min(SKETCH, max(FEWEST, SKETCHES // groups))
    if n <= size:
        return rows, None
    k = size // 4
    large = lax.top_k(rows, k)[0]
    stride = -(-n // (size - k)) | 1  # odd, so that it meets every column of a matrix
    others = rows[:, ::stride]
    chosen = others < large[:, -1:]
    count = jnp.maximum(jnp.sum(chosen, axis=1, keepdims=True, dtype=rows.dtype), 1)
    weights = jnp.where(chosen, (n - k) / count, 0)
    return (
        jnp.concatenate([large, others], axis=1),
        jnp.concatenate([jnp.ones_like(large), weights], axis=1),
    )


def _fit(rows: jax.Array, weights: jax.Array | None, fmt: Format, scale: jax.Array) -> Fit:
    q = round_to(rows / scale, fmt, saturate="finite")
    terms = jnp.square(rows - scale * q), rows * q, jnp.square(q)
    if weights is not None:
        terms = tuple(weights * t for t in terms)
    error, product, square = (jnp.sum(t, axis=1, keepdims=True) for t in terms)
    better = jnp.where(square > 0, product / jnp.where(square > 0, square, 1), scale)
    return Fit(error, scale, better)


def _descend(rows: jax.Array, fmt: Format, scale: jax.Array) -> Fit:
    fit = best = _fit(rows, None, fmt, scale)

    def step(carry: tuple[Fit, Fit], _) -> tuple[tuple[Fit, Fit], None]:
        fit, best = carry
        fit = _fit(rows, None, fmt, fit.better)
        best = jax.tree.map(lambda new, old: jnp.where(fit.error < best.error, new, old), fit, best)
        return (fit, best), None

    return lax.scan(step, (fit, best), length=STEPS)[0][1]
