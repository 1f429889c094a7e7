"""Quantises arrays to packed weights, with the bytes of the package whose name a writer has.

Packages differ in details that no specification fixes; :data:`WRITERS` states them. All arithmetic
is float32, as theirs is on float32 weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from ..formats import BLOCK_FORMATS, E2M1FN, E4M3FN, BlockFormat, Format
from ._layouts import Layout
from ._packed import (
    CHUNK,
    Decoded,
    Packed,
    elements,
    largest_of_blocks,
    pack_nibbles,
    scales,
    slabs,
    times_whole,
)  # fmt: skip

Choice = Literal["amax", "four_over_six", "mse"]
SEARCH = {  # factors of amax's scale beside 1
    "four_over_six": (1.5,),
    "mse": tuple(c for c in np.linspace(0.6, 1.5, 19).tolist() if c != 1),
}
LARGEST_FACTOR = np.float32(2.0**126)
TOP = {E2M1FN: np.float32(6), E4M3FN: np.float32(448)}


@dataclasses.dataclass(frozen=True)
class Writer:
    """The details in which packages differ where they quantise."""

    name: str
    zero: float  # NVFP4: the block scale of a block of zeros
    smallest: float  # NVFP4: the smallest block scale
    exponent: str  # MX: as for scaled.Mx; "even" rounds up from mantissa 1.75
    # NVFP4 and 128 x 128: by the factor, or by its reciprocal as the package computes it
    product: Literal["divide", "reciprocal"] = "divide"
    signed_zero: bool = True  # whether an input of -0 keeps its sign in E2M1
    empty: float = 1.0  # FP8: the scale of zeros alone


WRITERS = {
    w.name: w
    for w in (
        Writer("compressed-tensors", 0.125, 0.0, "even", signed_zero=False, empty=2.0**-23),
        Writer("modelopt", 1.0, 2.0**-9, "rceil", signed_zero=False),
        Writer("transformers", 2.0**-9, 2.0**-9, "floor", product="reciprocal"),
        Writer("triton-kernels", 2.0**-9, 2.0**-9, "rceil", signed_zero=False),
    )
}
OF_FAMILY = {"deepseek": "transformers", "gpt-oss": "triton-kernels"}


def writer_of(family: str) -> Writer:
    return WRITERS[OF_FAMILY.get(family, family)]


@functools.cache
def _codes(fmt: Format) -> np.ndarray:
    """Returns the code of each 16-bit prefix of a float32 number, whose last bit is sticky.

    No number halfway between two neighbours has more than 6 bits, so the prefix decides.
    """
    numbers = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    return np.asarray(fmt.encode(numbers, saturate="finite")).astype(np.uint8)


def encoded(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Returns the codes of float32 numbers, rounded to nearest even, saturated."""
    bits = x.view(np.uint32)
    prefix = (bits >> 16).astype(np.uint16)
    prefix |= (bits & 0xFFFF) != 0
    return np.take(_codes(fmt), prefix, mode="wrap")


def amax(x: np.ndarray | Decoded) -> float:
    top = 0.0
    for _, _, rows in slabs(x):
        largest = float(np.max(np.abs(rows), initial=0.0))
        if not math.isfinite(largest):
            return largest
        top = max(top, largest)
    return top


def quantised(
    x: np.ndarray | Decoded,
    layout: Layout,
    writer: Writer,
    *,
    largest: float | None = None,
    choice: Choice = "amax",
    strategy: str | tuple[int, int] = "channel",
) -> Packed:
    """Returns an array, ``(..., rows, columns)`` in the value's order, in a layout's format.

    ``largest`` is the largest magnitude of the tensors that share the scale of the whole tensor.
    ``strategy`` is what shares a scale of FP8 without blocks.
    """
    if layout.transposed and isinstance(x, np.ndarray):
        x = np.swapaxes(x, -1, -2)
    largest = amax(x) if largest is None else largest
    out = shaped(x.shape, layout, strategy)
    fmt = BLOCK_FORMATS.get(layout.format)
    out = dataclasses.replace(out, whole=_whole(fmt, layout, largest, choice))
    for index in np.ndindex(*x.shape[:-2]):
        matrix = dataclasses.replace(out, codes=out.codes[index], scale=out.scale[index])
        if fmt is None:
            _tiles(x[index], matrix, writer, largest)
        else:
            _rows(x[index], matrix, writer, choice)
    return out


def shaped(shape: tuple[int, ...], layout: Layout, strategy: str | tuple[int, int]) -> Packed:
    """Returns a packed tensor of arbitrary bytes in a layout, for an array of a stored shape."""
    fmt = BLOCK_FORMATS.get(layout.format)
    *lead, rows, columns = shape
    if fmt is not None and columns % fmt.size:
        raise ValueError(f"{columns} columns are no multiple of the block size {fmt.size}")
    if fmt is not None:
        block = (1, fmt.size)
    else:
        of = {"channel": (1, columns), "tensor": (rows, columns), "block": (128, 128)}
        block = layout.block or (of[strategy] if isinstance(strategy, str) else strategy)
    element, dtype, kind = E4M3FN, np.dtype(np.float32), "fp32"
    if fmt is not None:
        element, dtype, kind = fmt.element, np.dtype(np.uint8), fmt.scale.name
    codes = np.empty((*lead, rows, columns // (2 if element == E2M1FN else 1)), np.uint8)
    scale = np.empty((*lead, -(-rows // block[0]), -(-columns // block[1])), dtype)
    whole = np.ones((), np.float32) if fmt is not None and fmt.tensor_scale else None
    return Packed(codes, element, scale, kind, block, whole, layout.divides, layout.transposed)


def _whole(
    fmt: BlockFormat | None, layout: Layout, largest: float, choice: Choice
) -> np.ndarray | None:
    if fmt is None or fmt.tensor_scale is None:
        return None
    top = np.float32(largest)
    most = np.float32(6 * (256 if choice == "four_over_six" else 448))
    if not 0 < top < np.inf:
        return np.full((), most if layout.divides else 1, np.float32)
    with np.errstate(over="ignore"):
        whole = most / top if layout.divides else top / most
    normal = np.finfo(np.float32)
    return np.asarray(np.clip(whole, normal.smallest_normal, normal.max))


def _rows(x: np.ndarray | Decoded, out: Packed, writer: Writer, choice: Choice) -> None:
    """Quantises a matrix with scales for blocks of a row, several rows at a time."""
    columns, size = x.shape[-1], out.block[1]
    step = max(1, CHUNK // max(1, columns))
    of_scale = _two_levels if out.kind == "e4m3fn" else _exponents
    for i in range(0, x.shape[0], step):
        blocks = np.asarray(x[i : i + step]).astype(np.float32).reshape(-1, columns // size, size)
        if not writer.signed_zero and out.element == E2M1FN:
            blocks += np.float32(0)
        top = largest_of_blocks(blocks)
        scale, factor = _searched(blocks, top, out, writer, choice, of_scale)
        codes = encoded(_divided(blocks, factor, out, writer), out.element)
        codes = codes.reshape(len(blocks), columns)
        out.codes[i : i + step] = pack_nibbles(codes) if out.element == E2M1FN else codes
        out.scale[i : i + step] = scale


def _divided(blocks: np.ndarray, scale: np.ndarray, out: Packed, writer: Writer) -> np.ndarray:
    """Returns the blocks over their factors, in the writer's order of operations."""
    with np.errstate(all="ignore"):
        if out.kind == "e8m0":  # exact, except for the smallest scales
            return blocks / np.maximum(scale, np.float32(2.0**-126))[..., None]
        if writer.product == "reciprocal" and out.whole is not None and not out.divides:
            return blocks * ((np.float32(1) / out.whole) / scale)[..., None]
        if out.whole is None:
            return blocks / scale[..., None]
        factor = times_whole(scale, out)
        return blocks / np.where(factor > 0, factor, np.float32(1))[..., None]


def _two_levels(top: np.ndarray, out: Packed, writer: Writer) -> np.ndarray:
    with np.errstate(all="ignore"):
        if out.whole is None:
            scale = top / np.float32(6)
        elif out.divides:
            scale = out.whole * (top / np.float32(6))
        elif writer.name == "modelopt":
            scale = top / (np.float32(6) * out.whole)
        else:
            scale = (top / np.float32(6)) / out.whole
    scale = np.where(top == 0, np.float32(writer.zero), scale)
    scale = np.maximum(scale, np.float32(writer.smallest))
    codes = encoded(np.minimum(scale, np.float32(448)), E4M3FN)
    return np.where(
        codes == 0, encoded(np.array([writer.zero or 2.0**-9], np.float32), E4M3FN), codes
    )


def _exponents(top: np.ndarray, out: Packed, writer: Writer) -> np.ndarray:
    largest = TOP[out.element]
    bits = top.astype(np.float32).view(np.uint32)
    if writer.exponent == "even":  # from mantissa 1.75, whatever the element
        bits = bits + np.uint32(1 << 21)
    if writer.exponent == "rceil":
        bits = (top / largest).view(np.uint32)
        exponent = (bits >> 23).astype(np.int32) + ((bits & 0x7FFFFF) != 0)
    else:
        exponent = (bits >> 23).astype(np.int32) - out.element.max_exponent
    # a larger scale would make the element's largest number infinite in float32
    return np.clip(exponent, 0, 254 - out.element.max_exponent).astype(np.uint8)


def _searched(
    blocks: np.ndarray, top: np.ndarray, out: Packed, writer: Writer, choice: Choice,
    of_scale: Callable[[np.ndarray, Packed, Writer], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Returns the scales' bytes and numbers with the smallest squared error of the candidates."""
    numbers, scale = scales(out.kind), of_scale(top, out, writer)
    if choice == "amax":
        return scale, numbers[scale]
    best = _error(blocks, numbers[scale], out, writer)
    for factor in (0.5, 2.0) if out.kind == "e8m0" else SEARCH[choice]:
        other = of_scale(top * np.float32(factor), out, writer)
        error = _error(blocks, numbers[other], out, writer)
        better = error < best
        scale, best = np.where(better, other, scale), np.where(better, error, best)
    return scale, numbers[scale]


def _error(blocks: np.ndarray, scale: np.ndarray, out: Packed, writer: Writer) -> np.ndarray:
    codes = encoded(_divided(blocks, scale, out, writer), out.element)
    wrong = elements(out.element)[codes] * times_whole(scale, out)[..., None] - blocks
    return np.einsum("...i,...i->...", wrong, wrong)


def _tiles(x: np.ndarray | Decoded, out: Packed, writer: Writer, largest: float) -> None:
    """Quantises a matrix to E4M3 with float32 scales of tiles, channels or the tensor."""
    (r, c), columns, high = out.block, x.shape[1], np.float32(448)
    one = out.scale.size == 1
    tall = r > 1 and not one
    step = r if tall else max(1, CHUNK // max(1, columns))
    for i in range(0, x.shape[0], step):
        part = np.asarray(x[i : i + step]).astype(np.float32)
        if one:
            top = np.full((1, 1), largest, np.float32)
        else:
            top = np.abs(part)
            top = top.max(axis=0, keepdims=True) if tall else top
            padded = np.pad(top, ((0, 0), (0, -columns % c))) if columns % c else top
            top = padded.reshape(len(top), -1, c).max(axis=-1)
        scale, factor = _tile_scales(top, writer, high)
        out.scale[0 if one else slice(i // r, i // r + len(top))] = scale
        factor = np.repeat(factor, c, axis=1)[:, :columns] if factor.shape[1] > 1 else factor
        with np.errstate(all="ignore"):
            y = part * factor if writer.name == "transformers" else part / factor
        out.codes[i : i + step] = encoded(np.clip(y, -high, high), E4M3FN)


def _tile_scales(
    top: np.ndarray, writer: Writer, high: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales that are stored, and what the numbers are multiplied or divided by."""
    empty, one = top == 0, np.float32(1)
    multiplies = writer.name == "transformers"
    with np.errstate(all="ignore"):
        # tiny tiles keep the smallest normal scale: backends flush a subnormal one to 0
        product = np.where(empty, one, np.minimum(high / np.where(empty, one, top), LARGEST_FACTOR))
        scale = one / product if multiplies else np.where(empty, writer.empty, top / high)
        scale = np.maximum(scale.astype(np.float32), one / LARGEST_FACTOR)
    return scale, product if multiplies else scale
