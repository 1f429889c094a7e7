"""Arrays stored as other arrays, and EncodedArray, whose codes are packed into bytes: two of 4 bits
in 1, four of 6 bits in 3."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike, DTypeLike

from .._check import Natural, checked
from .._jax import Tracer
from .._types import PyTree
from ..formats import BlockFormat, Format, check_codes
from ..formats import format as format_
from ._codes import check_decodes, decoded
from ._round import cast

Node = TypeVar("Node")
KINDS: list[type[StoredArray]] = []  # which flax.serialization doesn't know yet


def exportable(cls: type[Node]) -> type[Node]:
    """Lets ``jax.export`` serialize a pytree; its static part is of tuples, numbers, formats."""
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"{cls.__module__.partition('.')[0]}.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static, default=_format_fields).encode(),
        deserialize_auxdata=lambda text: _static(json.loads(bytes(text))),
    )
    return cls


def _format_fields(value: object) -> dict[str, Any]:
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, BlockFormat):
        fields = dataclasses.fields(value)
        return {"block_format": {f.name: getattr(value, f.name) for f in fields}}
    if not isinstance(value, Format):
        raise TypeError(f"jax.export: no function of a pytree with {value!r} can be serialized")
    return dataclasses.asdict(value)


def _static(value: Any) -> Any:
    if isinstance(value, dict) and "block_format" in value:
        return BlockFormat(**{k: _static(x) for k, x in value["block_format"].items()})
    if isinstance(value, dict):
        return jnp.dtype(value["dtype"]) if "dtype" in value else Format(**value)
    return tuple(map(_static, value)) if isinstance(value, list) else value


class StoredArray:
    """An array stored as other arrays: a pytree, whose value is computed when it is read.

    A subclass is a frozen dataclass. Its fields are the pytree's children, except for those in
    ``STATIC``. ``flax.serialization`` saves and restores it, once a program has imported that, and
    ``jax.export`` serializes functions of it.
    """

    STATIC: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls):
        KINDS.append(cls)
        jax.tree_util.register_pytree_node_class(cls)
        if cls.__module__.startswith(__name__.partition(".")[0]):
            exportable(cls)

    def __post_init__(self):
        _serializable()

    def value(self) -> jax.Array:
        """Returns the plain array."""
        raise NotImplementedError

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.value())
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        children = tuple(getattr(self, name) for name in self._children())
        static = tuple(getattr(self, name) for name in self.STATIC)
        return children, static[0] if len(static) == 1 else static or None

    @classmethod
    def tree_unflatten(cls, static: Any, children: tuple[Any, ...]) -> Self:
        _serializable()
        self = object.__new__(cls)  # leaves may be any object while a tree is mapped: no checks
        fields = zip(cls._children(), children, strict=True)
        own = (static,) if len(cls.STATIC) == 1 else static or ()
        for name, value in (*fields, *zip(cls.STATIC, own, strict=True)):
            object.__setattr__(self, name, value)
        return self

    @classmethod
    def _children(cls) -> tuple[str, ...]:
        fields: Any = cls
        return tuple(f.name for f in dataclasses.fields(fields) if f.name not in cls.STATIC)


def _serializable() -> None:
    if not KINDS:
        return
    flax: Any = sys.modules.get("flax.serialization")
    if flax is None or not hasattr(flax, "register_serialization_state"):
        return

    def state(x: Any) -> dict[str, PyTree]:
        children, _ = x.tree_flatten()
        return {str(i): flax.to_state_dict(child) for i, child in enumerate(children)}

    def restored(x: Any, state: dict[str, PyTree]) -> PyTree:
        children, static = x.tree_flatten()
        new = [flax.from_state_dict(c, state[str(i)]) for i, c in enumerate(children)]
        return type(x).tree_unflatten(static, new)

    while KINDS:
        flax.register_serialization_state(KINDS.pop(), state, restored, override=True)


PACKED_AXIS = "Packed codes stay the last axis: in_axes and out_axes have to be in front of it"
WIDTHS = (3, 4, 6)  # a whole number of such codes fills 3 bytes or less


@checked
def pack(codes: ArrayLike, fmt: Format | str) -> jax.Array:
    """Packs the codes of a narrow format into bytes, without gaps along the last axis.

    The first code takes the lowest bits, as in ONNX's FLOAT4E2M1 and little-endian bit order
    (``np.packbits(..., bitorder="little")`` of each code's bits).

    Args:
        codes: integers from 0 to 2^bits - 1, as :func:`scalewise.cast` returns them, or an array of
            the format's own dtype; at least one dimension.
        fmt: a format of 3, 4 or 6 bits, or its name.

    Returns:
        A uint8 array with ``ceil(n * bits / 8)`` bytes along the last axis. Unused high bits of
        the last byte are 0.

    Raises:
        TypeError: the codes are neither integers nor of the format's dtype.
        ValueError: the format has another width, there is no dimension, or a code is out of range
            (under jit codes aren't checked, and their higher bits are ignored).

    Example:
        >>> pack(np.array([1, 2, 3], np.uint8), "e2m1fn").tolist()
        [33, 3]
    """
    fmt = _narrow(fmt, "pack")
    codes = _codes(codes, fmt)
    per, width = _group(fmt)
    whole = _regrouped(codes, (per, fmt.bits), (width, 8))
    return whole[..., : -(-codes.shape[-1] * fmt.bits // 8)]


@checked
def unpack(packed: ArrayLike, fmt: Format | str, size: Natural) -> jax.Array:
    """Returns the codes that :func:`pack` packed.

    Args:
        packed: uint8, with ``ceil(size * bits / 8)`` bytes along the last axis.
        fmt: the format, or its name.
        size: the number of codes along the last axis.

    Returns:
        The codes as uint8, with ``size`` along the last axis.

    Raises:
        TypeError: ``packed`` isn't uint8.
        ValueError: the format has another width, or the last axis another length.

    Example:
        >>> unpack(np.array([33, 3], np.uint8), "e2m1fn", 3).tolist()
        [1, 2, 3]
    """
    fmt = _narrow(fmt, "unpack")
    packed = jnp.asarray(packed)
    if packed.dtype != jnp.uint8:
        raise TypeError(f"unpack: packed is {packed.dtype}; expected uint8")
    need = -(-size * fmt.bits // 8)
    if packed.ndim == 0 or packed.shape[-1] != need:
        raise ValueError(
            f"unpack: packed has shape {packed.shape}; expected {need} bytes along the last axis "
            f"for {size} codes of {fmt.name}"
        )
    per, width = _group(fmt)
    return _regrouped(packed, (width, 8), (per, fmt.bits))[..., :size]


def _regrouped(x: jax.Array, given: tuple[int, int], wanted: tuple[int, int]) -> jax.Array:
    """Returns integers with the bits of others, in groups of so many integers of so many bits."""
    n, (count, width) = given[0], wanted
    groups = -(-x.shape[-1] // n)
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % n)]
    parts = jnp.pad(x, pad).reshape(*x.shape[:-1], groups, n).astype(jnp.uint32)
    places, shifts = (
        (np.arange(k, dtype=np.uint32) * np.uint32(w)).reshape((1,) * x.ndim + (k,))
        for k, w in (given, wanted)
    )
    word = jnp.sum(parts << places, axis=-1, dtype=jnp.uint32, keepdims=True)
    parts = (word >> shifts) & jnp.uint32(2**width - 1)
    return parts.astype(jnp.uint8).reshape(*x.shape[:-1], groups * count)


def _narrow(fmt: Format | str, name: str) -> Format:
    fmt = format_(fmt)
    if fmt.bits not in WIDTHS:
        raise ValueError(
            f"{name}: {fmt.name} has {fmt.bits} bits; expected a format of 3, 4 or 6 bits"
        )
    return fmt


def _codes(codes: Any, fmt: Format) -> jax.Array:
    if fmt.dtype is not None and getattr(codes, "dtype", None) == fmt.dtype:
        if not isinstance(codes, jax.Array):
            codes = np.asarray(codes).view(np.uint8)
        else:
            codes = lax.bitcast_convert_type(codes, jnp.uint4 if fmt.bits == 4 else jnp.uint8)
            return codes.astype(jnp.uint32)
    if not isinstance(codes, jax.Array):
        codes = np.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"pack: codes are {codes.dtype}; expected integers or {fmt.dtype}")
    if codes.ndim == 0:
        raise ValueError("pack: codes have no dimension; expected at least one")
    if not isinstance(codes, Tracer):
        check_codes(fmt, codes)
    return jnp.asarray(codes).astype(jnp.uint32) & jnp.uint32(2**fmt.bits - 1)


def _group(fmt: Format) -> tuple[int, int]:
    whole = math.lcm(fmt.bits, 8)
    return whole // fmt.bits, whole // 8


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedArray(StoredArray):
    """An array stored as codes, for formats without a dtype of whole bytes.

    XLA on CPU doesn't support the 6-bit dtypes and is 30 times slower with the 4-bit one; there is
    no dtype for DLFLOAT16, TF32 and users' formats. Codes of 3, 4 and 6 bits are packed along the
    last axis without gaps; others are stored in the narrowest unsigned integers that hold them.

    ``vmap`` may add axes in front of packed codes alone. An axis behind them is refused when the
    array is read; an axis behind them that is as long as the codes can't be told from one in front.

    Attributes:
        codes: the codes, packed or not, see above.
        format: the format of the codes, all of whose numbers float32 represents.
        length: the number of elements along the last axis.

    Raises:
        ValueError: float32 doesn't represent all numbers of the format.

    Example:
        >>> import jax.numpy as jnp
        >>> x = encode(jnp.array([1.0, 6.0, -0.4]), "e2m1fn")
        >>> x.codes.tolist(), x.shape, x.astype(jnp.float32).tolist()
        ([114, 9], (3,), [1.0, 6.0, -0.5])
    """

    STATIC: ClassVar = ("format", "length")

    codes: jax.Array
    format: Format
    length: int

    def __post_init__(self):
        super().__post_init__()
        check_decodes(self.format, "EncodedArray")

    @property
    def shape(self) -> tuple[int, ...]:
        if not is_packed(self.format):
            return self.codes.shape
        return (*self.codes.shape[:-1], self.length)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    @property
    def dtype(self) -> np.dtype:
        """float32, the dtype to which :meth:`astype` decodes before it converts."""
        return np.dtype(np.float32)

    def unpacked(self) -> jax.Array:
        """Returns the codes, one per array element."""
        if not is_packed(self.format):
            return self.codes
        count = -(-self.length * self.format.bits // 8)
        if self.codes.shape[-1:] != (count,):
            raise ValueError(
                f"EncodedArray: codes have the shape {self.codes.shape}; expected {count} bytes of "
                f"{self.length} codes along the last axis. {PACKED_AXIS}"
            )
        return unpack(self.codes, self.format, self.length)

    def astype(self, dtype: Any) -> jax.Array:
        """Returns the numbers, which are exact if ``dtype`` represents them."""
        return decoded(self.unpacked(), self.format).astype(dtype)

    def value(self) -> jax.Array:
        """Returns the numbers, float32."""
        return self.astype(np.float32)


def is_packed(fmt: Format) -> bool:
    return fmt.bits in WIDTHS


@checked
def encode(x: ArrayLike, fmt: Format | str, **options: Any) -> jax.Array | EncodedArray:
    """Rounds ``x`` once and stores it in the format's dtype, or as an EncodedArray of codes.

    Args:
        x: the array, as for :func:`scalewise.cast`.
        fmt: a format or its name.
        options: keyword arguments of :func:`scalewise.cast`.

    Returns:
        An array of ``fmt.dtype`` if that has whole bytes, else an :class:`EncodedArray`. NaN
        becomes code 0 in a format without NaN, as in :func:`scalewise.cast`.

    Raises:
        ValueError: float32 doesn't represent all numbers of a format without such a dtype.
    """
    fmt = format_(fmt)
    stored = cast(x, fmt, **options)
    if stored.dtype == fmt.dtype:
        return stored
    if not is_packed(fmt):
        return EncodedArray(stored, fmt, 0)
    if stored.ndim == 0:
        raise ValueError(
            f"encode: x is a scalar; expected at least one axis to pack codes of {fmt.name}"
        )
    return EncodedArray(pack(stored, fmt), fmt, stored.shape[-1])
