"""``round_to``, ``cast``, ``quantize`` and ``dequantize`` of torch tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import scaled
from .._resolve import as_format
from ..formats import BF16, E5M2, FP16, BlockFormatLike, FormatLike, RoundingMode, Saturation
from ..rounding import EncodedArray
from ..rounding import cast as cast_array
from ..rounding import round_to as round_array
from ..scaled import ScaledArray, Scaling
from ._convert import to_jax, to_torch
from ._torch import Tensor, torch

Key = jax.Array | int | None

# torch's conversions of float32 to these formats round once, to nearest even, subnormals included,
# as XLA's do. torch's results use freed memory again, where XLA's of 32 MB are mapped anew.
EXACT_IN_TORCH = {FP16: torch.float16, BF16: torch.bfloat16, E5M2: torch.float8_e5m2}


class _StraightThrough(torch.autograd.Function):
    """``y`` with the derivative of ``x``, or zero where ``|x|`` is above ``limit``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, limit: float | None) -> Tensor:
        ctx.dtype, ctx.limit = x.dtype, limit
        if limit is not None:
            ctx.save_for_backward(x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].to(ctx.dtype)
        if ctx.limit is not None:
            (x,) = ctx.saved_tensors
            gradient = torch.where(x.abs() <= ctx.limit, gradient, 0)
        return gradient, None, None


def _with_gradient(x: Tensor, y: Tensor, limit: float | None = None) -> Tensor:
    needed = x.requires_grad and torch.is_grad_enabled() and y.dtype.is_floating_point
    return _StraightThrough.apply(x, y, limit) if needed else y


def _float_tensor(x: Tensor, name: str) -> jax.Array:
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        given = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name} takes a floating-point tensor, not {given}")
    if x.dtype == torch.float64 and not jax.config.read("jax_enable_x64"):
        raise TypeError(f"{name} of float64 rounds once with JAX's x64 on, or convert to float32")
    return to_jax(x)


def _key(key: Key) -> jax.Array | None:
    return jax.random.key(key) if isinstance(key, int) else key


def round_to(
    x: Tensor,
    fmt: FormatLike,
    *,
    rounding: RoundingMode = "nearest_even",
    saturate: Saturation = False,
    key: Key = None,
    subnormals: bool = True,
    gradient: str = "identity",
) -> Tensor:
    """Rounds each element of a tensor once to a number of a format, as :func:`scalewise.round_to`.

    Args:
        x: a floating-point tensor of any shape.
        fmt, rounding, saturate, subnormals: as for :func:`scalewise.round_to`.
        key: a JAX random key or an int that seeds one, for ``rounding="stochastic"``.
        gradient: ``"identity"`` passes the gradient on unchanged; ``"clipped"`` replaces it by zero
            where ``|x|`` is above the format's largest number.

    Returns:
        A tensor of x's shape, in x's dtype if that represents every result, else float32.

    Raises:
        TypeError: no floating-point tensor; float64 with JAX's x64 off.
        ValueError: as :func:`scalewise.round_to`.
    """
    if gradient not in ("identity", "clipped"):
        raise ValueError(f"round_to: gradient={gradient!r}; expected 'identity' or 'clipped'")
    array, fmt = _float_tensor(x, "round_to"), as_format(fmt, "round_to")
    rounded = round_array(
        array, fmt, rounding=rounding, saturate=saturate, key=_key(key), subnormals=subnormals
    )
    return _with_gradient(x, to_torch(rounded), float(fmt.max) if gradient == "clipped" else None)


def cast(
    x: Tensor,
    fmt: FormatLike,
    *,
    rounding: RoundingMode = "nearest_even",
    saturate: Saturation = False,
    key: Key = None,
    subnormals: bool = True,
) -> Tensor:
    """Rounds each element of a tensor once to a format, in the format's storage dtype.

    Args:
        x: a floating-point tensor of any shape.
        fmt, rounding, saturate, key, subnormals: as for :func:`round_to`.

    Returns:
        A tensor of torch's dtype for the format, with a straight-through gradient in x's dtype. For
        a format without a dtype in torch, a tensor of codes in uint8 or uint16, without a gradient.
        The bits are those of :func:`scalewise.cast`, but for the sign and payload of a NaN.

    Raises:
        TypeError, ValueError: as :func:`round_to`.
    """
    array, fmt = _float_tensor(x, "cast"), as_format(fmt, "cast")
    nearest = rounding == "nearest_even" and saturate is False and key is None and subnormals
    if nearest and fmt in EXACT_IN_TORCH and x.dtype == torch.float32:
        return x.to(EXACT_IN_TORCH[fmt])
    out = cast_array(
        array, fmt, rounding=rounding, saturate=saturate, key=_key(key), subnormals=subnormals
    )
    return _with_gradient(x, to_torch(out))


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledTensor:
    """A quantized tensor.

    Attributes:
        array: the numbers and scales as JAX arrays.
        origin: the tensor that was quantized if it needs a gradient, else None;
            :func:`dequantize` passes the gradient on to it.
    """

    array: ScaledArray
    origin: Tensor = None

    @property
    def data(self) -> Tensor:
        """The stored numbers as a tensor; codes for a format without a dtype in torch."""
        data = self.array.data
        return to_torch(data.unpacked() if isinstance(data, EncodedArray) else data)

    @property
    def scale(self) -> Tensor:
        """The scales as a tensor, one per tensor, channel or block; None if there are none.

        With two levels of scales (NVFP4) the product of both, in float32.
        """
        scale = self.array.scale
        if isinstance(scale, ScaledArray):
            scale = scale.value()
        if isinstance(scale, EncodedArray):
            scale = scale.astype(jnp.float32)
        return None if scale is None else to_torch(scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


def quantize(
    x: Tensor,
    fmt: BlockFormatLike,
    *,
    scaling: Scaling | None = None,
    axis: int | tuple[int, ...] | None = None,
    rounding: RoundingMode = "nearest_even",
    saturate: Saturation | None = None,
    key: Key = None,
) -> ScaledTensor:
    """Stores a tensor in a narrow format, with a scale per tensor, per index of an axis or block.

    Args:
        x: a floating-point tensor of any shape.
        fmt, scaling, axis, rounding, saturate: as for :func:`scalewise.quantize`.
        key: a JAX random key or an int that seeds one, for ``rounding="stochastic"``.

    Returns:
        Data and scales, for :func:`dequantize`.

    Raises:
        TypeError: no floating-point tensor; float64 with JAX's x64 off.
        ValueError: as :func:`scalewise.quantize`.
    """
    array = _float_tensor(x, "quantize")
    stored = scaled.quantize(
        array, fmt, scaling=scaling, axis=axis, rounding=rounding, saturate=saturate, key=_key(key)
    )
    return ScaledTensor(stored, x if x.requires_grad and torch.is_grad_enabled() else None)


def dequantize(x: ScaledTensor) -> Tensor:
    """Returns data times scale as a float32 tensor (float64 if a float64 tensor was quantized).

    The gradient passes to the tensor that was quantized, unchanged (straight-through).
    """
    value = to_torch(x.array.astype(x.array.wide_dtype))
    return value if x.origin is None else _with_gradient(x.origin, value)
