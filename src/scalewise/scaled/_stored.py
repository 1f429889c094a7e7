"""How arrays of a training state are stored: narrow, with scales, or as their square roots."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._check import Natural, Pattern, checked
from .._resolve import as_format
from .._types import Converted, kept
from ..formats import BlockFormat, BlockFormatLike, Format
from ..rounding import StoredArray, encode
from ._amax import at_least
from ._array import ScaledArray
from ._quantize import quantize, storable


@checked
@dataclasses.dataclass(frozen=True)
class Storage:
    """How one array of a training state is stored between two steps.

    Attributes:
        format: the narrow format of the data; or a block format of whole bytes (MXFP8), with a
            scale for each block along the last axis. An array without axes has one scale.
        root: 1 stores the array itself, 2 its square root, for non-negative arrays such as a second
            moment, whose exponents span twice the gradient's.
        axis: axes that keep a scale for each of their indices; None for one scale a tensor.
        min_size: arrays with fewer elements (biases, a norm's gains) aren't stored, since each
            stored array adds a few operations to trace, compile and run.
        nonzero: True to round a nonzero number that would become zero to the format's smallest
            number, for arrays that are divisors. Square roots are always stored so.
    """

    format: Converted[Format | BlockFormat, BlockFormatLike] = kept()
    root: Literal[1, 2] = 1
    axis: int | tuple[int, ...] | None = None
    min_size: Natural = 0
    nonzero: bool = False

    def __post_init__(self):
        fmt = as_format(self.format, "Storage.format", blocks=True)
        storable(fmt.element)
        object.__setattr__(self, "format", fmt)


State: TypeAlias = Annotated[
    tuple[tuple[Pattern, Storage], ...],
    "pairs of a regular expression and a Storage, state=(('mu', sw.Storage('e4m3fn')),)",
]
"""Which outputs are returned stored, and how: the first pattern that is found in a path decides."""


def storage_of(state: Iterable[tuple[str, Storage]], path: str, size: int) -> Storage | None:
    """Returns the storage of the first pattern found in a path; None for a smaller array."""
    found = next((s for pattern, s in state if re.search(pattern, path)), None)
    return found if found is not None and at_least(size, found.min_size) else None


@dataclasses.dataclass(frozen=True, eq=False)
class SqrtStored(StoredArray):
    """An array stored as its square root: ``value = root.value() ** 2``.

    A second moment spans twice the exponents of the gradients that it is made of; its root spans
    theirs. Non-negative arrays only.
    """

    root: ScaledArray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.root.shape

    @property
    def dtype(self) -> np.dtype:
        return self.root.dtype

    def value(self) -> jax.Array:
        """Returns the plain array."""
        return jnp.square(self.root.astype(self.root.wide_dtype)).astype(self.dtype)


def store_array(
    x: jax.Array, storage: Storage, dtype: DTypeLike | None = None
) -> ScaledArray | SqrtStored:
    """Returns ``x`` stored as ``storage`` says, in place of an array of a dtype, by default x's."""
    dtype = np.dtype(x.dtype if dtype is None else dtype)
    x = jnp.sqrt(x) if storage.root == 2 else x
    fmt = storage.format
    if isinstance(fmt, BlockFormat):
        stored = quantize(x, fmt if x.ndim else fmt.element)
    else:
        stored = quantize(x, fmt, axis=storage.axis)
    stored = dataclasses.replace(stored, value_dtype=dtype)
    if storage.nonzero or storage.root == 2:
        wide = stored.data.astype(jnp.float32)
        tiny = jnp.copysign(jnp.asarray(float(fmt.element.smallest), jnp.float32), wide)
        wide = jnp.where((wide == 0) & (x != 0), tiny, wide)
        stored = dataclasses.replace(stored, data=encode(wide, fmt.element))
    return SqrtStored(stored) if storage.root == 2 else stored


def is_stored(x: object) -> TypeGuard[ScaledArray | SqrtStored]:
    """Returns whether a node of a pytree is one array that is stored narrow."""
    return isinstance(x, ScaledArray | SqrtStored)
