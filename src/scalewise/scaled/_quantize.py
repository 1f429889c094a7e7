"""``quantize``: an array in a narrow format behind a scale found from the array itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..formats import Format
from ..formats import format as format_
from ..rounding import cast
from ._array import ScaledArray
from ._power import amax_exponent, power_of_two


@dataclasses.dataclass(frozen=True)
class Amax:
    """The power of two that puts the largest magnitude just under the format's last full binade.

    Neither the largest magnitude nor its rounding overflows, so nothing saturates; one pass over
    the data. NaN and infinities stay what they are.
    """

    def exponent(self, x: jax.Array, fmt: Format, axis: Any, keepdims: bool) -> jax.Array:
        """int32 exponents whose power of two, and its inverse, are normal numbers of x's dtype."""
        limit = -jnp.finfo(x.dtype).minexp
        exponent = amax_exponent(x, axis, keepdims) - (fmt.max_exponent - 1)
        return jnp.clip(exponent, -limit, limit)


def quantize(
    x: Any,
    fmt: Format | str,
    *,
    scaling: Amax | None = None,
    axis: int | tuple[int, ...] | None = None,
) -> ScaledArray:
    """``x`` in a narrow format behind a power-of-two scale.

    Args:
        x: float32 or float64 (narrower floats are widened), any shape.
        fmt: a format, or its name.
        scaling: how the scale is chosen; :class:`Amax` by default.
        axis: axes that keep a scale for each index; None for one scale for the whole array.

    Returns:
        Data as :func:`scalewise.cast` stores it, scale int32 exponents that broadcast over it.
        Each element is rounded once: ``x * 2**-scale`` is exact but for what lies more than the
        dtype's own range below the largest magnitude.

    Raises:
        TypeError: x isn't a real floating-point array.
        ValueError: an unknown format, or an axis that x doesn't have.

    Example:
        >>> import jax.numpy as jnp
        >>> quantize(jnp.array([1e-6, 3e-6]), "e4m3fn").value().tolist()
        [1.0132789611816406e-06, 2.98023223876953e-06]
    """
    fmt = format_(fmt)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantize takes real floating-point arrays, not {x.dtype}")
    if x.dtype not in (jnp.float32, jnp.float64):
        x = x.astype(jnp.float32)
    others = None
    if axis is not None:
        kept = (axis,) if isinstance(axis, int) else tuple(axis)
        if not all(-x.ndim <= a < x.ndim for a in kept):
            raise ValueError(f"quantize: axis is {axis!r}, but x has shape {x.shape}")
        others = tuple(i for i in range(x.ndim) if i not in {a % x.ndim for a in kept})
    exponent = (scaling or Amax()).exponent(x, fmt, others, keepdims=axis is not None)
    return ScaledArray(cast(x * power_of_two(-exponent, x.dtype), fmt), exponent)
