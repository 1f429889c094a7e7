"""Weights of a checkpoint: their parts in a file, decoded when they are used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .._types import Json
from ..formats import E2M1FN
from ..rounding import EncodedArray
from ..scaled import ScaledArray, join_parts
from ._files import Tensor, UnreadableError
from ._layouts import Layout, Role
from ._packed import E4M3, E8M0, ELEMENTS, WIDE, Loss, Packed, nibbles, pack_nibbles, values

BLOCK_SIZES = (128, 64, 32, 16)
KINDS = {"U8": E8M0, "F8_E8M0": E8M0, "F8_E4M3": E4M3}  # of scales; others are wide floats


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """One array of a checkpoint, decoded when it is used."""

    name: str  # of the array, whatever its parts are called
    layout: Layout | None  # None for a tensor that is stored as it is
    parts: Mapping[Role, Tensor]
    record: Json = None  # what the file says about it: torchao's or scalewise's metadata
    block: tuple[int, int] | None = None  # that shares a scale, if the config says it

    @property
    def kind(self) -> str:
        if self.layout is None:
            return "scalewise" if self.record else "plain"
        return self.layout.name

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in {id(t): t for t in self.parts.values()}.values())

    @property
    def shape(self) -> tuple[int, ...]:
        if self.layout is None:
            return self.parts["codes"].shape if not self.record else self.scaled().shape
        return self.packed.shape[1:] if self._flat else self.packed.shape

    @property
    def _flat(self) -> bool:
        """Whether it is a vector, which :attr:`packed` holds as a row."""
        return len(self.parts["codes"].shape) == 1

    @property
    def format(self) -> str:
        if self.layout is None:
            return "scalewise" if self.record else self.parts["codes"].dtype.lower()
        if self.layout.format == "deepseek":
            return "e4m3fn"
        return self.packed.element.name if self.layout.scale_dtypes[0] == "F32" else (
            self.layout.format)  # fmt: skip

    def record_of(self, what: str, fmt: str, size: int, lost: Loss | None = None) -> Json:
        found = {"name": self.name, "what": what, "from": self.kind, "to": fmt, "size": size,
                 "bytes": self.nbytes}  # fmt: skip
        return found | ({"loss": lost.record()} if lost else {})

    @property
    def channels(self) -> np.ndarray | None:
        """The float32 factors of the input's channels (AWQ), which :meth:`value` leaves out."""
        pre = self.parts.get("pre")
        return None if pre is None else pre.array().astype(np.float32).reshape(-1)

    def effective(self, dtype: np.dtype | type = np.float32) -> np.ndarray:
        """Returns the numbers that multiply the layer's input: :meth:`value` times the factors."""
        channels = self.channels
        x = self.value(dtype if channels is None else np.float32)
        with np.errstate(over="ignore"):
            return x if channels is None else (x * channels).astype(dtype)

    @cached_property
    def packed(self) -> Packed:
        """The bytes in normal form."""
        assert self.layout is not None
        return _packed(self)

    def value(self, dtype: np.dtype | type = np.float32) -> np.ndarray:
        """Returns the numbers, float32 or rounded once to a dtype, as the layout's package does.

        Integers and float64 stay as they are.
        """
        if self.layout is not None:
            return values(self.packed, dtype).reshape(self.shape)
        if self.record:
            stored = self.scaled()
            wide = stored.wide_dtype if isinstance(stored, ScaledArray) else np.float32
            return np.asarray(stored.astype(wide)).astype(dtype)
        x = self.parts["codes"].array()
        dtype = np.dtype(dtype)
        if x.dtype.kind not in "fV" or x.dtype in (np.float64, dtype):
            return x
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(dtype, copy=False)

    def scaled(self) -> jax.Array | np.ndarray | ScaledArray | EncodedArray:
        """Returns the ScaledArray of a quantised weight, packed as stored; others as arrays.

        A scale that divides becomes its reciprocal, rounded to float32; blocks of several rows get
        their scale for each row. All else equals :meth:`value` to the bit.
        """
        if self.layout is not None:
            return _scaled(self.packed, self._flat)
        arrays: Json = {t.name: t.array() for t in self.parts.values()}
        return join_parts(self.name, self.record, arrays) if self.record else arrays[self.name]


def original_dtype(weight: Weight, config: Mapping[str, Json]) -> np.dtype | None:
    """Returns the dtype that a quantised weight had, by torchao's record or a model's config."""
    for said in (weight.record or {}, config):
        for key in ("orig_dtype", "dtype", "torch_dtype"):
            found = said.get(key)
            name = found.get("_data") if isinstance(found, dict) else found
            if name in ("float16", "bfloat16", "float32"):
                return np.dtype(jnp.dtype(name))
    return None


def _packed(weight: Weight) -> Packed:
    layout, parts = weight.layout, weight.parts
    assert layout is not None
    codes, scale = parts["codes"], parts["scale"].array()
    element = ELEMENTS.get(codes.dtype, E2M1FN)
    raw = codes.bytes.reshape(codes.array().shape)
    if layout.family == "gpt-oss":  # groups of 16 bytes
        raw = raw.reshape(*raw.shape[:-2], -1)
    if layout.nibbles == "swapped":
        raw = (raw << 4) | (raw >> 4)
    if raw.ndim == 1:
        raw = raw[None]
    if raw.ndim < 2:
        raise UnreadableError(f"{weight.name!r} has no axis; {layout.name} has one or more")
    kind, shared = KINDS.get(parts["scale"].dtype, WIDE), (1, 1)
    packed = Packed(raw, element, scale, kind, shared, _whole(weight), layout.divides,
                    layout.transposed)  # fmt: skip
    swizzled = layout.swizzled or bool(weight.record and weight.record.get("is_swizzled_scales"))
    block, scale = _blocks(weight, packed, swizzled)
    scale = scale.astype(np.float32) if packed.kind == "fp32" else scale.view(np.uint8)
    return dataclasses.replace(packed, scale=scale, block=block)


def _whole(weight: Weight) -> np.ndarray | None:
    if "whole" not in weight.parts:
        return None
    whole = weight.parts["whole"].array().astype(np.float32)
    lead = weight.parts["codes"].shape[:-2]
    if whole.size not in (1, math.prod(lead)):
        raise _misfit(weight, whole.shape, weight.parts["codes"].shape)
    return whole.reshape(()) if whole.size == 1 else whole.reshape(lead)


def _blocks(weight: Weight, packed: Packed, swizzled: bool) -> tuple[tuple[int, int], np.ndarray]:
    """Returns the rows and columns that share a scale, and the scales in their shape."""
    layout, scale, shape = weight.layout, packed.scale, packed.stored_shape
    assert layout is not None
    *lead, rows, columns = shape
    if scale.size == 1:
        return (rows, columns), scale.reshape(*(1,) * len(lead), 1, 1) if not lead else (
            np.broadcast_to(scale.reshape(()), (*lead, 1, 1)))  # fmt: skip
    if scale.shape == (rows,) and not lead:
        scale = scale[:, None]
    if scale.shape == tuple(lead) and lead:  # one for each expert
        scale = scale[..., None, None]
    if scale.ndim == len(shape) + 2 and scale.shape[-1] == scale.shape[-3] == 1:
        scale = scale[..., 0, :, 0]
    experts = layout.name == "fbgemm/fp8-experts"
    if scale.shape == (*lead, columns, 1) and lead and (rows != columns or experts):
        scale = np.swapaxes(scale, -1, -2)  # as transformers' FbgemmFp8 writes experts' down_proj
    said = layout.family == "deepseek" and weight.block is not None
    hints = [b for b in (weight.block, None if said else layout.block) if b is not None]
    block = next((b for b in hints if scale.shape == _scales(shape, b)), None)
    if block is None and hints:
        wanted = _scales(shape, hints[0])
        if swizzled:
            return hints[0], unswizzled(scale, wanted)
        if said or (layout.block is not None and layout.family != "deepseek"):
            raise _misfit(weight, scale.shape, shape, f"; expected {wanted}")
    if block is None:  # tiles of another size, as the scales' shape says
        if scale.ndim != len(shape):
            raise _misfit(weight, scale.shape, shape)
        pairs = zip(shape[-2:], scale.shape[-2:], strict=True)
        sizes = tuple(_size(n, s) for n, s in pairs)
        halves = packed.element == E2M1FN and sizes[1] % 2  # a byte would have two scales
        if halves or not all(sizes) or scale.shape[:-2] != tuple(lead):
            raise _misfit(weight, scale.shape, shape)
        block = sizes[0], sizes[1]
    return block, unswizzled(scale, scale.shape) if swizzled else scale


def _misfit(weight: Weight, scale: tuple, shape: tuple, more: str = "") -> UnreadableError:
    return UnreadableError(
        f"{weight.name!r}: a scale of shape {scale} for {shape} numbers in {weight.kind}{more}"
    )


def _scales(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    *lead, rows, columns = shape
    return (*lead, -(-rows // block[0]), -(-columns // block[1]))


def _size(n: int, scales: int) -> int:
    """Returns the size of the blocks of an axis, a power of two; 0 if there is none.

    Of two scales for 192 numbers the second is for the last 64, not for 96.
    """
    if scales == 1:
        return n
    if scales == n:
        return 1
    whole = n // scales if scales and n % scales == 0 else 0
    if whole & (whole - 1) == 0 and whole:
        return whole
    return next((b for b in BLOCK_SIZES if -(-n // b) == scales), whole)


def unswizzled(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns block scales in rows from tiles of 128 x 4 as cuBLAS reads them.

    docs.nvidia.com/cuda/cublas, "1D block scaling factors layout".
    """
    *lead, rows, columns = shape
    tall = math.prod(lead) * rows
    tiles = -(-tall // 128), -(-columns // 4)
    if scale.size != tiles[0] * tiles[1] * 512:
        raise UnreadableError(f"swizzled scales of shape {scale.shape} for {shape} blocks")
    x = scale.reshape(*tiles, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    x = x.reshape(tiles[0] * 128, tiles[1] * 4)
    return np.ascontiguousarray(x[:tall, :columns]).reshape(shape)


def swizzled(scale: np.ndarray) -> np.ndarray:
    """Returns the scales of a matrix of blocks in the order of :func:`unswizzled`, padded by 0."""
    rows, columns = scale.shape
    tiles = -(-rows // 128), -(-columns // 4)
    padded = np.zeros((tiles[0] * 128, tiles[1] * 4), scale.dtype)
    padded[:rows, :columns] = scale
    x = padded.reshape(tiles[0], 4, 32, tiles[1], 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(x).reshape(tiles[0] * 32, tiles[1] * 16)


def _scaled(packed: Packed, flat: bool) -> ScaledArray:
    *lead, rows, columns = packed.stored_shape
    codes, scale = packed.codes, packed.scale
    r, c = packed.block
    if r not in (1, rows):
        scale = np.repeat(scale, r, axis=-2)[..., :rows, :]
    if packed.transposed:
        scale = np.swapaxes(scale, -1, -2)
        codes = np.swapaxes(nibbles(codes), -1, -2)
        codes = np.pad(codes, [*[(0, 0)] * (codes.ndim - 1), (0, codes.shape[-1] % 2)])
        codes = pack_nibbles(codes)
    axis = len(lead) + (0 if packed.transposed else 1)
    if flat:
        codes, scale, axis = codes[0], scale[0], 0
    dtypes = {"e8m0": ml_dtypes.float8_e8m0fnu, "e4m3fn": ml_dtypes.float8_e4m3fn}
    if packed.kind in dtypes:
        scale = np.ascontiguousarray(scale).view(dtypes[packed.kind])
    stored: jax.Array | ScaledArray = jnp.asarray(scale)
    if packed.whole is not None:
        whole = packed.whole.reshape(-1, *(1,) * (len(lead) + 1)) if packed.whole.size > 1 else (
            packed.whole.reshape(()))  # fmt: skip
        stored = ScaledArray(stored, jnp.asarray(1 / whole if packed.divides else whole))
    block = (axis, c) if c < columns else None
    if packed.element == E2M1FN:
        length = rows if packed.transposed else columns
        data = EncodedArray(jnp.asarray(codes), E2M1FN, length)
    else:
        assert packed.element.dtype is not None
        data = jnp.asarray(codes.view(packed.element.dtype))
    return ScaledArray(data, stored, block)
