"""Packed weights in one normal form: values to the bit of their packages, and what they lost.

A value is ``code * factor``, one product in float32, where the factor is the block's scale times
(or, in compressed-tensors, divided by) the scale of the whole tensor, one product in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator

import ml_dtypes
import numpy as np

from ..formats import CATALOGUE, E2M1FN, Format

CHUNK = 1 << 17  # elements that are decoded at a time: temporaries stay in the cache
BUFFER = 1 << 20  # elements of a streamed tensor
TABULATED = 1 << 19  # elements from which a table of all pairs of a scale and a byte is faster
E8M0, E4M3, WIDE = "e8m0", "e4m3fn", "fp32"


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A quantised tensor as bytes."""

    codes: np.ndarray  # uint8, (..., rows, columns); of E2M1 in pairs, the even one in the low half
    element: Format  # of the codes
    scale: np.ndarray  # uint8 codes or float32, one for each block
    kind: str  # of the scales: e8m0, e4m3fn or fp32
    block: tuple[int, int]  # rows and columns that share a scale
    whole: np.ndarray | None = None  # float32, of the tensor or of each index of the leading axes
    divides: bool = False  # whether the scale is divided by ``whole``
    transposed: bool = False  # whether the value has the last two axes swapped

    @property
    def stored_shape(self) -> tuple[int, ...]:
        *lead, n = self.codes.shape
        return (*lead, n * (2 if self.element == E2M1FN else 1))

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.stored_shape
        return (*lead, columns, rows) if self.transposed else (*lead, rows, columns)

    @property
    def size(self) -> int:
        return math.prod(self.stored_shape)

    def matrices(self) -> Iterator[Packed]:
        """Yields the matrices of the leading axes, without copies."""
        return self.matrices_at(range(math.prod(self.codes.shape[:-2])))

    def matrices_at(self, indices: Iterable[int]) -> Iterator[Packed]:
        lead = self.codes.shape[:-2]
        whole = self.whole
        if whole is not None and whole.size > 1:
            whole = np.broadcast_to(whole, lead)
        for at in indices:
            index = np.unravel_index(at, lead) if lead else ()
            own = whole if whole is None or whole.size == 1 else whole[index]
            own = None if own is None else np.asarray(own).reshape(())
            yield dataclasses.replace(
                self, codes=self.codes[index], scale=self.scale[index], whole=own, transposed=False
            )

    def factors(self) -> np.ndarray:
        """Returns float32 factors of the blocks of a matrix, as the packages compute them."""
        return times_whole(scales(self.kind)[self.scale] if self.kind != WIDE else self.scale, self)


def times_whole(scale: np.ndarray, packed: Packed) -> np.ndarray:
    if packed.whole is None:
        return scale
    with np.errstate(all="ignore"):
        return scale / packed.whole if packed.divides else scale * packed.whole


@functools.cache
def scales(kind: str) -> np.ndarray:
    """Returns the number of each of the 256 bytes of a scale."""
    codes = np.arange(256, dtype=np.uint8)
    if kind == E8M0:  # 255 is 2^128 to NumPy: infinity, where E8M0 has NaN
        return np.append(np.ldexp(np.float32(1), codes[:255].astype(int) - 127), np.float32(np.nan))
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@functools.cache
def elements(fmt: Format) -> np.ndarray:
    """Returns the float32 number of each byte of an 8-bit format; of E2M1, of each of 16 codes."""
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    return fmt.decode(codes).astype(np.float32)


def _pairs(table: np.ndarray) -> np.ndarray:
    """Returns two numbers for each byte of two codes, from one for each code."""
    byte = np.arange(256)
    return np.stack([table[..., byte & 15], table[..., byte >> 4]], axis=-1)


def _table(packed: Packed, dtype: np.dtype) -> np.ndarray:
    """Returns the values of each (scale byte, code byte) as one integer for each index."""
    with np.errstate(all="ignore"):
        factors = times_whole(scales(packed.kind), packed)[:, None]
        table = elements(packed.element) * factors
    if packed.element == E2M1FN:
        table = _pairs(table)
    table = np.ascontiguousarray(table.astype(dtype)).reshape(1 << 16, -1)
    return table.view(f"u{table.itemsize * table.shape[1]}")[:, 0]


def values(packed: Packed, dtype: np.dtype | type = np.float32) -> np.ndarray:
    """Returns the values, float32, or rounded once to a narrower dtype."""
    dtype = np.dtype(dtype)
    out = np.empty(packed.stored_shape, dtype)
    flat = out.reshape(math.prod(out.shape[:-2]), *out.shape[-2:])
    for matrix, into in zip(packed.matrices(), flat, strict=True):
        Decoded(matrix, dtype).rows(0, into)
    return np.swapaxes(out, -1, -2) if packed.transposed else out


class Decoded:
    """The values of a packed tensor that isn't transposed, decoded when rows are sliced."""

    def __init__(self, packed: Packed, dtype: np.dtype | type = np.float32):
        self._packed, self._dtype = packed, np.dtype(dtype)
        self.shape = packed.stored_shape
        self.nbytes = packed.size * self._dtype.itemsize
        # a table of all pairs of bytes, or one of codes, which factors multiply
        by_row = packed.kind != WIDE and packed.block[0] == 1
        self._of_bytes = by_row and packed.size >= TABULATED

    def __getitem__(self, key: tuple[int, ...] | slice) -> Decoded | np.ndarray:
        """Returns a matrix of leading axes' indices, or rows of a matrix."""
        p = self._packed
        if isinstance(key, tuple):
            if not key:
                return self
            at = int(np.ravel_multi_index(key, p.codes.shape[:-2]))
            return Decoded(next(p.matrices_at([at])), self._dtype)
        start, stop, _ = key.indices(self.shape[0])
        out = np.empty((stop - start, self.shape[1]), self._dtype)
        self.rows(start, out)
        return out

    def streamed(self) -> Iterator[np.ndarray]:
        """Yields some rows at a time, in one buffer."""
        rows, columns = self.shape[-2:]
        step = max(1, BUFFER // max(1, columns))
        buffer = np.empty((min(step, rows), columns), self._dtype)
        for matrix in self._packed.matrices():
            decoded = Decoded(matrix, self._dtype)
            for i in range(0, rows, step):
                part = buffer[: min(step, rows - i)]
                decoded.rows(i, part)
                yield part

    @functools.cached_property
    def _table(self) -> np.ndarray:
        if self._of_bytes:
            return _table(self._packed, self._dtype)
        table = elements(self._packed.element)
        fp4 = self._packed.element == E2M1FN
        return _pairs(table).view(np.uint64)[:, 0] if fp4 else table

    @functools.cached_property
    def _factors(self) -> np.ndarray:
        return np.asarray(self._packed.factors())

    def rows(self, first: int, out: np.ndarray) -> None:
        """Decodes rows of a matrix from the first one on."""
        step = max(1, CHUNK // max(1, out.shape[1]))
        decode = self._by_bytes if self._of_bytes else self._by_factors
        for i in range(0, len(out), step):
            decode(first + i, out[i : i + step])

    def _by_bytes(self, first: int, out: np.ndarray) -> None:
        here = slice(first, first + len(out))
        codes, scale = self._packed.codes[here], self._packed.scale[here].astype(np.uint16) << 8
        width = self._packed.block[1] // (2 if self._packed.element == E2M1FN else 1)
        whole = codes.shape[1] // width * width  # the last block may be shorter
        index = np.empty(codes.shape, np.uint16)
        blocks = codes[:, :whole].reshape(len(codes), -1, width)
        joined = blocks | scale[:, : blocks.shape[1], None]
        index[:, :whole] = joined.reshape(len(codes), whole)
        index[:, whole:] = codes[:, whole:] | scale[:, -1:]
        np.take(self._table, index, out=out.view(self._table.dtype), mode="wrap")

    def _by_factors(self, first: int, out: np.ndarray) -> None:
        """Scales are float32, or hold for several rows."""
        (r, c), columns = self._packed.block, out.shape[1]
        codes = self._packed.codes[first : first + len(out)]
        wide = np.take(self._table, codes, mode="wrap").view(np.float32)
        factors = self._factors[np.arange(first, first + len(out)) // r]
        if not (factors.shape[1] == 1 and c >= columns):
            factors = np.repeat(factors, c, axis=1)[:, :columns]
        with np.errstate(all="ignore"):
            out[...] = np.multiply(wide, factors, out=wide)


def slabs(
    x: np.ndarray | Decoded, dtype: np.dtype | type = np.float32
) -> Iterator[tuple[tuple[int, ...], int, np.ndarray]]:
    """Yields (index of leading axes, first row, rows) over an array of two axes or more."""
    *lead, rows, columns = x.shape
    step = max(1, CHUNK // max(1, columns))
    for index in np.ndindex(*lead):
        matrix = x[index] if lead else x
        for i in range(0, rows, step):
            yield index, i, np.asarray(matrix[i : i + step]).astype(dtype, copy=False)


def largest_of_blocks(blocks: np.ndarray) -> np.ndarray:
    """Returns the largest magnitudes along the last axis, whose size is a power of two.

    Halves of strided arrays are four times as fast as NumPy's reduction of a short axis.
    """
    top = np.abs(blocks).reshape(-1)
    for _ in range(blocks.shape[-1].bit_length() - 1):
        top = np.maximum(top[0::2], top[1::2])
    return top.reshape(blocks.shape[:-1])


def nibbles(codes: np.ndarray) -> np.ndarray:
    out = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]), np.uint8)
    out[..., 0::2], out[..., 1::2] = codes & 15, codes >> 4
    return out


def one_each(codes: np.ndarray, element: Format) -> np.ndarray:
    return nibbles(codes) if element == E2M1FN else codes


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Returns bytes of two codes, the even one in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def from_halves(codes: np.ndarray, block: int) -> np.ndarray:
    """Returns bytes of element pairs from bytes that hold elements j and j + half a block."""
    halves = codes.reshape(*codes.shape[:-1], -1, block // 2)
    both = np.concatenate([halves & 15, halves >> 4], axis=-1)
    return pack_nibbles(both).reshape(codes.shape)


ELEMENTS = {
    "F8_E4M3": CATALOGUE["e4m3fn"], "F8_E5M2": CATALOGUE["e5m2"],
    "F8_E4M3FNUZ": CATALOGUE["e4m3fnuz"], "F8_E5M2FNUZ": CATALOGUE["e5m2fnuz"],
}  # fmt: skip
"""The formats of safetensors' dtypes of one byte; codes of other dtypes are E2M1's, in pairs."""


@dataclasses.dataclass
class Loss:
    """The difference of two arrays of the same shape; finite numbers count."""

    numbers: int = 0  # that were compared
    signal: float = 0.0  # sum of squares of the first array
    noise: float = 0.0  # sum of squares of the difference
    largest: float = 0.0  # magnitude of the difference
    saturated: int = 0  # numbers beyond the largest that the second array's scale allows
    flushed: int = 0  # numbers other than zero that became zero
    non_finite: int = 0  # numbers that are finite in one of them alone

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
    x, y = (np.reshape(z, (1, -1)) if isinstance(z, np.ndarray) and z.ndim < 2 else z
            for z in (x, y))  # fmt: skip
    found, own = Loss(), (getattr(z, "dtype", np.float32) for z in (x, y))
    dtype = np.float64 if np.float64 in own else np.float32
    for (_, _, a), (_, _, b) in zip(slabs(x, dtype), slabs(y, dtype), strict=True):
        _add(found, a, b)
    if packed is not None:
        found.saturated = _saturated(x, packed)
    return found


def _add(found: Loss, a: np.ndarray, b: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        wrong = b - a
    largest = max(float(wrong.max(initial=0)), -float(wrong.min(initial=0)))
    if not math.isfinite(largest):
        finite = np.isfinite(wrong)
        found.non_finite += int(np.sum(np.isfinite(a) != np.isfinite(b)))
        wrong, a = np.where(finite, wrong, 0), np.where(finite, a, 0)
        largest = float(np.max(np.abs(wrong), initial=0))
    found.numbers += a.size
    found.flushed += int(np.count_nonzero((b == 0) & (a != 0)))
    found.largest = max(found.largest, largest)
    if not 1e-12 < max(float(a.max(initial=0)), -float(a.min(initial=0)), largest) < 1e15:
        a, wrong = a.astype(np.float64), wrong.astype(np.float64)  # squares leave float32
    for name, x in (("signal", a), ("noise", wrong)):
        squares = np.einsum("ij,ij->i", x, x)
        setattr(found, name, getattr(found, name) + float(np.sum(squares, dtype=np.float64)))


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
