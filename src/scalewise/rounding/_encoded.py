"""Arrays of formats that XLA has no dtype for, or none of whole bytes: their codes, packed."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..formats import Format, check_codes
from ..formats import format as format_
from ._bits import F32, fits, from_units
from ._pack import WIDTHS, pack, unpack
from ._round import cast


def decode(codes: Any, fmt: Format | str) -> jax.Array:
    """The numbers of codes, exactly, by integer operations that jit, vmap and shard.

    Args:
        codes: unsigned integers below 2^bits, as :func:`scalewise.cast` makes them, any shape.
            Under a transformation, where they can't be looked at, higher bits are ignored.
        fmt: a format of up to 32 bits, all of whose numbers float32 holds, or its name.

    Returns:
        float32 of the codes' shape.

    Raises:
        TypeError: codes aren't integers.
        ValueError: codes beyond the format's width, or numbers that float32 doesn't hold.

    Example:
        >>> decode(np.array([0x3C, 0x7E], np.uint8), "e4m3fn").tolist()
        [1.5, 448.0]
    """
    fmt = format_(fmt)
    codes = codes if isinstance(codes, jax.Array) else np.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"decode: codes of {fmt.name} are {codes.dtype}; accepted: integers")
    if not fits(fmt, F32):
        raise ValueError(f"decode: {fmt.name} has numbers that float32 doesn't; use its own decode")
    if not isinstance(codes, Tracer):
        check_codes(fmt, codes)
    return _decoded(codes, fmt)


@partial(jax.jit, static_argnums=1, inline=True)
def _decoded(codes: jax.Array, fmt: Format) -> jax.Array:
    u, m = np.uint32, fmt.mantissa_bits
    assert fmt.bias is not None
    codes = codes.astype(u)
    magnitude = codes & u(2 ** (fmt.exponent_bits + m) - 1)
    field, fraction = magnitude >> u(m), magnitude & u(2**m - 1)
    bits = (magnitude << u(23 - m)) + u(((127 - fmt.bias) << 23) % 2**32)
    lowest = fmt.min_exponent - m + 149  # log2 of the smallest number's last place, in float32's
    first = int(fmt.subnormals)  # the field of the smallest normal number
    if fmt.subnormals:
        small = (
            from_units(fraction << u(lowest), F32) if lowest < 32 - m else _scaled(fraction, fmt)
        )
        bits = jnp.where(field == u(0), small, bits)
    if fmt.min_exponent < -126:  # normal numbers of the format, subnormal ones of float32
        units = (fraction | u(1 << m)) << (field + u((lowest - first) % 2**32))
        among = (field >= u(first)) & (field < u(first - 126 - fmt.min_exponent))
        bits = jnp.where(among, units, bits)
    if fmt.zero:
        bits = jnp.where(magnitude == 0, u(0), bits)
    if fmt.infinity_code is not None:
        bits = jnp.where(magnitude == u(fmt.infinity_code), u(F32.bits_of(np.inf)), bits)
    nan = u(F32.bits_of(np.nan))
    if fmt.nan in ("ieee", "all_ones"):
        last = fmt.max_code if fmt.infinity_code is None else fmt.infinity_code
        bits = jnp.where(magnitude > u(last), nan, bits)
    if fmt.signed:
        sign = (codes >> u(fmt.bits - 1)) & u(1)
        if fmt.nan == "negative_zero":
            bits = jnp.where((sign != 0) & (magnitude == 0), nan, bits)
        elif not fmt.negative_zero:
            sign = jnp.where(magnitude == 0, u(0), sign)
        bits |= sign << u(31)
    return lax.bitcast_convert_type(bits, np.float32)


def _scaled(fraction: jax.Array, fmt: Format) -> jax.Array:
    """Bits of a subnormal whose quantum is a normal number of float32."""
    quantum = np.float32(2.0 ** (fmt.min_exponent - fmt.mantissa_bits))
    return lax.bitcast_convert_type(fraction.astype(np.float32) * quantum, np.uint32)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class EncodedArray:
    """Numbers of a format by their codes, for formats that no dtype of whole bytes stores.

    XLA on CPU doesn't know the 6-bit dtypes and is 30 times slower with the 4-bit one; DLFLOAT16,
    TF32 and a user's own have no dtype at all. Codes of 3, 4 and 6 bits are packed along the last
    axis, without gaps; all others lie in the smallest unsigned integers that hold them.

    Attributes:
        codes: packed or whole, see above.
        format: whose codes they are.
        length: of the last axis, in numbers.

    Example:
        >>> x = encode(jnp.array([1.0, 6.0, -0.4]), "e2m1fn")
        >>> x.codes.tolist(), x.shape, x.astype(jnp.float32).tolist()
        ([114, 9], (3,), [1.0, 6.0, -0.5])
    """

    codes: jax.Array
    format: Format
    length: int

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
        """The dtype of the numbers as :meth:`astype` first makes them: float32."""
        return np.dtype(np.float32)

    def unpacked(self) -> jax.Array:
        """The codes, one an element."""
        if not is_packed(self.format):
            return self.codes
        return unpack(self.codes, self.format, self.length)

    def astype(self, dtype: Any) -> jax.Array:
        """The numbers, exactly where ``dtype`` holds them."""
        return _decoded(self.unpacked(), self.format).astype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.astype(dtype or np.float32))

    def __jax_array__(self) -> jax.Array:
        return self.astype(np.float32)

    def tree_flatten(self):
        return (self.codes,), (self.format, self.length)

    @classmethod
    def tree_unflatten(cls, static, children):
        self = object.__new__(cls)  # leaves may be anything while a tree is mapped: no checks
        for name, value in zip(("codes", "format", "length"), (*children, *static), strict=True):
            object.__setattr__(self, name, value)
        return self


def is_packed(fmt: Format) -> bool:
    """Whether codes of the format lie packed in an :class:`EncodedArray`."""
    return fmt.bits in WIDTHS


def encode(x: Any, fmt: Format | str, **options: Any) -> jax.Array | EncodedArray:
    """``x`` rounded once and stored: in the format's dtype of whole bytes, or by its codes.

    Args:
        x: as for :func:`scalewise.cast`.
        fmt: a format or its name.
        options: those of :func:`scalewise.cast`.

    Returns:
        An array of ``fmt.dtype`` where that has whole bytes, else an :class:`EncodedArray`. A NaN
        becomes zero in a format that has no code for one, as in :func:`scalewise.cast`.
    """
    fmt = format_(fmt)
    stored = cast(x, fmt, **options)
    if stored.dtype == fmt.dtype:
        return stored
    if not is_packed(fmt):
        return EncodedArray(stored, fmt, 0)
    if stored.ndim == 0:
        raise ValueError(f"encode: codes of {fmt.name} are packed along an axis; x is a scalar")
    return EncodedArray(pack(stored, fmt), fmt, stored.shape[-1])
