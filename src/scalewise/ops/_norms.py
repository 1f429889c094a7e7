"""Norms whose every intermediate is rounded to a format: the Euclidean one, RMS and layer norm."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._check import Count, NonNegative, Positive, checked, checked_axes
from .._resolve import as_format
from ..formats import FP64, Format, FormatLike
from ..formats import format as format_
from ..rounding import float_array
from ._arithmetic import Arithmetic, as_rows, check_order
from ._auto import Root, add, auto_norm, constant, middle, plan, root_of, sum_of_squares
from ._methods import METHODS, SEGMENTED, Setting
from ._one_format import centred
from ._operation import operation, traced_once, wide_dtype, with_derivative_of


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
            (exact products, added to a float32 scalar); ``"narrow_squares"`` (the same, with the
            vector scaled and squared in the format); ``"blue"`` (three accumulators, LAPACK 3.10).
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
    fmt = None if arithmetic is None else as_format(arithmetic, "l2_norm")
    beta = beta and float(beta)
    _setting(as_format(x.dtype, "l2_norm") if fmt is None else fmt, method, order, block, beta)
    x, axes = as_rows(x, axis, "l2_norm")
    known = float(eps) if isinstance(eps, (int, float, np.number)) else -1.0
    e = jnp.asarray(eps)  # in float32 at least; the format rounds it later
    e = jnp.broadcast_to(e if e.dtype == jnp.float64 else e.astype(jnp.float32), x.shape[:-1])
    y = operation(
        "l2_norm", _l2, x, None if known == 0 else e, fmt=fmt, method=method, order=order,
        block=block, beta=beta, nonnegative=known >= 0,
    )  # fmt: skip
    return jnp.expand_dims(y, axes) if keepdims else y


def arithmetic_of(fmt: Format) -> Arithmetic:
    if not fmt.zero:
        raise ValueError(f"{fmt.name} has no zero; expected a format that can hold a sum")
    return Arithmetic(fmt, "nearest_even" if fmt.signed else "toward_zero")


def _setting(
    fmt: Format, method: str, order: str | None, block: int, beta: float | None
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
    return Setting(arithmetic, order, block, beta)


def _l2(
    x: jax.Array, eps: jax.Array | None, *, fmt: Format | None, nonnegative: bool, **options: Any
) -> jax.Array:
    fmt = format_(x.dtype) if fmt is None else fmt
    if fmt == FP64:
        _, root, size = _scaled_root(x, eps)
        return root * size
    return _l2_in_format(_setting(fmt, **options), options["method"], nonnegative, x, eps)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _l2_in_format(
    setting: Setting, method: str, nonnegative: bool, x: jax.Array, eps: jax.Array | None
) -> jax.Array:
    arithmetic = setting.arithmetic
    with arithmetic.context():
        if method == "auto":
            _, special, root = _parts(arithmetic, nonnegative, x, eps)
            y = root.value(arithmetic.fmt).astype(arithmetic.carrier)
        else:
            a, e, special = _enter(arithmetic, x, eps)
            y = METHODS[method][0](setting, a, e)
        y = jnp.where(jnp.isnan(special) | jnp.isinf(special), special, y)
        return arithmetic.leave(Arithmetic(arithmetic.fmt).round(y), x.dtype)


def _parts(
    arithmetic: Arithmetic, nonnegative: bool, x: jax.Array, eps: jax.Array | None
) -> tuple[jax.Array, jax.Array, Root]:
    """Returns magnitudes, NaN, infinity or 0 for each sum, and the root, which the gradient reads
    too."""
    of = (("arithmetic", arithmetic), ("nonnegative", nonnegative))
    a, special, *root = traced_once(_arrays_of_parts, of)(x, eps)
    return a, special, Root(*root)


def _arrays_of_parts(
    x: jax.Array, eps: jax.Array | None, *, arithmetic: Arithmetic, nonnegative: bool
) -> tuple[jax.Array, ...]:
    a, e, special = _enter(arithmetic, x, eps)
    root = auto_norm(arithmetic, a, e, nonnegative)
    return a, special, root.significand, root.exponent, root.exact


@_l2_in_format.defjvp
def _(setting, method, nonnegative, primals, tangents):
    (x, eps), (dx, deps) = primals, tangents
    of = (("fmt", setting.arithmetic.fmt), ("nonnegative", nonnegative))
    direction, half = with_derivative_of(_exact_slopes, _slopes, of, x, eps)
    tangent = jnp.sum(direction * dx, axis=-1)
    if half is not None:
        tangent = tangent + (half * deps).astype(x.dtype)
    return _l2_in_format(setting, method, nonnegative, x, eps), tangent


def _slopes(
    x: jax.Array, eps: jax.Array | None, *, fmt: Format, nonnegative: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns x / norm and 1 / (2 norm), from the norm's parts: neither overflows with it."""
    arithmetic = arithmetic_of(fmt)
    with arithmetic.context():
        a, special, parts = _parts(arithmetic, nonnegative, x, eps)
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


def _scaled_root(x: jax.Array, eps: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x over the largest magnitude, in float32 at least, its norm, and that magnitude."""
    x = x.astype(wide_dtype(x.dtype))
    e = jnp.zeros(x.shape[:-1], x.dtype) if eps is None else eps.astype(x.dtype)
    size = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, initial=0), jnp.sqrt(jnp.abs(e)))
    size = lax.stop_gradient(jnp.where((size > 0) & jnp.isfinite(size), size, jnp.ones_like(size)))
    x = x / size[..., None]
    return x, root_or_zero(jnp.sum(x * x, axis=-1) + e / size / size), size


def _exact_slopes(
    x: jax.Array, eps: jax.Array | None, **_: object
) -> tuple[jax.Array, jax.Array | None]:
    scaled, root, size = _scaled_root(x, eps)
    inverse = inverse_or_zero(root)
    return scaled * inverse[..., None], None if eps is None else inverse / 2 / size


def root_or_zero(x: jax.Array) -> jax.Array:
    """Returns the square root, whose derivative at zero is zero."""
    zero = x == 0
    return jnp.where(zero, jnp.zeros_like(x), jnp.sqrt(jnp.where(zero, jnp.ones_like(x), x)))


def inverse_or_zero(x: jax.Array) -> jax.Array:
    zero = x == 0
    return jnp.where(zero, jnp.zeros_like(x), 1 / jnp.where(zero, jnp.ones_like(x), x))


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
        axis: the normalised axis.
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
        4 ulps of the row's largest magnitude, since differences from the mean may cancel. In a
        format without subnormal numbers (DLFloat16), results below its smallest normal number are
        zero.

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
    fmt = None if fmt is None else as_format(fmt, name)
    if fmt is not None and not fmt.signed:
        raise ValueError(f"{name}: {fmt.name} has no sign; expected a signed format")
    checked_axes(name, axis, x.ndim)
    arithmetic_of(fmt or as_format(x.dtype, name))
    rows = jnp.moveaxis(x, axis, -1)
    if rows.size == 0:
        return x
    given = [None if p is None else jnp.asarray(p) for p in affine]
    for p in given:
        if p is not None and p.shape != rows.shape[-1:]:
            raise ValueError(
                f"{name}: weight or bias has shape {p.shape}; expected {rows.shape[-1:]}"
            )
    y = operation(name, _normalised, rows, *given, fmt=fmt, eps=float(eps), centre=centred)
    return jnp.moveaxis(y, -1, axis)


def _normalised(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    *,
    fmt: Format | None,
    eps: float,
    centre: bool,
) -> jax.Array:
    fmt = format_(x.dtype) if fmt is None else fmt
    if fmt == FP64:
        y = _exact_quotients(x, eps=eps, centre=centre)[0]
        y = y if weight is None else y * weight.astype(y.dtype)
        return y if bias is None else y + bias.astype(y.dtype)
    A = arithmetic_of(fmt)
    y = _quotients(A, eps, centre, x)
    for p, operate in ((weight, "mul"), (bias, "add")):
        if p is not None:
            of = (("A", A), ("operate", operate))
            y = with_derivative_of(_exactly, _rounded, of, y, jnp.broadcast_to(p, y.shape))
    return y


def _rounded(a: jax.Array, b: jax.Array, *, A: Arithmetic, operate: str) -> jax.Array:
    with A.context():
        return A.leave(getattr(A, operate)(A.enter(a), A.enter(b)), a.dtype)


def _exactly(a: jax.Array, b: jax.Array, *, A: Arithmetic, operate: str) -> jax.Array:
    b = b.astype(a.dtype)
    return a + b if operate == "add" else a * b


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _quotients(A: Arithmetic, eps: float, centre: bool, x: jax.Array) -> jax.Array:
    return traced_once(_with_inverse, (("A", A), ("eps", eps), ("centre", centre)))(x)[0]


@_quotients.defjvp
def _(A, eps, centre, primals, tangents):
    (x,), (t,) = primals, tangents
    of = (("A", A), ("eps", eps), ("centre", centre))
    y, inverse = with_derivative_of(_exact_quotients, _with_inverse, of, x)
    wide, t = y.astype(inverse.dtype), t.astype(inverse.dtype)
    if centre:
        t = t - jnp.mean(t, axis=-1, keepdims=True)
    along = jnp.mean(wide * t, axis=-1, keepdims=True)
    return y, ((t - wide * along) * inverse[..., None]).astype(x.dtype)


def _exact_quotients(
    x: jax.Array, *, eps: float, centre: bool, A: Arithmetic | None = None
) -> tuple[jax.Array, jax.Array]:
    x = x.astype(wide_dtype(x.dtype))
    size = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), np.asarray(math.sqrt(eps), x.dtype))
    size = lax.stop_gradient(jnp.where((size > 0) & jnp.isfinite(size), size, jnp.ones_like(size)))
    d = x / size[..., None]
    for _ in range(2 * centre):
        d = d - jnp.mean(d, axis=-1, keepdims=True)
    inverse = inverse_or_zero(root_or_zero(jnp.mean(d * d, axis=-1) + eps / size / size))
    return d * inverse[..., None], inverse / size


def _with_inverse(
    x: jax.Array, *, A: Arithmetic, eps: float, centre: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the quotients in x's dtype, and 1 / rms in float32 (float64 for float64)."""
    n = x.shape[-1]
    p = plan(A, n)
    with A.context():
        entered = A.enter(x)
        fine = jnp.all(jnp.isfinite(entered), axis=-1)
        d = jnp.where(fine[..., None], entered, A.const(0))
        moved = jnp.zeros_like(fine, np.int32)
        if centre:
            d, moved = centred(A, d)
        total = sum_of_squares(A, jnp.abs(d), p)
        if eps > 0:
            m, e = math.frexp(eps)
            total = add(total, constant(n * m, 2 * moved + e, p), p)
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
        return A.leave(y, x.dtype), A.leave(inverse, wide_dtype(x.dtype))
