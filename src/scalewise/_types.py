"""Types of arguments that many public functions take."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import jax.numpy as jnp
from jax.typing import DTypeLike

from ._check import Range
from .formats import BlockFormat, Format

if TYPE_CHECKING:
    from .autocast import Policy
    from .autoscale import Recipe

PyTree: TypeAlias = Any
"""Containers nested in any way, of arrays and other leaves (see ``jax.tree_util``)."""

TreeDef: TypeAlias = Any
"""The structure of a pytree, a ``jax.tree_util.PyTreeDef``, which is no type for type checkers."""

Json: TypeAlias = Any
"""What ``json`` reads or writes: None, a bool, a number, a string, or a list or dict of these."""

AxisName: TypeAlias = Hashable | Sequence[Hashable]
"""The name of a mapped axis, or a sequence of names, as ``jax.lax.psum`` takes it."""

FormatLike: TypeAlias = Format | str | DTypeLike
"""A format, or a name (``"e4m3fn"``) or dtype (``jnp.float16``) of one."""

BlockFormatLike: TypeAlias = BlockFormat | Format | str | DTypeLike
"""A format or a block format (``"mxfp8_e4m3"``), or a name of one."""

FloatDType: TypeAlias = Annotated[
    DTypeLike, Range(lambda dtype: "float" in jnp.dtype(dtype).name, "a floating-point dtype")
]
"""A dtype of floating-point numbers."""

PolicyLike: TypeAlias = "Policy | str | DTypeLike"
"""A policy, its string (``"p=f32,c=bf16,o=f32"``), or the dtype to compute in."""

RecipeLike: TypeAlias = "Recipe | str"
"""A recipe, or the name of one (``"fp8"``)."""

RoundingMode: TypeAlias = Literal[
    "nearest_even", "nearest_away", "toward_zero", "toward_positive", "toward_negative",
    "away_from_zero", "to_odd", "stochastic",
]  # fmt: skip
"""The name of a rounding mode, see ``scalewise.formats.ROUNDINGS``."""

Saturation: TypeAlias = bool | Literal["finite", "onnx", "onnx-19"]
"""What overflow gives: False an infinity or NaN, True the largest number, ``"finite"`` that too,
but for infinities, which stay; or a published rule, see ``scalewise.saturation``."""
