"""Norms whose every intermediate is rounded to a format: the Euclidean one, RMS and layer norm."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._check import Count, NonNegative, Positive, checked, checked_axes
from .._resolve import as_format
from ..formats import Format, FormatLike
from ..rounding import float_array
from ._arithmetic import Arithmetic, as_rows, check_order
from ._auto import add, auto_norm, constant, middle, plan, root_of, sum_of_squares
from ._methods import METHODS, SEGMENTED, Setting
from ._one_format import centred


@checked
def l2_norm(
    x: ArrayLike,
    eps: ArrayLike = 0.0,
    *,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    method: str = "auto",
    arithmetic: FormatLike | None = None,
    order: str | None = None,
    block: Count = 32,
    beta: Positive | None = None,
) -> jax.Array:
    """Returns ``sqrt(sum(x^2) + eps)`` as a machine with one float format computes it.

    ``"auto"`` holds the sum in digits, with integer exponents of its own: over all n and all x its
    error is below :func:`ulp_bound`, 0.625 ulp or less in every format of up to 16 bits, where no
    result of the format can promise less than half an ulp. It overflows only if the norm itself
    does.

    Args:
        x: float array. It is rounded to the format first; signs don't matter.
        eps: real, of either sign, broadcast against the result; rounded to the format too. Where
            it makes the sum negative, or is negative in an unsigned format, the norm is NaN.
        axis: over which axes; None for all. Over none or empty ones: ``sqrt(eps)``.
        keepdims: whether those axes stay, with length 1.
        method: ``"auto"``; ``"direct"``; ``"max_normalised"`` (LAPACK before 3.10);
            ``"two_segment_overflow"``, ``"two_segment_underflow"``: as published, mistakes and all
            (docs/norms.md); the same ``..._corrected``; ``"power_of_two"``; ``"wide_scalar"``
            (narrow vector, float32 scalar); ``"blue"`` (three accumulators, LAPACK 3.10).
        arithmetic: the format of every intermediate, of up to 25 significant bits, or a name or
            dtype of one. Default: that of x's dtype. An unsigned one rounds towards zero in
            ``"auto"``, so that nothing it has to hold is negative, and needs no sign elsewhere.
        order: of summation: ``"sequential"``, ``"blocked"``, ``"pairwise"`` or ``"compensated"``.
            Default: sequential where published so, else pairwise; ``"auto"`` has its own.
        block: terms in a run, for ``"blocked"``.
        beta: the threshold of a ``"two_segment_..."`` method; by default the published one, or
            :func:`beta_high` or :func:`beta_low` in the ``..._corrected`` ones, where an upper
            one is rounded down to a power of two.

    Returns:
        x's dtype, numbers of the format. NaN in x gives NaN; else an infinity gives infinity, or
        what the format makes of it. The gradient is x / norm, from ``"auto"``'s parts whatever
        the method, so it is right where the norm over- or underflows; zero where the norm is zero;
        NaN at an infinity. That of eps is 1 / (2 norm), or zero.

    Raises:
        TypeError: x isn't a real float array.
        ValueError: an unknown method, format or order; a format without a zero or too wide; an axis
            out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.full(4096, 16.0, jnp.float16)
        >>> float(l2_norm(x, method="direct")), float(l2_norm(x))
        (inf, 1024.0)
    """
    x = float_array(x, "l2_norm")
    fmt = as_format(x.dtype if arithmetic is None else arithmetic, "l2_norm")
    setting = _setting(method, fmt, order, block, beta)
    x, axes = as_rows(x, axis, "l2_norm")
    known = float(eps) if isinstance(eps, (int, float, np.number)) else -1.0
    e = jnp.asarray(eps)  # in float32 at least; the format rounds it later
    e = jnp.broadcast_to(e if e.dtype == jnp.float64 else e.astype(jnp.float32), x.shape[:-1])
    y = _l2(method, setting, known >= 0, x, None if known == 0 else e)
    return jnp.expand_dims(y, axes) if keepdims else y


def arithmetic_of(fmt: Format) -> Arithmetic:
    if not fmt.zero:
        raise ValueError(f"{fmt.name} has no zero; expected a format that can hold a sum")
    return Arithmetic(fmt, "nearest_even" if fmt.signed else "toward_zero")


def _setting(
    method: str, fmt: Format, order: str | None, block: int, beta: float | None
) -> Setting:
    if beta is not None and method not in SEGMENTED:
        raise ValueError(f"l2_norm: beta is for two_segment methods, not for {method!r}")
    arithmetic = arithmetic_of(fmt)
    if method == "auto":
        if order is not None:
            raise ValueError(f"l2_norm: order={order!r} is for other methods; 'auto' has its own")
        order = "pairwise"
    elif method in METHODS:
        arithmetic, order = Arithmetic(fmt), order or METHODS[method][1]
    else:
        names = ", ".join(map(repr, ("auto", *METHODS)))
        raise ValueError(f"l2_norm: method is {method!r}; expected one of {names}")
    check_order(order)
    return Setting(arithmetic, order, block, beta and float(beta))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
@partial(jax.jit, static_argnums=(0, 1, 2))
def _l2(
    method: str, setting: Setting, nonnegative: bool, x: jax.Array, eps: jax.Array | None
) -> jax.Array:
    arithmetic = setting.arithmetic
    with arithmetic.context():
        a, e, special = _enter(arithmetic, x, eps)
        if method == "auto":
            root = auto_norm(arithmetic, a, e, nonnegative)
            y = root.value(arithmetic.fmt).astype(arithmetic.carrier)
        else:
            y = METHODS[method][0](setting, a, e)
        y = jnp.where(jnp.isnan(special) | jnp.isinf(special), special, y)
        return arithmetic.leave(Arithmetic(arithmetic.fmt).round(y), x.dtype)


@_l2.defjvp
def _(method, setting, nonnegative, primals, tangents):
    (x, eps), (dx, deps) = primals, tangents
    direction, half = _derivatives(setting.arithmetic.fmt, nonnegative, x, eps)
    tangent = jnp.sum(direction * dx, axis=-1)
    if half is not None:
        tangent = tangent + (half * deps).astype(x.dtype)
    return _l2(method, setting, nonnegative, x, eps), tangent


@partial(jax.jit, static_argnums=(0, 1))
def _derivatives(
    fmt: Format, nonnegative: bool, x: jax.Array, eps: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns x / norm and 1 / (2 norm), from the norm's parts: neither overflows with it."""
    arithmetic = arithmetic_of(fmt)
    with arithmetic.context():
        a, e, special = _enter(arithmetic, x, eps)
        parts = auto_norm(arithmetic, a, e, nonnegative)
        root, k = parts.significand, parts.exponent
        safe = jnp.where(root > 0, root, arithmetic.const(1))
        nearest = Arithmetic(arithmetic.fmt)
        direction = nearest.div(nearest.shift(a, -k[..., None]), safe[..., None])
        direction = jnp.where((root > 0)[..., None], direction, arithmetic.const(0))
        direction = jnp.where(jnp.isnan(root)[..., None], np.nan, direction)
        direction = jnp.where(jnp.isnan(special)[..., None], np.nan, direction)
        beyond = jnp.isinf(special)[..., None]
        direction = jnp.where(beyond, jnp.where(jnp.isinf(x), np.nan, 0.0), direction)
        direction = arithmetic.leave(direction, x.dtype)
        half = nearest.shift(nearest.div(arithmetic.const(0.5), safe), -k)
        half = jnp.where(special == 0, jnp.where(root > 0, half, root * 0), special * 0)
        half = None if eps is None else arithmetic.leave(half, eps.dtype)
    return jnp.where(x < 0, -direction, direction), half


def _enter(
    arithmetic: Arithmetic, x: jax.Array, eps: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Returns finite magnitudes and epsilon in the carrier, and NaN, infinity or 0 for each sum."""
    a = arithmetic.enter(jnp.abs(x))
    fine = jnp.isfinite(a)
    worst = jnp.max(jnp.where(fine, arithmetic.const(0), a), axis=-1, initial=0)
    if eps is None:
        return jnp.where(fine, a, arithmetic.const(0)), None, worst
    e = arithmetic.enter(eps)
    ordinary = jnp.isfinite(e)
    worst = jnp.where(ordinary, worst, jnp.where(e == -np.inf, np.nan, worst + e))
    zero = arithmetic.const(0)
    return jnp.where(fine, a, zero), jnp.where(ordinary, e, zero), worst


@checked
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: NonNegative = 1e-6,
    axis: int = -1,
    arithmetic: FormatLike | None = None,
) -> jax.Array:
    """Returns ``x / sqrt(mean(x^2) + eps) * weight + bias``, each step rounded to a format.

    The root of the mean is ``l2_norm``'s, so nothing overflows, is flushed or swamped. For n a
    power of two the quotient is within 2 ulps, else within 4, wherever it is a normal number; the
    weight costs one rounding more.

    Args:
        x: float array.
        weight, bias: (n,), or None for 1 and 0.
        eps: not negative; it is kept to more than the format's precision and range.
        axis: the one that is normalised.
        arithmetic: a signed format of up to 25 significant bits. Default: that of x's dtype.

    Returns:
        x's dtype. A row of zeros gives zeros, whatever eps; NaN or an infinity in a row makes it
        all NaN. The gradient is ``(t - y mean(y t)) / rms``, in float32 from the rounded y, and
        rounded to x's dtype: on the torture set of the norms within 4 ulps of the row's largest
        term, ``|t|`` or ``|y mean(y t)|`` over rms (``python -m proofs.normalise``). Zero for a row
        of zeros with eps = 0.

    Raises:
        TypeError: x isn't a float array.
        ValueError: an eps, an axis, a weight's shape or a format that can't be.

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm(jnp.full(4096, 300.0, jnp.float16))[:2].tolist()
        [1.0, 1.0]
    """
    return _apply("rms_norm", x, (weight, bias), eps, axis, arithmetic, centred=False)


@checked
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: NonNegative = 1e-5,
    axis: int = -1,
    arithmetic: FormatLike | None = None,
) -> jax.Array:
    """Returns ``(x - mean) / sqrt(var + eps) * weight + bias``, each step rounded to a format.

    The mean is taken away twice: first that of x, then that of what is left, so that a mean far
    beyond the deviation costs only what rounding x itself to the format has cost. Before that a
    power of two brings x below half the largest number, so that no difference overflows.

    Args:
        x: float array.
        weight, bias: (n,), or None for 1 and 0.
        eps, axis, arithmetic: as for :func:`rms_norm`.

    Returns:
        As :func:`rms_norm`; equal numbers give the bias. Without weight and bias, values are within
        4 ulps of the row's largest magnitude, since differences from the mean may cancel.

    Raises:
        TypeError, ValueError: as :func:`rms_norm`.

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm(jnp.asarray([60000.0, -60000.0], jnp.float16)).tolist()
        [1.0, -1.0]
    """
    return _apply("layer_norm", x, (weight, bias), eps, axis, arithmetic, centred=True)


def _apply(
    name: str,
    x: ArrayLike,
    affine: tuple[ArrayLike | None, ArrayLike | None],
    eps: float,
    axis: int,
    fmt: FormatLike | None,
    *,
    centred: bool,
) -> jax.Array:
    x = float_array(x, name)
    fmt = as_format(x.dtype if fmt is None else fmt, name)
    if not fmt.signed:
        raise ValueError(f"{name}: {fmt.name} has no sign; expected a signed format")
    checked_axes(name, axis, x.ndim)
    arithmetic = arithmetic_of(fmt)
    rows = jnp.moveaxis(x, axis, -1)
    if rows.size == 0:
        return x
    y = _normalised(arithmetic, float(eps), centred, rows)
    for what, operate in zip(affine, ("mul", "add"), strict=True):
        if what is not None:
            what = jnp.asarray(what)
            if what.shape != rows.shape[-1:]:
                raise ValueError(
                    f"{name}: weight or bias has shape {what.shape}; expected {rows.shape[-1:]}"
                )
            what = jnp.broadcast_to(what, rows.shape)
            y = _rounded(arithmetic, operate, y, what)
    return jnp.moveaxis(y, -1, axis)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rounded(arithmetic: Arithmetic, operate: str, a: jax.Array, b: jax.Array) -> jax.Array:
    with arithmetic.context():
        y = getattr(arithmetic, operate)(arithmetic.enter(a), arithmetic.enter(b))
        return arithmetic.leave(y, a.dtype)


@_rounded.defjvp
def _(arithmetic, operate, primals, tangents):
    (a, b), (da, db) = primals, tangents
    db = db.astype(a.dtype)
    tangent = da + db if operate == "add" else da * b.astype(a.dtype) + a * db
    return _rounded(arithmetic, operate, a, b), tangent


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _normalised(A: Arithmetic, eps: float, centre: bool, x: jax.Array) -> jax.Array:
    return _with_inverse(A, eps, centre, x)[0]


@_normalised.defjvp
def _(A, eps, centre, primals, tangents):
    (x,), (t,) = primals, tangents
    y, inverse = _with_inverse(A, eps, centre, x)
    wide, t = y.astype(inverse.dtype), t.astype(inverse.dtype)
    if centre:
        t = t - jnp.mean(t, axis=-1, keepdims=True)
    along = jnp.mean(wide * t, axis=-1, keepdims=True)
    return y, ((t - wide * along) * inverse[..., None]).astype(x.dtype)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _with_inverse(
    A: Arithmetic, eps: float, centre: bool, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the quotients in x's dtype, and 1 / rms in float32 (float64 for float64)."""
    n = x.shape[-1]
    p = plan(A, n)
    with A.context():
        entered = A.enter(x)
        fine = jnp.all(jnp.isfinite(entered), axis=-1)
        d = jnp.where(fine[..., None], entered, A.const(0))
        moved = jnp.zeros(d.shape[:-1], np.int32)
        if centre:
            d, moved = centred(A, d)
        total = sum_of_squares(A, jnp.abs(d), p)
        if eps > 0:
            total = add(total, constant(n * eps, 2 * moved, p), p)
        whole = n.bit_length() - 1
        total = dataclasses.replace(total, exponent=total.exponent - whole)
        parts = root_of(A, total)
        root, k = parts.significand, parts.exponent
        zero = root == 0
        up = middle(A.fmt) + 1
        root = A.shift(jnp.where(zero, A.const(2.0**up), root), -up)  # in [1/2, 1]
        k = k + up
        rest = n / 2**whole
        if rest != 1:
            factor = A.fmt.decode(A.fmt.encode(math.sqrt(rest)))
            root = A.div(root, A.const(float(factor)))
        y = A.div(A.shift(d, -k[..., None]), root[..., None])
        y = jnp.where(zero[..., None], A.const(0), y)
        y = jnp.where(fine[..., None], y, A.const(np.nan))
        inverse = A.shift_exactly(1 / root, moved - k)
        inverse = jnp.where(zero, A.const(0), inverse)
        inverse = jnp.where(fine, inverse, A.const(np.nan))
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        return A.leave(y, x.dtype), A.leave(inverse, wide)
