"""Arrays of formats that XLA has no dtype for, or none of whole bytes: their codes, packed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ..formats import Format
from ..formats import format as format_
from ._decode import decoded
from ._pack import WIDTHS, pack, unpack
from ._round import cast


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
        >>> import jax.numpy as jnp
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
        return decoded(self.unpacked(), self.format).astype(dtype)

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
