"""Repairs of damaged weights, each named after the fault that it undoes, and what judges them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from ..formats import E2M1FN
from ._files import UnreadableError
from ._packed import (
    E8M0,
    WIDE,
    Packed,
    from_halves,
    nibbles,
    one_each,
    pack_nibbles,
    values,
)
from ._report import Fault
from ._weights import swizzled, unswizzled

ROWS, MATRICES = 64, 4  # a sample of a tensor
Fields: TypeAlias = dict[str, Any] | None  # of Packed, that a repair changes


@dataclasses.dataclass(frozen=True)
class Repair:
    """A repair: the fault, what is done, and the fields that change, None if it doesn't fit."""

    fault: Fault
    what: str
    change: Callable[[Packed], Fields]
    of_codes: bool = False  # which repairs of a sample need; those of scales need all of them

    def apply(self, p: Packed) -> Packed | None:
        changed = self.change(p)
        return None if changed is None else dataclasses.replace(p, **changed)


def _whole(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Packed], Fields]:
    def changed(p: Packed) -> Fields:
        if p.whole is None or not np.all(p.whole > 0):
            return None
        with np.errstate(all="ignore"):
            return {"whole": np.asarray(change(p.whole), np.float32)}

    return changed


def _transposed(p: Packed) -> Fields:
    *lead, rows, columns = p.scale.shape
    if 1 in (rows, columns):
        return None
    return {"scale": np.swapaxes(p.scale.reshape(*lead, columns, rows), -1, -2)}


def _tiled(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Packed], Fields]:
    def changed(p: Packed) -> Fields:
        rows, columns = p.scale.shape[-2:]
        if p.scale.ndim != 2 or rows % 128 or columns % 4 or p.block[0] != 1:
            return None
        return {"scale": change(p.scale).reshape(p.scale.shape)}

    return changed


def _rolled(by: int, axis: int) -> Callable[[Packed], Fields]:
    return lambda p: {"scale": np.roll(p.scale, by, axis)} if p.scale.shape[axis] > 1 else None


def _as_bytes(p: Packed) -> Fields:
    if p.kind != WIDE or not is_bytes(p.scale):
        return None
    return {"scale": p.scale.astype(np.uint8), "kind": E8M0}


def is_bytes(scale: np.ndarray) -> bool:
    """Returns whether float scales are E8M0 bytes, as numbers: integers of 64 to 254."""
    whole = np.all((scale == np.floor(scale)) & (scale >= 0) & (scale < 255))
    return bool(whole) and scale.size > 1 and float(np.median(scale)) >= 64


def biased(by: int) -> Repair:
    def moved(p: Packed) -> Fields:
        if p.kind != E8M0 or not by:
            return None
        return {"scale": np.clip(p.scale.astype(np.int32) + by, 0, 254).astype(np.uint8)}

    return Repair(Fault.BIAS, f"add {by} to the scales' bytes", moved)


def _halves(change: Callable[[np.ndarray, int], np.ndarray]) -> Callable[[Packed], Fields]:
    def changed(p: Packed) -> Fields:
        fits = p.element == E2M1FN and not p.stored_shape[-1] % p.block[1]
        return {"codes": change(p.codes, p.block[1])} if fits else None

    return changed


def _to_halves(codes: np.ndarray, block: int) -> np.ndarray:
    both = nibbles(codes)
    both = both.reshape(*both.shape[:-1], -1, 2, block // 2).swapaxes(-1, -2)
    return pack_nibbles(both.reshape(*codes.shape[:-1], -1))


def _flipped(p: Packed) -> Fields:
    return {"codes": (p.codes >> 4) | (p.codes << 4)} if p.element == E2M1FN else None


REPAIRS = (
    Repair(Fault.INVERTED, "invert the global scale", _whole(lambda w: 1 / w)),
    Repair(Fault.TWICE, "take the root of the global scale", _whole(np.sqrt)),
    Repair(Fault.TWICE, "take 1 as the global scale", _whole(np.ones_like)),
    Repair(Fault.TRANSPOSED, "transpose the scale", _transposed),
    Repair(
        Fault.SWIZZLED,
        "bring the scale from tiles into rows",
        _tiled(lambda s: unswizzled(s, s.shape)),
    ),
    Repair(Fault.SWIZZLED, "bring the scale from rows into tiles", _tiled(swizzled)),
    *(
        Repair(Fault.WRONG_BLOCK, f"move the scale by {by} along axis {axis}", _rolled(by, axis))
        for axis in (-1, -2)
        for by in (-1, 1, -2, 2)
    ),
    Repair(Fault.NUMBER, "read the scale as E8M0 bytes", _as_bytes),
    Repair(Fault.NIBBLES, "swap the halves of each byte", _flipped, True),
    Repair(
        Fault.NIBBLES, "read element j and j + half a block from a byte", _halves(from_halves), True
    ),
    Repair(Fault.NIBBLES, "read elements 2j and 2j + 1 from a byte", _halves(_to_halves), True),
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Rows of a tensor, spread evenly: which, and how to take them from another one."""

    matrices: tuple[tuple[int, ...], ...]
    rows: np.ndarray

    def of(self, p: Packed) -> np.ndarray:
        """Returns the float32 values of the rows, one below the other."""
        return values(self.packed(p))

    def packed(self, p: Packed) -> Packed:
        """Returns the rows as one matrix for each leading index, with a scale for each row."""
        lead = p.codes.shape[:-2]
        codes = np.stack([p.codes[m][self.rows] for m in self.matrices])
        scale = np.stack([p.scale[m][self.rows // p.block[0]] for m in self.matrices])
        whole = p.whole
        if whole is not None and whole.size > 1:
            whole = np.broadcast_to(whole, lead)
            whole = np.stack([whole[m] for m in self.matrices])
        return dataclasses.replace(
            p, codes=codes, scale=scale, whole=whole, block=(1, p.block[1]), transposed=False
        )

    def of_array(self, x: np.ndarray) -> np.ndarray:
        return np.stack([np.asarray(x[m][self.rows]) for m in self.matrices]).astype(np.float32)

    def repaired(self, p: Packed, repair: Repair) -> np.ndarray | None:
        try:
            first = self.packed(p) if repair.of_codes else p
            found = repair.apply(first)
            if found is None:
                return None
            return values(found) if repair.of_codes else self.of(found)
        except (ValueError, IndexError, UnreadableError):
            return None


def sample_of(shape: tuple[int, ...]) -> Sample:
    lead, rows = shape[:-2], shape[-2]
    every = list(np.ndindex(*lead))
    return Sample(tuple(every[i] for i in spread(len(every), MATRICES)), spread(rows, ROWS))


def tries(p: Packed, shift: float | None) -> Iterator[Repair]:
    """Yields the repairs to try; ``shift``, log2 of the values' excess, suggests a bias."""
    yield from REPAIRS
    if shift is not None and np.isfinite(shift) and p.kind == E8M0 and round(shift):
        yield biased(-round(shift))


def spread(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def level(x: np.ndarray) -> float:
    """Returns log2 of the root mean square of finite numbers, -inf of zeros."""
    finite = np.where(np.isfinite(x), x, 0).astype(np.float64)
    mean = float(np.mean(np.square(finite)))
    return 0.5 * math.log2(mean) if mean else -math.inf


def relative(x: np.ndarray, truth: np.ndarray) -> float:
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


def is_uniform(codes: np.ndarray, p: Packed) -> bool:
    """Returns whether all codes are equally frequent, within the spread of a random draw."""
    part = one_each(codes, p.element)
    kinds = 1 << p.element.bits
    counts = np.bincount(part.reshape(-1), minlength=kinds)
    expected = part.size / kinds
    chi = float(np.sum((counts - expected) ** 2) / expected)
    return chi < kinds + 8 * math.sqrt(2 * kinds)
