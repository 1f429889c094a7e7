"""``round_to`` and ``cast``: one rounding from the input to the format, differentiable."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format, check_rounding, check_saturate
from ..formats import format as format_
from ._bits import carrier_of, fits, round_bits
from ._carrier import from_float64, has_float64
from ._native import CONVERTED, converted
from ._nearest import is_plain, nearest_codes

Gradient = Literal["identity", "clipped"]

# XLA's own converts from float32 that are bit-exact on every input (`make prove`), NaNs and
# subnormals included, and the fastest way. Its FP8 ones are as right, at half the speed of ours.
EXACT_CONVERTS = frozenset({"fp16", "bf16"})


def round_to(
    x: Any,
    fmt: Format | str | Any,
    *,
    rounding: str = "nearest_even",
    saturate: bool | str = False,
    key: jax.Array | None = None,
    bits: jax.Array | None = None,
    subnormals: bool = True,
    gradient: Gradient = "identity",
) -> jax.Array:
    """A value of a format, correctly rounded once from the input, in the input's dtype.

    Args:
        x: float32, float64, float16 or bfloat16 array, any shape. NumPy's float64 and Python's
            float are rounded from all their bits where JAX's x64 is off, too, to a float32.
        fmt: a format, or a name or dtype of one.
        rounding: ``"nearest_even"`` (ties to the even code), ``"nearest_away"`` (ties away from
            zero), ``"toward_zero"``, ``"toward_positive"``, ``"toward_negative"``,
            ``"away_from_zero"``, ``"to_odd"`` (what isn't exact goes to the odd neighbour, so that
            a later rounding is not a second one), and for a scale format (E8M0) ONNX's ``"up"``,
            ``"down"``, ``"nearest"`` (ties up); ``"stochastic"`` (up with the probability that
            makes the expected value exact, in steps of 2^-d for d dropped bits).
        saturate: False: what overflows, and infinities, become infinity, or NaN in a format that
            has none (the largest number where there is no NaN either); a rounding that doesn't go
            away from zero leaves a finite overflow at the largest number (IEEE 754-2019, 7.4).
            True: all become the largest number. ``"finite"``: only what is finite does.
        key: a JAX random key, for ``"stochastic"``.
        bits: or the random bits themselves: uint32 (uint64 for float64) of x's shape.
        subnormals: False flushes results below the smallest normal number to zero.
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
    with _all_bits_of(x):
        x = _float(x, "round_to")
        rounding = _check(fmt, rounding, saturate, gradient)
        noise = _noise(x, rounding, key, bits)
        wide = x if x.dtype in (jnp.float32, jnp.float64) else x.astype(jnp.float32)
        carrier = carrier_of(wide.dtype)
        if fits(fmt, carrier):
            options = (fmt, saturate, rounding, subnormals, gradient)
            x = _compiled(wide, noise, options).astype(x.dtype)
        elif fmt.mantissa_bits < carrier.mantissa_bits or fmt.max_exponent < 127:
            raise ValueError(
                f"round_to: {fmt.name} has numbers that {x.dtype} doesn't; pass x as float64"
            )  # else the format holds every number of x's dtype
    return _as_jax_has_it(x)


def cast(
    x: Any,
    fmt: Format | str | Any,
    *,
    rounding: str = "nearest_even",
    saturate: bool | str = False,
    key: jax.Array | None = None,
    bits: jax.Array | None = None,
    subnormals: bool = True,
) -> jax.Array:
    """``x`` in the storage dtype of a format, correctly rounded once.

    Args:
        x: as for :func:`round_to`.
        fmt: a format, or a name or dtype of one.
        rounding, saturate, key, bits, subnormals: as for :func:`round_to`.

    Returns:
        An array of ``fmt.dtype``, differentiable straight-through (its cotangents have that dtype,
        too, as JAX has it). A format without a storage dtype gives unsigned codes of the smallest
        width that holds them.

    Raises:
        TypeError, ValueError: as for :func:`round_to`.

    Example:
        >>> import jax.numpy as jnp
        >>> cast(jnp.array([1.1, -0.3]), "e5m2").dtype.name
        'float8_e5m2'
    """
    fmt = format_(fmt)
    with _all_bits_of(x):
        x = _float(x, "cast")
        rounding = _check(fmt, rounding, saturate, "identity")
        options = (fmt, saturate, rounding, subnormals)
        noise = _noise(x, rounding, key, bits)
        coded = fmt.dtype is None or fmt.bits < 8
        y = _codes_of(x, noise, options) if coded else _cast(x, noise, options)
    return _as_jax_has_it(y)


def _stored(x: jax.Array, noise: jax.Array | None, options: tuple) -> jax.Array:
    fmt, saturate, rounding, subnormals = options
    dtype = fmt.dtype
    nearest = rounding == "nearest_even" and subnormals and x.dtype != jnp.float64
    if nearest and fmt.name in EXACT_CONVERTS and x.dtype == jnp.float32:
        return lax.convert_element_type(_clipped(x, fmt, saturate), np.dtype(dtype))
    if nearest and is_plain(fmt) and (dtype is None or fmt.bits <= 8):
        coded = partial(_nearest, fmt=fmt, saturate=saturate)
        if fmt.name not in CONVERTED:
            return coded(x)
        device = partial(_converted, fmt=fmt, saturate=saturate)
        return lax.platform_dependent(x, cpu=coded, default=device)
    rounded = round_to(
        x, fmt, rounding=rounding, saturate=saturate, bits=noise, subnormals=subnormals
    )
    if dtype is not None and fmt.bits >= 8:
        return _exactly(rounded, dtype)
    return _codes(_exactly(rounded, np.dtype(np.float32)), fmt)


def _nearest(x: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    codes = nearest_codes(x.astype(jnp.float32), fmt, saturate)
    stored = fmt.dtype is not None and fmt.bits == 8
    return lax.bitcast_convert_type(codes, np.dtype(fmt.dtype)) if stored else codes


def _converted(x: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    return converted(x.astype(jnp.float32), fmt, saturate)


def _exactly(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Numbers that ``dtype`` has, in it; a backend's convert from float64 flushes subnormals."""
    return (from_float64 if x.dtype == jnp.float64 else lax.convert_element_type)(x, dtype)


# One program where nobody else compiles: an eager call would be twenty passes over the data.
_codes_of = partial(jax.jit, static_argnums=2, inline=True)(_stored)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _straight_cast(x: jax.Array, noise: jax.Array | None, options: tuple) -> jax.Array:
    return _stored(x, noise, options)


@_straight_cast.defjvp
def _(options, primals, tangents):
    return _straight_cast(*primals, options), tangents[0].astype(options[0].dtype)


_cast = partial(jax.jit, static_argnums=2, inline=True)(_straight_cast)


def _clipped(x: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    """``x`` within the format's numbers, as far as ``saturate`` says; NaN stays NaN."""
    if saturate is False:
        return x
    # on the bits: comparisons of floats become a backend's min and max, which flush subnormals
    u = np.uint32
    bits = lax.bitcast_convert_type(x, u)
    sign, magnitude = bits & u(0x80000000), bits & u(0x7FFFFFFF)
    top = np.float32(float(fmt.max)).view(u)
    last = u(0x7F800000 - (saturate == "finite"))
    over = (magnitude > top) & (magnitude <= last)
    return lax.bitcast_convert_type(jnp.where(over, sign | top, bits), x.dtype)


def _codes(x: jax.Array, fmt: Format) -> jax.Array:
    """Codes of float32 numbers that are already the format's, by integer operations."""
    bits = lax.bitcast_convert_type(x, np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    assert fmt.bias is not None
    m = fmt.mantissa_bits
    normal = (magnitude >> np.uint32(23 - m)) - np.uint32(((127 - fmt.bias) << m) & 0xFFFFFFFF)
    if fmt.min_exponent < -126:  # numbers among float32's subnormals: the leading bit by hand
        lead = np.uint32(31) - lax.clz(magnitude | np.uint32(1))
        body = magnitude << (np.uint32(23) - jnp.minimum(lead, np.uint32(23)))
        field = lead + np.uint32((fmt.bias - 149) & 0xFFFFFFFF)
        tiny = (field << np.uint32(m)) + (body >> np.uint32(23 - m)) - np.uint32(1 << m)
        normal = jnp.where(magnitude < np.uint32(1 << 23), tiny, normal)
    if fmt.subnormals and fmt.min_exponent != -126:  # else float32's own codes, shifted
        # the significand in units of the format's smallest subnormal, always to the right
        field = magnitude >> np.uint32(23)
        significand = (magnitude & np.uint32(0x7FFFFF)) | (
            jnp.minimum(field, np.uint32(1)) << np.uint32(23)
        )
        right = np.uint32(150 + fmt.min_exponent - m) - jnp.maximum(field, np.uint32(1))
        small = significand >> jnp.minimum(right, np.uint32(31))
        first = np.uint32(np.float32(float(fmt.smallest_normal)).view(np.uint32))
        normal = jnp.where(magnitude < first, small, normal)
    normal = jnp.where(magnitude == 0, np.uint32(0), normal)
    if fmt.infinity_code is not None:
        normal = jnp.where(magnitude == 0x7F800000, np.uint32(fmt.infinity_code), normal)
    sign = bits >> np.uint32(31)
    code = normal | (sign << np.uint32(fmt.bits - 1)) if fmt.signed else normal
    nan = 0 if fmt.nan_code is None else fmt.nan_code
    return jnp.where(jnp.isnan(x), np.uint32(nan), code).astype(fmt.code_dtype)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _straight_through(x: jax.Array, noise: jax.Array | None, options: tuple) -> jax.Array:
    fmt, saturate, rounding, subnormals, _ = options
    return round_bits(x, fmt, saturate, rounding, noise, subnormals)


@_straight_through.defjvp
def _(options, primals, tangents):
    (x, noise), (t, _) = primals, tangents
    y = _straight_through(x, noise, options)
    if options[-1] == "clipped":
        t = jnp.where(jnp.abs(x) <= np.asarray(float(options[0].max), x.dtype), t, 0 * t)
    return y, t


_compiled = partial(jax.jit, static_argnums=2, inline=True)(_straight_through)


def _noise(x: jax.Array, rounding: str, key: Any, bits: Any) -> jax.Array | None:
    """Random bits for a stochastic rounding of ``x``; None for all others."""
    if rounding != "stochastic":
        if key is not None or bits is not None:
            raise ValueError(f"key and bits are for rounding='stochastic', not {rounding!r}")
        return None
    dtype = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
    if (key is None) == (bits is None):
        raise ValueError(
            "rounding='stochastic' takes either key, a JAX random key, or bits, "
            f"{np.dtype(dtype)} of shape {x.shape}"
        )
    if key is not None:
        return jax.random.bits(key, x.shape, dtype)
    bits = jnp.asarray(bits)
    if bits.dtype != dtype or bits.shape != x.shape:
        raise ValueError(
            f"bits is {bits.dtype} of shape {bits.shape}; accepted: {np.dtype(dtype)} of x's "
            f"shape {x.shape}"
        )
    return bits


def _all_bits_of(x: Any) -> contextlib.AbstractContextManager:
    """Where a float64 that isn't JAX's yet doesn't become float32, a rounding too many."""
    theirs = isinstance(x, float | np.ndarray | np.generic)
    wide = theirs and np.asarray(x).dtype == np.float64 and not has_float64()
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _as_jax_has_it(x: jax.Array) -> jax.Array:
    """A float64 array as float32 where x64 is off; the numbers of a narrow format stay exact."""
    if x.dtype != jnp.float64 or has_float64():
        return x
    with jax.enable_x64(True):
        return from_float64(x, np.dtype(np.float32))


def _float(x: Any, name: str) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} takes real floating-point arrays, not {x.dtype}")
    return x


def _check(fmt: Format, rounding: Any, saturate: Any, gradient: Any) -> str:
    """The rounding's own name; refuses what there isn't."""
    rounding = check_rounding(fmt, rounding)
    check_saturate(saturate)
    if gradient not in ("identity", "clipped"):
        raise ValueError(f"gradient is {gradient!r}; accepted: 'identity', 'clipped'")
    return rounding
