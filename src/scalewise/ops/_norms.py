"""``l2_norm``: the Euclidean norm by any method, every intermediate rounded to a format."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._check import Count, Positive, checked
from .._resolve import as_format
from ..formats import Format, FormatLike
from ._arithmetic import Arithmetic
from ._auto import auto_norm
from ._methods import METHODS, SEGMENTED, Setting
from ._sums import as_rows, check_order
from .functions import float_array


@dataclasses.dataclass(frozen=True)
class Norm:
    """Static arguments of a norm; ``nonnegative``: epsilon is known not to be negative."""

    method: str
    setting: Setting
    nonnegative: bool


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
    norm = _norm(method, fmt, order, block, eps, beta)
    x, axes = as_rows(x, axis, "l2_norm")
    zero = isinstance(eps, (int, float, np.number)) and float(eps) == 0
    y = _l2(norm, x, None if zero else jnp.broadcast_to(_float(eps), x.shape[:-1]))
    return jnp.expand_dims(y, axes) if keepdims else y


def arithmetic_of(fmt: Format) -> Arithmetic:
    if not fmt.zero:
        raise ValueError(f"{fmt.name} has no zero; expected a format that can hold a sum")
    return Arithmetic(fmt, "nearest_even" if fmt.signed else "toward_zero")


def _norm(
    method: str, fmt: Format, order: str | None, block: int, eps: ArrayLike, beta: float | None
) -> Norm:
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
    nonnegative = isinstance(eps, (int, float, np.number)) and float(eps) >= 0
    return Norm(method, Setting(arithmetic, order, block, beta and float(beta)), nonnegative)


def _float(eps: ArrayLike) -> jax.Array:
    """Returns epsilon in float32 at least; the format rounds it later."""
    eps = jnp.asarray(eps)
    return eps if eps.dtype == jnp.float64 else eps.astype(jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def _l2(norm: Norm, x: jax.Array, eps: jax.Array | None) -> jax.Array:
    arithmetic = norm.setting.arithmetic
    with arithmetic.context():
        a, e, special = _enter(arithmetic, x, eps)
        if norm.method == "auto":
            root = auto_norm(arithmetic, a, e, norm.nonnegative or eps is None)
            y = root.value(arithmetic.fmt).astype(arithmetic.carrier)
        else:
            y = METHODS[norm.method][0](norm.setting, a, e)
        y = jnp.where(jnp.isnan(special) | jnp.isinf(special), special, y)
        return arithmetic.leave(Arithmetic(arithmetic.fmt).round(y), x.dtype)


@_l2.defjvp
def _(
    norm: Norm, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x, eps), (dx, deps) = primals, tangents
    direction, half = _derivatives(norm, x, eps)
    tangent = jnp.sum(direction * dx, axis=-1)
    if half is not None:
        tangent = tangent + (half * deps).astype(x.dtype)
    return _l2(norm, x, eps), tangent


@partial(jax.jit, static_argnums=0)
def _derivatives(
    norm: Norm, x: jax.Array, eps: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns x / norm and 1 / (2 norm), from the norm's parts: neither overflows with it."""
    arithmetic = arithmetic_of(norm.setting.arithmetic.fmt)
    with arithmetic.context():
        a, e, special = _enter(arithmetic, x, eps)
        parts = auto_norm(arithmetic, a, e, norm.nonnegative or eps is None)
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
