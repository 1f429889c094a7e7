"""Roundings of published recipes, transcribed from their papers to NumPy in float64."""

import ml_dtypes
import numpy as np

from scalewise.autoscaling._keys import hadamard_signs

E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn


def to(x, dtype):
    """Rounds to the nearest number of a narrow dtype; numbers beyond its largest saturate."""
    top = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -top, top).astype(np.float32).astype(dtype).astype(np.float64)


def blocks_along(x, axis, size):
    """Returns the rows of blocks along an axis, zeros filling up the last, and their inverse."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    rows, n = x.shape
    padded = np.pad(x, ((0, 0), (0, -n % size))).reshape(rows, -1, size)
    return padded, lambda y: np.moveaxis(y.reshape(rows, -1)[:, :n], -1, axis)


def up(amax, largest):
    """The smallest power of two by which a magnitude is at most a format's largest."""
    return 2.0 ** np.ceil(np.log2(amax / largest))


def by_rows(x, axis):
    """torchao's row-wise scales: float8(x * 2^floor(log2(448 / amax)))."""
    scale = up(np.abs(x).max(axis, keepdims=True), 448)
    return to(x / scale, E4M3) * scale


def whole(x, axis):
    scale = up(np.abs(x).max(), 448)
    return to(x / scale, E4M3) * scale


def mx(dtype, emax, largest=None):
    """OCP MX; with the element's largest number the scale is rounded up (arXiv 2506.08027)."""

    def rounded(x, axis):
        blocks, back = blocks_along(x, axis, 32)
        amax = np.abs(blocks).max(-1, keepdims=True)
        scale = 2.0 ** (np.floor(np.log2(amax)) - emax) if largest is None else up(amax, largest)
        return back(to(blocks / scale, dtype) * scale)

    return rounded


def over_tiles(reduce, x, rows):
    """A reduction of each block's number and of those beside it in its tile."""
    parts = [reduce(x[i : i + rows], axis=0, keepdims=True) for i in range(0, len(x), rows)]
    return np.repeat(np.concatenate(parts), rows, 0)[: len(x), :, None]


def tile_max(blocks, rows):
    return over_tiles(np.max, np.abs(blocks).max(-1), rows)


def deepseek(rows):
    """Blocks of 128, or rows x 128, with float32 scales amax / 448 (arXiv 2412.19437, 3.3.2)."""

    def rounded(x, axis):
        blocks, back = blocks_along(x, axis, 128)
        scale = tile_max(blocks, rows).astype(np.float32) * np.float32(1 / 448)
        return back(to(blocks.astype(np.float32) / scale, E4M3) * scale)

    return rounded


def nvidia(rows=1, fourth=False, headroom=1.0):
    """NVFP4 in two levels: E4M3 scales, a float32 tensor scale (arXiv 2509.25149, appendix B)."""

    def rounded(x, axis):
        blocks, back = blocks_along(x, axis, 16)
        amax = tile_max(blocks, rows) * headroom
        tensor = amax.max() / 6 / (256 if fourth else 448)
        results = []
        for top in (6, 4) if fourth else (6,):
            scale = np.maximum(to(amax / top / tensor, E4M3), 2.0**-9) * tensor
            results.append(to(blocks / scale, E2M1) * scale)
        if not fourth:
            return back(results[0])
        six, four = (over_tiles(np.sum, np.square(y - blocks).sum(-1), rows) for y in results)
        return back(np.where(four < six, results[1], results[0]))

    return rounded


def hadamard(size):
    """The orthogonal matrix of a Hadamard transform with the library's fixed signs."""
    matrix = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return np.asarray(hadamard_signs(size, None))[:, None] * np.array(matrix) / size**0.5


def transformed(rounded, size=16, inverse=False):
    """A random Hadamard transform along the axis, then a rounding; or the way back behind it."""

    def both(x, axis):
        blocks, back = blocks_along(x, axis, size)
        y = (blocks @ hadamard(size)).reshape(len(blocks), -1)
        y = rounded(np.moveaxis(y, -1, axis), axis)
        if not inverse:
            return y
        return back(blocks_along(y, axis, size)[0] @ hadamard(size).T)

    return both


def quest(x, axis, whole=np.round):
    """QuEST's MXFP4: 2.92247856 standard deviations to 6, a power of two (arXiv 2505.14669).

    Of blocks whose mean exceeds their standard deviation, the root mean square takes its place.
    """
    blocks, back = blocks_along(x, axis, 32)
    mean, spread = blocks.mean(-1, keepdims=True), blocks.std(-1, keepdims=True)
    spread = np.where(np.abs(mean) > spread, np.hypot(mean, spread), spread)
    scale = 2.0 ** whole(np.log2(2.92247856 / 6 * spread))
    return back(to(blocks / scale, E2M1) * scale)


def exact(x, axis):
    return x
