"""Sums in the arithmetic of one format, in several orders of summation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from .._check import Count, checked, checked_axes
from ._arithmetic import Arithmetic

Axis = int | tuple[int, ...] | None
ORDERS = ("sequential", "blocked", "pairwise", "compensated")


@checked
def accumulate(
    arithmetic: Arithmetic, terms: jax.Array, order: str, block: Count = 32
) -> jax.Array:
    """Returns the sum of numbers of a format along the last axis, each addition rounded.

    Args:
        arithmetic: whose format the terms are numbers of.
        terms: (..., n) in the arithmetic's carrier.
        order: ``"sequential"``: from the first to the last, error up to (n - 1)u; ``"blocked"``:
            sequential in runs of ``block``, then over their sums, (block + n / block)u;
            ``"pairwise"``: halves, (log2 n)u; ``"compensated"``: sequential with Kahan's
            correction, 2u + O(n u^2). u is the unit roundoff; all are of the sum of magnitudes.
        block: terms in a run, for ``"blocked"``.

    Returns:
        (...) in the carrier; of no terms, zero.

    Raises:
        ValueError: another order, or a block that isn't positive.
    """
    check_order(order)
    n = terms.shape[-1]
    if n == 0:
        return jnp.zeros(terms.shape[:-1], terms.dtype)
    match order:
        case "sequential":
            return _sequential(arithmetic, terms)
        case "blocked":
            runs = pad(terms, -n % block)
            runs = runs.reshape(*terms.shape[:-1], -1, block)
            return _sequential(arithmetic, _sequential(arithmetic, runs))
        case "pairwise":
            while terms.shape[-1] > 1:
                terms = pad(terms, terms.shape[-1] % 2)
                middle = terms.shape[-1] // 2
                terms = arithmetic.add(terms[..., :middle], terms[..., middle:])
            return terms[..., 0]
    return _kahan(arithmetic, terms)


def check_order(order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; expected one of {', '.join(map(repr, ORDERS))}")


def as_rows(x: jax.Array, axis: Axis, name: str) -> tuple[jax.Array, tuple[int, ...]]:
    """Moves axes (None: all) to the end as one axis; returns that array and the axes, sorted."""
    axes = checked_axes(name, axis, x.ndim)
    rows = jnp.moveaxis(x, axes, range(-len(axes), 0)) if axes else x[..., None]
    length = math.prod(x.shape[a] for a in axes)
    return rows.reshape(*rows.shape[: x.ndim - len(axes)], length), axes


def pad(terms: jax.Array, count: int) -> jax.Array:
    return jnp.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, count)]) if count else terms


def _sequential(arithmetic: Arithmetic, terms: jax.Array) -> jax.Array:
    def step(total: jax.Array, term: jax.Array) -> tuple[jax.Array, None]:
        return arithmetic.add(total, term), None

    return lax.scan(step, terms[..., 0], jnp.moveaxis(terms, -1, 0)[1:])[0]


def _kahan(arithmetic: Arithmetic, terms: jax.Array) -> jax.Array:
    """Kahan, "Further remarks on reducing truncation errors", CACM 8:1 (1965)."""

    def step(carry, term):
        total, lost = carry
        term = arithmetic.sub(term, lost)
        new = arithmetic.add(total, term)
        return (new, arithmetic.sub(arithmetic.sub(new, total), term)), None

    zero = jnp.zeros(terms.shape[:-1], terms.dtype)
    return lax.scan(step, (zero, zero), jnp.moveaxis(terms, -1, 0))[0][0]
