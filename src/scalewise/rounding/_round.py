"""``round_to`` and ``cast``: one rounding from the input to the format, differentiable."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..formats import format as format_
from ._nearest import carrier_of, fits, nearest_even

ROUNDINGS = ("nearest_even",)
SATURATE = (False, True, "finite")
Gradient = Literal["identity", "clipped"]

# XLA's own converts from float32 that are bit-exact on every input (`make prove`), NaNs and
# subnormals included. For the others (E2M1 loses NaN's sign, E2M3 and E3M2 aren't known) we round
# first and convert what is already a number of the format.
EXACT_CONVERTS = frozenset({"fp16", "bf16", "e4m3fn", "e5m2"})


def round_to(
    x: Any,
    fmt: Format | str | Any,
    *,
    rounding: str = "nearest_even",
    saturate: bool | str = False,
    gradient: Gradient = "identity",
) -> jax.Array:
    """The nearest value of a format, correctly rounded once from the input, in the input's dtype.

    Args:
        x: float32, float64, float16 or bfloat16 array, any shape.
        fmt: a format, or a name or dtype of one.
        rounding: ``"nearest_even"``.
        saturate: False: what overflows, and infinities, become infinity, or NaN in a format that
            has none (the largest number where there is no NaN either). True: they become the
            largest number. ``"finite"``: only what is finite does.
        gradient: straight-through: ``"identity"`` hands the cotangent on as it is, ``"clipped"``
            hands on zero where ``x`` lies beyond the largest number. Neither is rounded.

    Returns:
        An array of x's shape and dtype, all of it values of ``fmt``. NaN stays NaN; the sign of
        zero is kept where the format has -0; subnormals are kept; negative numbers are NaN in an
        unsigned format. The same bits under jit, vmap and eagerly.

    Raises:
        TypeError: ``x`` isn't a real floating-point array.
        ValueError: an unknown format, rounding, saturation or gradient, or a format with numbers
            that x's dtype doesn't have.

    Example:
        >>> import jax.numpy as jnp
        >>> round_to(jnp.array([0.1, 300.0, 460.0, 1e-4]), "e4m3fn", saturate=True).tolist()
        [0.1015625, 288.0, 448.0, 0.0]
    """
    fmt = format_(fmt)
    x = _float(x, "round_to")
    _check(rounding, saturate, gradient)
    wide = x if x.dtype in (jnp.float32, jnp.float64) else x.astype(jnp.float32)
    carrier = carrier_of(wide.dtype)
    if not fits(fmt, carrier):
        if fmt.mantissa_bits >= carrier.mantissa_bits and fmt.max_exponent >= 127:
            return x  # the format holds every number of x's dtype
        raise ValueError(
            f"round_to: {fmt.name} has numbers that {x.dtype} doesn't; pass x as float64"
        )
    return _straight_through(wide, fmt, saturate, gradient).astype(x.dtype)


def cast(
    x: Any,
    fmt: Format | str | Any,
    *,
    rounding: str = "nearest_even",
    saturate: bool | str = False,
) -> jax.Array:
    """``x`` in the storage dtype of a format, correctly rounded once.

    Args:
        x: as for :func:`round_to`.
        fmt: a format, or a name or dtype of one.
        rounding: ``"nearest_even"``.
        saturate: as for :func:`round_to`.

    Returns:
        An array of ``fmt.dtype``. A format without a storage dtype gives unsigned codes of the
        smallest width that holds them.

    Raises:
        TypeError, ValueError: as for :func:`round_to`.

    Example:
        >>> import jax.numpy as jnp
        >>> cast(jnp.array([1.1, -0.3]), "e5m2").dtype.name
        'float8_e5m2'
    """
    fmt = format_(fmt)
    x = _float(x, "cast")
    _check(rounding, saturate, "identity")
    if saturate is False and fmt.name in EXACT_CONVERTS and fmt.dtype and x.dtype == jnp.float32:
        return lax.convert_element_type(x, fmt.dtype)
    rounded = round_to(x, fmt, saturate=saturate)
    if fmt.dtype is not None and fmt.bits >= 8:
        return lax.convert_element_type(rounded, fmt.dtype)
    return _codes(rounded.astype(jnp.float32), fmt)


def _codes(x: jax.Array, fmt: Format) -> jax.Array:
    """Codes of float32 numbers that are already the format's, by integer operations."""
    bits = lax.bitcast_convert_type(x, np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    assert fmt.bias is not None
    m = fmt.mantissa_bits
    normal = (magnitude >> np.uint32(23 - m)) - np.uint32(((127 - fmt.bias) << m) & 0xFFFFFFFF)
    if fmt.subnormals:
        scale = np.float32(2.0 ** min(127, m - fmt.min_exponent))
        small = (jnp.abs(x) * scale).astype(np.uint32)
        first = np.float32(float(fmt.smallest_normal))
        normal = jnp.where(jnp.abs(x) < first, small, normal)
    normal = jnp.where(magnitude == 0, np.uint32(0), normal)
    if fmt.infinity_code is not None:
        normal = jnp.where(magnitude == 0x7F800000, np.uint32(fmt.infinity_code), normal)
    sign = bits >> np.uint32(31)
    code = normal | (sign << np.uint32(fmt.bits - 1)) if fmt.signed else normal
    nan = 0 if fmt.nan_code is None else fmt.nan_code
    return jnp.where(jnp.isnan(x), np.uint32(nan), code).astype(fmt.code_dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _straight_through(x: jax.Array, fmt: Format, saturate: Any, gradient: Gradient) -> jax.Array:
    return nearest_even(x, fmt, saturate)


@_straight_through.defjvp
def _(fmt, saturate, gradient, primals, tangents):
    (x,), (t,) = primals, tangents
    y = _straight_through(x, fmt, saturate, gradient)
    if gradient == "clipped":
        t = jnp.where(jnp.abs(x) <= np.asarray(float(fmt.max), x.dtype), t, jnp.zeros_like(t))
    return y, t


def _float(x: Any, name: str) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} takes real floating-point arrays, not {x.dtype}")
    return x


def _check(rounding: Any, saturate: Any, gradient: Any) -> None:
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}; accepted: {', '.join(map(repr, ROUNDINGS))}")
    if not any(saturate is s or saturate == s for s in SATURATE):
        raise ValueError(f"saturate is {saturate!r}; accepted: False, True, 'finite'")
    if gradient not in ("identity", "clipped"):
        raise ValueError(f"gradient is {gradient!r}; accepted: 'identity', 'clipped'")
