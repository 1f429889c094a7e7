"""Statistics by which a decoded tensor is compared with its original and its neighbours."""

from __future__ import annotations

import math

import numpy as np

from ._packed import Packed, elements, one_each

BLOCK_ROWS, ROWS_OF_BLOCK = 64, 16  # a sample of a matrix of blocks


def spread(count: int, most: int) -> np.ndarray:
    """Returns at most ``most`` of the indices 0 to ``count`` - 1, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def level(x: np.ndarray) -> float:
    """Returns log2 of the root mean square of finite numbers, -inf of zeros."""
    finite = np.where(np.isfinite(x), x, 0).astype(np.float64)
    mean = float(np.mean(np.square(finite)))
    return 0.5 * math.log2(mean) if mean else -math.inf


def profile(x: np.ndarray) -> np.ndarray:
    """Returns log2 of the columns' root mean squares, without their mean; NaN counts as 0."""
    finite = np.where(np.isfinite(x), x, 0).astype(np.float64)
    rows = finite.reshape(-1, x.shape[-1])
    rows = rows / np.maximum(np.sqrt(np.mean(rows**2, axis=1, keepdims=True)), 1e-300)
    energy = np.log2(np.mean(rows**2, axis=0) + 1e-12)
    return energy - energy.mean()


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.dot(a, b)) / norm if norm else 0.0


def relative(x: np.ndarray, truth: np.ndarray) -> float:
    """Returns the norm of the difference over that of the truth; infinite where not finite."""
    with np.errstate(all="ignore"):
        wrong = x.astype(np.float64) - truth
    if not np.all(np.isfinite(wrong)):
        return math.inf
    norm = max(float(np.linalg.norm(truth.astype(np.float64))), 1e-30)
    return float(np.linalg.norm(wrong)) / norm


def wrong_blocks(x: np.ndarray, truth: np.ndarray) -> float:
    """Returns the share of blocks that aren't small and whose error is above half their norm."""
    size = 16
    width = truth.shape[-1] // size * size
    if not width:
        return 0.0
    with np.errstate(all="ignore"):
        a, b = (z[..., :width].reshape(-1, size).astype(np.float64) for z in (truth, x - truth))
        signal, noise = np.sum(a * a, -1), np.sum(b * b, -1)
    counts = signal > 0.1 * np.median(signal)
    off = ~(noise <= 0.5 * signal)
    return float(np.mean(off[counts])) if counts.any() else 0.0


def powers(scale: np.ndarray) -> bool:
    return bool(np.all(np.frexp(scale)[0] == 0.5))


def code_levels(p: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of blocks of a matrix, and log2 of the root mean squares of their codes."""
    (r, c), (rows, columns) = p.block, p.stored_shape
    squares = np.nan_to_num(np.square(elements(p.element)), posinf=0)
    chosen = spread(p.scale.shape[0], BLOCK_ROWS)
    found = []
    for i in chosen:
        codes = p.codes[i * r + spread(min(r, rows - i * r), ROWS_OF_BLOCK)]
        x = squares[one_each(codes, p.element)].mean(axis=0)
        found.append(np.add.reduceat(x, np.arange(0, columns, c)))
    with np.errstate(divide="ignore"):
        return chosen, 0.5 * np.log2(np.array(found))


def residue(p: Packed, levels: tuple[np.ndarray, np.ndarray]) -> tuple[float, int]:
    """Returns the variance of the levels of a matrix's blocks beside rows and columns.

    A block's level is the logarithm of its root mean square: that of the scale plus that of the
    codes. The two are correlated negatively, since a block whose largest number is an outlier has a
    large scale and small codes; the sum varies less than scales and codes of different blocks.

    Returns:
        The sum of squares that effects of rows and columns leave, and its degrees of freedom.
    """
    chosen, of_codes = levels
    with np.errstate(all="ignore"):
        x = of_codes + np.log2(p.factors()[chosen].astype(np.float64))
    valid = np.isfinite(x)
    weights = np.maximum(valid, 1e-9)
    x = np.where(valid, x, 0)
    for axis in (1, 0) * 3:  # with gaps the two effects aren't orthogonal
        mean = np.sum(x * weights, axis=axis, keepdims=True) / np.sum(
            weights, axis=axis, keepdims=True)  # fmt: skip
        x = np.where(valid, x - mean, 0)
    return float(np.sum(x * x)), max(0, int(valid.sum()) - sum(x.shape) + 1)


def is_uniform(codes: np.ndarray, p: Packed) -> bool:
    """Returns whether all codes are equally frequent, within the spread of a random draw."""
    part = one_each(codes, p.element)
    kinds = 1 << p.element.bits
    counts = np.bincount(part.reshape(-1), minlength=kinds)
    expected = part.size / kinds
    chi = float(np.sum((counts - expected) ** 2) / expected)
    return chi < kinds + 8 * math.sqrt(2 * kinds)
