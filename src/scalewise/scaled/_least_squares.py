"""The scale with the smallest squared error: a search over scales that are no powers of two.

The error of ``s * round(x / s)`` is a quadratic function of ``s`` as long as no element's code
changes, so it has a local minimum for each assignment of codes, and many of them where a few large
elements carry the error. From each point of a geometric grid that is dense around the scale of the
largest magnitude, steps of Lloyd's algorithm (IEEE Trans. Inf. Theory 28:2, 1982) go to the minimum
for the codes there, ``sum(x * q) / sum(q * q)``. None of them makes the error larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
STEPS = 2


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

    def total(terms: jax.Array) -> jax.Array:
        return jnp.sum(weights * terms, axis=1, keepdims=True)

    def fit(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.full((len(rows), 1), scale)
        for _ in range(STEPS):
            q = round_to(sketch / scale, fmt, saturate="finite")
            square = total(q * q)
            better = total(sketch * q) / jnp.where(square > 0, square, 1)
            scale = jnp.where(square > 0, better, scale)
        q = round_to(sketch / scale, fmt, saturate="finite")
        return total(jnp.square(sketch - scale * q)), scale

    errors, scales = lax.map(fit, grid)
    best = jnp.argmin(errors, axis=0, keepdims=True)
    return unit * jnp.take_along_axis(scales, best, axis=0).reshape(unit.shape)


def _grid(n: int, count: int) -> np.ndarray:
    """Returns candidate scales in units of the largest magnitude's, from twice that down.

    Half of them lie in the first two octaves. A scale at which most elements would saturate is not
    the best, and the largest of n magnitudes is at most ``sqrt(n)`` times their root mean square.
    """
    near = max(1, count // 2)
    far = min(12.0, 0.5 * math.log2(n))
    low = np.arange(math.ceil((count - near) * far / 8)) * 8 / max(1, count - near)
    return 2.0 ** np.concatenate([1 - 2 * np.arange(near) / near, -1 - low])


def _sketch(rows: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Returns a sample of each row and its weights; 1 if it is the whole row."""
    groups, n = rows.shape
    size = min(SKETCH, max(FEWEST, SKETCHES // groups))
    if n <= size:
        return rows, 1.0
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
