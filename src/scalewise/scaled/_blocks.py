"""``quantize`` for block formats, OCP Microscaling (MX) and NVFP4: a scale for each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import E8M0, BlockFormat, Format
from ..rounding import encode
from ._array import ScaledArray
from ._power import exponent_of, layout, power_of_two, shrink
from ._scaling import Amax, Scaling, to_top

# How the exponent of a scale is found from the largest magnitude of a block, by torchao's names.
EXPONENTS = ("floor", "ceil", "even", "rceil")


@dataclasses.dataclass(frozen=True)
class Mx:
    """The scale of OCP Microscaling 1.0, 6.3: a power of two from the largest finite magnitude.

    Attributes:
        exponent: ``"floor"``, as specified: ``floor(log2(amax)) - emax``, where ``emax`` is the
            element format's largest exponent; a magnitude above the element's largest number
            saturates. ``"ceil"``: ``ceil(log2(amax)) - emax``. ``"even"``: floor, after amax is
            rounded to the element's precision, ties up. ``"rceil"``: ``ceil(log2(amax / max))``,
            the smallest power of two with which nothing saturates.
    """

    exponent: str = "floor"
    saturates: ClassVar[bool] = True

    def __post_init__(self):
        if self.exponent not in EXPONENTS:
            accepted = ", ".join(map(repr, EXPONENTS))
            raise ValueError(f"Mx: exponent is {self.exponent!r}; accepted: {accepted}")

    def exponents(self, x: jax.Array, element: Format, axes: Sequence[int]) -> jax.Array:
        """int32 exponents over the axes, held at E8M0's ends, -127 and 127."""
        signed, mantissa_bits, bias = layout(x.dtype)
        integer = np.uint64 if signed is np.int64 else np.uint32
        magnitude = lax.bitcast_convert_type(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), integer)
        # XLA's abs and where keep subnormals: they move bits
        amax = jnp.max(magnitude, axis=tuple(axes), initial=integer(0))
        field = (amax >> integer(mantissa_bits)).astype(jnp.int32)  # a subnormal's 0 ends at -127
        exponent = field - bias - element.max_exponent
        fraction = amax & integer((1 << mantissa_bits) - 1)
        largest = int(np.asarray(float(element.max), x.dtype).view(integer))
        largest &= (1 << mantissa_bits) - 1
        half = 1 << (mantissa_bits - 1 - element.mantissa_bits)
        above = {"ceil": 0, "even": (1 << mantissa_bits) - half - 1, "rceil": largest}
        if self.exponent in above:  # from there, one higher
            exponent += (fraction > integer(above[self.exponent])).astype(jnp.int32)
        return jnp.clip(exponent, -127, 127)

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        exponent = jnp.clip(self.exponents(x, fmt, axes), -126, 126)
        exponent = jnp.expand_dims(exponent, tuple(axes)) if keepdims else exponent
        return power_of_two(exponent, x.dtype), power_of_two(-exponent, x.dtype)


def quantize_blocks(
    x: jax.Array, fmt: BlockFormat, axis: int, scaling: Scaling | None, **options: Any
) -> ScaledArray:
    """``x``, float32 or float64, in a block format (see :func:`scalewise.quantize`)."""
    length = x.shape[axis]
    short = -length % fmt.size
    padding = [(0, short if a == axis else 0) for a in range(x.ndim)]
    split = (*x.shape[:axis], (length + short) // fmt.size, fmt.size, *x.shape[axis + 1 :])
    blocks = jnp.pad(x, padding).reshape(split)
    finite = jnp.isfinite(blocks)
    broken = ~jnp.all(finite, axis=axis + 1) if fmt.element.nan_code is None else None
    find = _power_scales if fmt.scale == E8M0 else _scales
    data, scale = find(
        blocks, jnp.where(finite, blocks, 0), broken, fmt, axis + 1, scaling, options
    )
    data = data.reshape(tuple(n + p for n, (_, p) in zip(x.shape, padding, strict=True)))
    data = lax.slice_in_dim(data, 0, length, axis=axis)
    return ScaledArray(encode(data, fmt.element, **options), scale, (axis, fmt.size))


def _power_scales(blocks, usable, broken, fmt, axis, scaling, rounding):
    """The blocks over powers of two, and those as E8M0."""
    scaling = scaling or Mx()
    if isinstance(scaling, Mx):
        exponent = scaling.exponents(usable, fmt.element, (axis,))
    else:
        if not getattr(scaling, "power_of_two", True):
            raise ValueError(f"{fmt.name} has powers of two for scales, {scaling!r} has others")
        scale, _ = scaling.scale(usable, fmt.element, (axis,))
        exponent = jnp.clip(exponent_of(scale), -127, 127)
    data = _scaled_down(blocks, jnp.expand_dims(exponent, axis), rounding)
    code = (exponent + 127).astype(jnp.uint8)
    if broken is not None:
        code = jnp.where(broken, jnp.uint8(255), code)
    return data, lax.bitcast_convert_type(code, jnp.float8_e8m0fnu)


def _scales(blocks, usable, broken, fmt, axis, scaling, _):
    """The blocks over scales that are no powers of two, and those in their own format.

    The largest of them becomes the largest number of their format, by the scale of the whole.
    """
    scaling = scaling or Amax(power_of_two=False)
    scale, _ = scaling.scale(usable, fmt.element, (axis,))
    scale = jnp.where(jnp.any(usable != 0, axis=axis), scale, 0)
    whole = None
    if fmt.whole is not None:
        largest = jnp.max(scale, initial=0)
        whole, _ = to_top(largest.astype(jnp.float32), fmt.scale, False)
        scale = scale / whole.astype(scale.dtype)
    scale = jnp.maximum(scale, np.asarray(float(fmt.scale.smallest), scale.dtype))
    stored = encode(scale, fmt.scale, saturate=True)
    factor = stored.astype(jnp.float32)
    factor = jnp.maximum(factor, np.float32(float(fmt.scale.smallest)))
    total = factor if whole is None else factor * whole
    data = blocks / jnp.expand_dims(total, axis).astype(blocks.dtype)
    if broken is not None:
        stored = encode(jnp.where(broken, jnp.nan, factor), fmt.scale)
    return data, stored if whole is None else ScaledArray(stored, whole)


def _scaled_down(x: jax.Array, exponent: jax.Array, rounding: str) -> jax.Array:
    """``x / 2**exponent``, float32's subnormals counted although backends flush them."""
    if x.dtype == jnp.float64:
        return shrink(x, power_of_two(-exponent, x.dtype), rounding)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    units = (bits & jnp.int32(0x007FFFFF)).astype(jnp.float32)
    subnormal = (bits & jnp.int32(0x7F800000)) == 0
    x = jnp.where(subnormal, jnp.where(bits < 0, -units, units), x)
    lower = power_of_two(jnp.maximum(-149 - exponent, -126))
    # an exponent of 127 takes an amax of 2^127 and an element format below 2: its inverse flushes
    factor = jnp.where(subnormal, lower, power_of_two(jnp.maximum(-exponent, -126)))
    return shrink(x, factor, rounding)
