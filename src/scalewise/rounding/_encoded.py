"""EncodedArray: arrays of formats without a dtype of whole bytes, stored as (packed) codes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import numpy as np
from jax.typing import ArrayLike

from .._check import checked
from ..formats import Format
from ..formats import format as format_
from ._carrier import has_float64
from ._decode import decoded
from ._pack import WIDTHS, pack, unpack
from ._round import cast
from ._stored import StoredArray


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedArray(StoredArray):
    """An array stored as codes, for formats without a dtype of whole bytes.

    XLA on CPU doesn't support the 6-bit dtypes and is 30 times slower with the 4-bit one; there is
    no dtype for DLFLOAT16, TF32 and users' formats. Codes of 3, 4 and 6 bits are packed along the
    last axis without gaps; others are stored in the narrowest unsigned integers that hold them.

    Attributes:
        codes: the codes, packed or not, see above.
        format: the format of the codes.
        length: the number of elements along the last axis.

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
    """
    fmt = format_(fmt)
    stored = cast(x, fmt, **options)
    if stored.dtype == fmt.dtype:
        return stored
    if fmt.bits > 32 and not has_float64():
        raise ValueError(f"{fmt.name} is stored in 64 bits; enable JAX's x64, or expected up to 32")
    if not is_packed(fmt):
        return EncodedArray(stored, fmt, 0)
    if stored.ndim == 0:
        raise ValueError(
            f"encode: x is a scalar; expected at least one axis to pack codes of {fmt.name}"
        )
    return EncodedArray(pack(stored, fmt), fmt, stored.shape[-1])
