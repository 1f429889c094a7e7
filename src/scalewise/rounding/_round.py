"""``round_to`` and ``cast``: one rounding from the input to the format, differentiable."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format, Rounding, check_saturate, rounding_mode
from ..formats import format as format_
from ._bits import F32, F64, Carrier, carrier_of, fits, round_bits
from ._carrier import from_float64, has_float64, to_float64
from ._codes import codes_of, stored, widened
from ._holds import contains, result_dtype
from ._native import CONVERTED, converted
from ._nearest import is_plain, nearest_codes
from ._straight import straight_through

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
    """Values of a format, each correctly rounded once from the input.

    Args:
        x: an array of any float dtype, any shape. NumPy's float64 and Python's float are rounded
            from all their bits where JAX's x64 is off, too, to a float32.
        fmt: a format, or a name or dtype of one.
        rounding: ``"nearest_even"`` (ties to the even code), ``"nearest_away"`` (ties away from
            zero), ``"toward_zero"``, ``"toward_positive"``, ``"toward_negative"``,
            ``"away_from_zero"``, ``"to_odd"`` (what isn't exact goes to the odd neighbour, so that
            a later rounding is not a second one), and for a scale format (E8M0) ONNX's ``"up"``,
            ``"down"``, ``"nearest"`` (ties up); ``"stochastic"``: away from zero for
            ``floor(p * 2^w)`` of the 2^w values of w random bits, where p is the distance to the
            neighbour towards zero over the distance between the neighbours. So the expected value
            is x wherever w bits can express p, and else off by less than 2^-w of that distance.
        saturate: False: what overflows, and infinities, become infinity, or NaN in a format that
            has none (the largest number where there is no NaN either); a rounding that doesn't go
            away from zero leaves a finite overflow at the largest number (IEEE 754-2019, 7.4).
            True: all become the largest number. ``"finite"``: only what is finite does.
        key: a JAX random key, for ``"stochastic"``.
        bits: or the random bits themselves, of x's shape: uint32, or uint64 where x or the result
            is float64. Where rounding drops d < w bits of a normal number, the lowest d of them
            decide.
        subnormals: False flushes results below the smallest normal number to zero.
        gradient: straight-through: ``"identity"`` hands the cotangent on as it is, ``"clipped"``
            hands on zero where ``x`` lies beyond the largest number. Neither is rounded.

    Returns:
        An array of x's shape, all of it values of ``fmt``. Its dtype is x's if that holds every
        number that the format can give, else float32 (bfloat16 rounded to FP16, float16 to BF16 or
        E8M0, float8 to another float8); it depends on the arguments' types alone, never on values.
        NaN stays NaN; the sign of zero is kept where the format has -0; subnormals are kept;
        negative numbers are NaN in an unsigned format. The same bits under jit, vmap and eagerly.

    Raises:
        TypeError: ``x`` isn't a real floating-point array.
        ValueError: an unknown format, rounding, saturation or gradient, or a format with numbers
            that neither x's dtype nor float32 holds, where x64 is off.

    Example:
        >>> import jax.numpy as jnp
        >>> round_to(jnp.array([0.1, 300.0, 460.0, 1e-4]), "e4m3fn", saturate=True).tolist()
        [0.1015625, 288.0, 448.0, 0.0]
    """
    fmt = format_(fmt)
    with _all_bits_of(x):
        x = _float(x, "round_to")
        mode = _check(fmt, rounding, saturate, gradient)
        noise = _noise(x, mode, key, bits, _computed_in(x.dtype, fmt, saturate))
        if fits(fmt, carrier_of(x.dtype)) or not contains(fmt, x.dtype, saturate):
            dtype = result_dtype(x.dtype, fmt, saturate, "round_to")
            x = _compiled(x, noise, (fmt, saturate, mode.name, subnormals, gradient, dtype))
    return _as_jax_has_it(x, fmt)


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
        An array of ``fmt.dtype`` (float32 for FP64 where x64 is off) that holds the correctly
        rounded values of x, whatever x's own dtype. A format without a storage dtype of at least 8
        bits gives unsigned codes of the smallest width that holds them, which have no derivative.

        The derivative is straight-through. A dtype of 8 bits hands a cotangent on in x's dtype,
        unrounded: ``cast(x, "e4m3fn").astype(x.dtype)`` has the gradient of x, as
        :func:`round_to` has. (Widen such an array before you compute with it: JAX can't
        differentiate arithmetic between it and its wider tangent.) A dtype of 16 bits or more is
        one to compute in: there a cotangent has that dtype, as behind JAX's own ``astype``, and is
        rounded to it by ``cast(x, "fp16").astype(x.dtype)``; :func:`round_to` rounds none.

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
        mode = _check(fmt, rounding, saturate, "identity")
        options = (fmt, saturate, mode.name, subnormals)
        noise = _noise(x, mode, key, bits, _computed_in(x.dtype, fmt, saturate))
        coded = fmt.dtype is None or fmt.bits < 8
        y = _codes_of(x, noise, options) if coded else _cast(x, noise, options)
    return _as_jax_has_it(y, fmt)


def _stored(x: jax.Array, noise: jax.Array | None, options: tuple) -> jax.Array:
    fmt, saturate, rounding, subnormals = options
    dtype = fmt.dtype
    x = widened(x)
    nearest = rounding == "nearest_even" and subnormals and x.dtype != jnp.float64
    if nearest and fmt.name in EXACT_CONVERTS:
        return lax.convert_element_type(_clipped(x, fmt, saturate), np.dtype(dtype))
    if nearest and is_plain(fmt) and (dtype is None or fmt.bits <= 8):
        coded = partial(_nearest, fmt=fmt, saturate=saturate)
        if fmt.name not in CONVERTED:
            return coded(x)
        device = partial(converted, fmt=fmt, saturate=saturate)
        return lax.platform_dependent(x, cpu=coded, default=device)
    rounded = round_to(
        x, fmt, rounding=rounding, saturate=saturate, bits=noise, subnormals=subnormals
    )
    if dtype is not None and fmt.bits >= 8:
        return _exactly(rounded, dtype)
    return codes_of(rounded, fmt)


def _nearest(x: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    codes = nearest_codes(x, fmt, saturate)
    return stored(codes, fmt) if fmt.dtype is not None and fmt.bits == 8 else codes


def _exactly(x: jax.Array, dtype: Any) -> jax.Array:
    """Numbers that ``dtype`` has, in it; a backend's converts of float64 flush subnormals."""
    if x.dtype == dtype:
        return x
    if dtype == np.float64:
        return to_float64(x) if has_float64() else x
    if np.dtype(dtype).itemsize == 1:  # a backend's convert knows nothing of all that a dtype holds
        return stored(codes_of(x, format_(dtype)), format_(dtype))
    return (from_float64 if x.dtype == jnp.float64 else lax.convert_element_type)(x, dtype)


# One program where nobody else compiles: an eager call would be twenty passes over the data.
_codes_of = partial(jax.jit, static_argnums=2, inline=True)(_stored)


@partial(jax.jit, static_argnums=2, inline=True)
def _cast(x: jax.Array, noise: jax.Array | None, options: tuple) -> jax.Array:
    if options[0].bits == 8 and x.dtype.itemsize > 1:
        return straight_through(_stored(lax.stop_gradient(x), noise, options), x)
    return _straight_cast(x, noise, options)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _straight_cast(x: jax.Array, noise: jax.Array | None, options: tuple) -> jax.Array:
    return _stored(x, noise, options)


@_straight_cast.defjvp
def _(options, primals, tangents):
    return _straight_cast(*primals, options), tangents[0].astype(options[0].dtype)


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


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _straight_through(x: jax.Array, noise: jax.Array | None, options: tuple) -> jax.Array:
    fmt, saturate, rounding, subnormals, _, dtype = options
    wide = widened(x)
    if not fits(fmt, carrier_of(wide.dtype)):
        wide = to_float64(wide)
    return _exactly(round_bits(wide, fmt, saturate, rounding, noise, subnormals), dtype)


@_straight_through.defjvp
def _(options, primals, tangents):
    (x, noise), (t, _) = primals, tangents
    y = _straight_through(x, noise, options)
    if options[-2] == "clipped":
        wide = widened(x)
        t = jnp.where(jnp.abs(wide) <= np.asarray(float(options[0].max), wide.dtype), t, 0 * t)
    return y, t.astype(y.dtype)


_compiled = partial(jax.jit, static_argnums=2, inline=True)(_straight_through)


def _computed_in(dtype: Any, fmt: Format, saturate: Any) -> Carrier:
    """The type in which numbers of a dtype are rounded to a format."""
    own = carrier_of(dtype)
    return own if fits(fmt, own) or contains(fmt, dtype, saturate) else F64


def _noise(x: jax.Array, mode: Rounding, key: Any, bits: Any, carrier: Carrier) -> Any:
    """Random bits for a stochastic rounding of ``x``; None for all others."""
    if not mode.random:
        if key is not None or bits is not None:
            raise ValueError(f"key and bits are for rounding='stochastic', not {mode.name!r}")
        return None
    dtype = carrier.uint
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


def _as_jax_has_it(x: jax.Array, fmt: Format) -> jax.Array:
    """A float64 array as float32 where x64 is off; the numbers of a narrow format stay exact."""
    if x.dtype != jnp.float64 or has_float64():
        return x
    if not (fits(fmt, F32) or contains(fmt, np.dtype(np.float32), False)):
        raise ValueError(f"{fmt.name} has numbers that float32 doesn't; enable JAX's x64")
    with jax.enable_x64(True):
        return from_float64(x, np.dtype(np.float32))


def _float(x: Any, name: str) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} takes real floating-point arrays, not {x.dtype}")
    return x


def _check(fmt: Format, rounding: Any, saturate: Any, gradient: Any) -> Rounding:
    """The rounding mode; refuses what there isn't."""
    mode = rounding_mode(rounding, fmt)
    check_saturate(saturate)
    if gradient not in ("identity", "clipped"):
        raise ValueError(f"gradient is {gradient!r}; accepted: 'identity', 'clipped'")
    return mode
