"""``rms_norm`` and ``layer_norm`` in the arithmetic of one format, by the norm ``auto``."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._check import NonNegative, checked, checked_axes
from .._resolve import as_format
from ..formats import FormatLike
from ._arithmetic import Arithmetic
from ._auto import add, constant, middle, plan, root_of, sum_of_squares
from ._norms import arithmetic_of
from ._one_format import centred
from .functions import float_array


@dataclasses.dataclass(frozen=True)
class Normalisation:
    """Static arguments: the arithmetic, epsilon, and whether the mean is subtracted first."""

    arithmetic: Arithmetic
    eps: float
    centred: bool


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
    y = _normalised(Normalisation(arithmetic, float(eps), centred), rows)
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


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _normalised(how: Normalisation, x: jax.Array) -> jax.Array:
    return _with_inverse(how, x)[0]


@_normalised.defjvp
def _(how: Normalisation, primals, tangents):
    (x,), (t,) = primals, tangents
    y, inverse = _with_inverse(how, x)
    wide, t = y.astype(inverse.dtype), t.astype(inverse.dtype)
    if how.centred:
        t = t - jnp.mean(t, axis=-1, keepdims=True)
    along = jnp.mean(wide * t, axis=-1, keepdims=True)
    return y, ((t - wide * along) * inverse[..., None]).astype(x.dtype)


@partial(jax.jit, static_argnums=0)
def _with_inverse(how: Normalisation, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the quotients in x's dtype, and 1 / rms in float32 (float64 for float64)."""
    A, n = how.arithmetic, x.shape[-1]
    p = plan(A, n)
    with A.context():
        entered = A.enter(x)
        fine = jnp.all(jnp.isfinite(entered), axis=-1)
        d = jnp.where(fine[..., None], entered, A.const(0))
        moved = jnp.zeros(d.shape[:-1], np.int32)
        if how.centred:
            d, moved = centred(A, d)
        total = sum_of_squares(A, jnp.abs(d), p)
        if how.eps > 0:
            total = add(total, constant(n * how.eps, 2 * moved, p), p)
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
