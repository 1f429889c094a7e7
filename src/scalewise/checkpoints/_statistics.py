"""Statistics by which a decoded tensor is compared with its original and its neighbours."""

from __future__ import annotations

import math

import numpy as np

from ..formats import E2M1FN
from ._packed import Packed, nibbles


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
    return float(
        np.linalg.norm(wrong) / max(float(np.linalg.norm(truth.astype(np.float64))), 1e-30)
    )


def wrong_blocks(x: np.ndarray, truth: np.ndarray, size: int = 16) -> float:
    """Returns the share of blocks that aren't small and whose error is above half their norm."""
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
    """Returns whether all scales are powers of two."""
    return bool(np.all(np.frexp(scale)[0] == 0.5))


def residue(p: Packed) -> float:
    """Returns the share of the variance of the scales' logarithms that rows and columns leave."""
    with np.errstate(all="ignore"):
        x = np.log2(p.factors().astype(np.float64))
    x = np.where(np.isfinite(x), x, 0)
    left = x - x.mean(axis=1, keepdims=True) - x.mean(axis=0, keepdims=True) + x.mean()
    return float(np.mean(left**2) / max(float(np.var(x)), 1e-12))


def is_uniform(codes: np.ndarray, p: Packed) -> bool:
    """Returns whether all codes are equally frequent, within the spread of a random draw."""
    part = nibbles(codes) if p.element == E2M1FN else codes
    kinds = 1 << p.element.bits
    counts = np.bincount(part.reshape(-1), minlength=kinds)
    expected = part.size / kinds
    chi = float(np.sum((counts - expected) ** 2) / expected)
    return chi < kinds + 8 * math.sqrt(2 * kinds)
