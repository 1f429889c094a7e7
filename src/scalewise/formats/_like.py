"""Types of arguments that name a format, a rounding mode or the treatment of overflow."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol, TypeAlias

import numpy as np

from .._check import Range
from ._catalogue import BlockFormat
from ._format import Format


class SupportsDType(Protocol):
    """An object with a NumPy dtype, such as ``jnp.bfloat16``."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


DTypeLike: TypeAlias = str | type[Any] | np.dtype | SupportsDType
"""A dtype, as ``jax.typing.DTypeLike``; formats import no JAX."""

FormatLike: TypeAlias = Format | str | DTypeLike
"""A format, or a name (``"e4m3fn"``) or dtype (``jnp.float16``) of one."""

BlockFormatLike: TypeAlias = BlockFormat | Format | str | DTypeLike
"""A format or a block format (``"mxfp8_e4m3"``), or a name of one."""

FloatDType: TypeAlias = Annotated[
    DTypeLike, Range(lambda dtype: "float" in np.dtype(dtype).name, "a floating-point dtype")
]
"""A dtype of floating-point numbers."""

RoundingMode: TypeAlias = Literal[
    "nearest_even", "nearest_away", "toward_zero", "toward_positive", "toward_negative",
    "away_from_zero", "to_odd", "stochastic",
]  # fmt: skip
"""The name of a rounding mode, see ``scalewise.formats.ROUNDINGS``."""

Saturation: TypeAlias = bool | Literal["finite", "onnx", "onnx-19"]
"""What overflow gives: False an infinity or NaN, True the largest number, ``"finite"`` that too,
but for infinities, which stay; or a published rule, see ``scalewise.saturation``."""
