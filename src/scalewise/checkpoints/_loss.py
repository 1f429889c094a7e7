"""Measures the difference of two tensors, a few rows at a time."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ._packed import Decoded, Packed, largest_of_blocks, slabs

MEASURED = 128  # columns behind one of the blocks that are compared, but for narrower formats


@dataclasses.dataclass
class Loss:
    """The difference of two arrays of the same shape; finite numbers count."""

    numbers: int = 0  # that were compared
    signal: float = 0.0  # sum of squares of the first array
    noise: float = 0.0  # sum of squares of the difference
    different: int = 0
    largest: float = 0.0  # magnitude of the difference
    saturated: int = 0  # numbers beyond the largest that the second array's scale allows
    flushed: int = 0  # numbers other than zero that became zero
    non_finite: int = 0  # numbers that are finite in one of them alone
    worst: tuple[list[int], float] | None = None  # the worst block's index, and its SQNR in dB

    @property
    def sqnr(self) -> float:
        return decibel(self.signal, self.noise)

    def record(self) -> dict:
        return dataclasses.asdict(self) | {"sqnr": self.sqnr}


def decibel(signal: float, noise: float) -> float:
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def loss(x: np.ndarray | Decoded, y: np.ndarray | Decoded, packed: Packed | None = None) -> Loss:
    """Returns the difference of two arrays."""
    x, y = (np.reshape(z, (1, -1)) if isinstance(z, np.ndarray) and z.ndim < 2 else z
            for z in (x, y))  # fmt: skip
    found = Loss()
    size = MEASURED if packed is None or packed.block[1] > MEASURED else packed.block[1]
    for (index, i, a), (_, _, b) in zip(slabs(x), slabs(y), strict=True):
        _add(found, a, b, size, (*index, i))
    if packed is not None:
        found.saturated = _saturated(x, packed)
    return found


def _add(found: Loss, a: np.ndarray, b: np.ndarray, size: int, start: tuple[int, ...]) -> None:
    with np.errstate(all="ignore"):
        wrong = b - a
        off = wrong != 0
    largest = max(float(wrong.max(initial=0)), -float(wrong.min(initial=0)))
    if not math.isfinite(largest):
        finite = np.isfinite(wrong)
        found.non_finite += int(np.sum(np.isfinite(a) != np.isfinite(b)))
        off &= ~((a == b) | (np.isnan(a) & np.isnan(b)))
        wrong, a = np.where(finite, wrong, 0), np.where(finite, a, 0)
        largest = float(np.max(np.abs(wrong), initial=0))
    found.numbers += a.size
    found.different += int(np.count_nonzero(off))
    found.flushed += int(np.count_nonzero((b == 0) & (a != 0)))
    found.largest = max(found.largest, largest)
    if not 1e-12 < max(float(a.max(initial=0)), -float(a.min(initial=0)), largest) < 1e15:
        a, wrong = a.astype(np.float64), wrong.astype(np.float64)  # squares leave float32
    whole = a.shape[1] // size * size
    noise, signal = (
        np.einsum("...i,...i->...", blocks, blocks)
        for blocks in (z[:, :whole].reshape(len(z), -1, size) for z in (wrong, a))
    )
    if whole:
        _worst(found, noise, signal, start, size)
    for name, blocks, rest in (("signal", signal, a), ("noise", noise, wrong)):
        more = np.einsum("ij,ij->", rest[:, whole:], rest[:, whole:], dtype=np.float64)
        setattr(found, name, getattr(found, name) + float(np.sum(blocks, dtype=np.float64) + more))


def _worst(found: Loss, noise: np.ndarray, signal: np.ndarray, start: tuple, size: int) -> None:
    ratio = noise / np.maximum(signal, np.float32(1e-30))
    at = int(np.argmax(ratio))
    row, block = divmod(at, noise.shape[1])
    sqnr = decibel(float(signal[row, block]), float(noise[row, block]))
    if found.worst is None or sqnr < found.worst[1]:
        found.worst = [*start[:-1], start[-1] + row, block * size], sqnr


def _saturated(x: np.ndarray | Decoded, packed: Packed) -> int:
    top, count = np.float32(float(packed.element.max)), 0
    r, c = packed.block
    limits = [m.factors() * top * np.float32(1 + 2.0**-22) for m in packed.matrices()]
    lead = packed.codes.shape[:-2]
    for index, i, rows in slabs(x):
        limit = limits[int(np.ravel_multi_index(index, lead)) if lead else 0]
        limit = limit[np.arange(i, i + len(rows)) // r]
        if limit.shape[1] > 1 and not (c & (c - 1) or rows.shape[1] % c):
            blocks = rows.reshape(len(rows), -1, c)
            over = largest_of_blocks(blocks) > limit
            count += int(np.count_nonzero(np.abs(blocks[over]) > limit[over][:, None]))
            continue
        if limit.shape[1] > 1:
            limit = np.repeat(limit, c, axis=1)[:, : rows.shape[1]]
        count += int(np.count_nonzero(np.abs(rows) > limit))
    return count
