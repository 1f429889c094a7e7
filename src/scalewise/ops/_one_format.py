"""Softmax, sums and moments on a machine that computes in one format: no wider type anywhere.

Sums are ``auto``'s, in digits, so that nothing overflows or is swamped on the way. exp and log are
the format's own functions, correctly rounded (a table has them; here float64 does, whose error is
far below what separates the results of 16-bit inputs from a middle between two numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import Format
from ._arithmetic import Arithmetic, Axis, as_rows
from ._auto import plan, rounded, sum_of, sum_of_squares
from ._operation import with_derivative_of
from .functions import rounded_once


def in_one_format(
    x: jax.Array,
    *,
    along: Callable[..., jax.Array],
    exact: Callable[..., jax.Array],
    arithmetic: Format,
    axis: Axis,
    keepdims: bool | None = None,
    **options: Hashable,
) -> jax.Array:
    """Computes a function in one format along axes; ``keepdims=None``: it keeps the shape."""
    rows, axes = as_rows(x, axis, "axis")
    of = (("along", along), ("A", Arithmetic(arithmetic)), *options.items())
    y = with_derivative_of(partial(_exactly, exact), _narrow, of, rows)
    if keepdims is None:
        kept = tuple(a for a in range(x.ndim) if a not in axes)
        moved = y.reshape([x.shape[a] for a in (*kept, *axes)])
        return jnp.moveaxis(moved, range(-len(axes), 0), axes)
    return jnp.expand_dims(y, axes) if keepdims else y


def _narrow(
    x: jax.Array, *, along: Callable[..., jax.Array], A: Arithmetic, **options: Hashable
) -> jax.Array:
    with A.context():
        return A.leave(along(A, A.enter(x), **options), x.dtype)


def _exactly(
    exact: Callable[..., jax.Array], x: jax.Array, *, along: object, A: object, **options: Any
) -> jax.Array:
    return rounded_once(x, of=exact, axis=-1, **options)


def softmax_along(A: Arithmetic, x: jax.Array) -> jax.Array:
    powers, lead, exponent, _ = _powers(A, x)
    return A.shift(A.div(powers, lead[..., None]), -exponent[..., None])


def log_softmax_along(A: Arithmetic, x: jax.Array) -> jax.Array:
    """The difference from the largest, minus the sum's logarithm, plus what the first has lost."""
    _, lead, exponent, _ = _powers(A, x)
    difference, lost = _differences(A, x, _largest(A, x))
    return A.add(A.sub(difference, _log(A, lead, exponent)[..., None]), lost)


def logsumexp_along(A: Arithmetic, x: jax.Array) -> jax.Array:
    _, lead, exponent, largest = _powers(A, x)
    nothing = jnp.all(x == -np.inf, axis=-1)
    y = A.add(largest, _log(A, lead, exponent))
    y = jnp.where(jnp.any(x == np.inf, axis=-1), A.const(np.inf), y)
    y = jnp.where(jnp.any(jnp.isnan(x), axis=-1), A.const(np.nan), y)
    return jnp.where(nothing, A.const(-np.inf), y)


def sum_along(A: Arithmetic, x: jax.Array) -> jax.Array:
    lead, exponent, special = _total(A, x)
    return jnp.where(jnp.isfinite(special), A.shift(lead, exponent), special)


def mean_along(A: Arithmetic, x: jax.Array) -> jax.Array:
    """Returns sum / count in two roundings, or three if the format doesn't hold the count."""
    lead, exponent, special = _total(A, x)
    y = divided(A, lead, exponent, x.shape[-1])
    return jnp.where(jnp.isfinite(special), y, special)


def var_along(A: Arithmetic, x: jax.Array, ddof: int) -> jax.Array:
    """Returns the mean square after the mean is subtracted twice, scaled to avoid overflow."""
    n = x.shape[-1]
    fine = jnp.all(jnp.isfinite(x), axis=-1)
    d = jnp.where(fine[..., None], x, A.const(0))
    d, moved = centred(A, d)
    lead, exponent = rounded(A, sum_of_squares(A, jnp.abs(d), plan(A, n)))
    y = divided(A, lead, exponent - 2 * moved, n - ddof)
    return jnp.where(fine, y, A.const(np.nan))


def centred(A: Arithmetic, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns finite numbers times a power of two, minus their mean, and the power's exponent.

    The mean is taken away twice: first that of d, then that of what is left.
    """
    moved = A.fmt.max_exponent - 2 - A.exponent(jnp.max(jnp.abs(d), axis=-1, initial=0))
    d = A.shift(d, moved[..., None])
    for _ in range(2):
        lead, exponent = rounded(A, sum_of(A, d, plan(A, d.shape[-1])))
        d = A.sub(d, divided(A, lead, exponent, d.shape[-1])[..., None])
    return d, moved


def divided(A: Arithmetic, lead: jax.Array, exponent: jax.Array, count: int) -> jax.Array:
    """Returns ``lead * 2^exponent / count``; NaN for a count of 0 or less."""
    if count <= 0:
        return jnp.full_like(lead, np.nan)
    whole = count.bit_length() - 1
    if count != 2**whole:
        rest = A.fmt.decode(A.fmt.encode(count / 2**whole))
        lead = A.div(lead, A.const(float(rest)))
    return jnp.where(lead == 0, lead, A.shift(lead, exponent - whole))


def _total(A: Arithmetic, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    fine = jnp.isfinite(x)
    special = jnp.sum(jnp.where(fine, A.const(0), x), axis=-1)
    lead, exponent = rounded(A, sum_of(A, jnp.where(fine, x, A.const(0)), plan(A, x.shape[-1])))
    return lead, exponent, special


def _largest(A: Arithmetic, x: jax.Array) -> jax.Array:
    largest = jnp.max(x, axis=-1, initial=-np.inf)
    return jnp.where(jnp.isfinite(largest), largest, A.const(0))


def _differences(A: Arithmetic, x: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x - m, rounded, and its error, a number of the format (Dekker, 1971)."""
    exact = x - m[..., None]
    difference = A.round(exact)
    lost = jnp.where(jnp.isfinite(difference), exact - difference, A.const(0))
    return difference, A.round(lost)


def _powers(A: Arithmetic, x: jax.Array):
    """exp(x - largest), their sum as a number and an exponent (1 for a sum of 0), the largest."""
    m = _largest(A, x)
    difference, lost = _differences(A, x, m)
    powers = A.mul(_function(A, jnp.exp, difference), _function(A, jnp.exp, lost))
    fine = jnp.isfinite(powers)
    lead, exponent = rounded(
        A, sum_of(A, jnp.where(fine, powers, A.const(0)), plan(A, x.shape[-1]))
    )
    zero = lead == 0
    lead = jnp.where(zero, A.const(1), lead)
    lead = jnp.where(jnp.all(fine, axis=-1), lead, A.const(np.nan))
    return powers, lead, jnp.where(zero, 0, exponent), m


def _log(A: Arithmetic, lead: jax.Array, exponent: jax.Array) -> jax.Array:
    with jax.enable_x64(True):
        wide = lead.astype(np.float64)
        y = jnp.log(wide) + exponent.astype(np.float64) * np.log(2.0)
        return Arithmetic(A.fmt).round(y).astype(A.carrier)


def _function(A: Arithmetic, f: Callable, x: jax.Array) -> jax.Array:
    with jax.enable_x64(True):
        return A.round(f(x.astype(np.float64))).astype(A.carrier)
