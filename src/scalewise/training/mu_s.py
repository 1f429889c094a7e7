"""µnit scaling (µS, arXiv 2502.05967): the rules with which FP8 needs no scales.

The recipe ``"mu_s"`` rounds operands to FP8 as they are, so that a program has to keep weights,
activations and gradients at unit variance: weights drawn with variance 1 (:func:`init`), matrices
that divide by the root of their inputs (:func:`linear`), residuals that keep the variance
(:func:`residual`), branches that end, not begin, with a norm, and the head in 16 bits and divided
by its inputs (:func:`head`). A learning rate found at one width then serves others
(:func:`hidden_rates`); weight decay is decoupled from it. A loss that is a mean over a batch has
small gradients: sum it, or scale it (:class:`StaticLossScale`), since E5M2 ends at 2^-16.

Unit variance, norms behind branches and residuals that keep the variance are confirmed by published
summaries of the paper. The factors of the head and of the rates are those of u-μP, which also
combines unit scaling and μP (arXiv 2407.17465; ``linear_readout`` and ``lr_scale_func_adam`` of
graphcore-research/unit-scaling): the programs of µS's authors aren't public.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .._types import PyTree


def init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns normal numbers of variance 1, whatever the shape."""
    return jax.random.normal(key, shape, dtype)


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns ``x @ w / sqrt(n)`` for ``w`` of n rows; the same factor applies to the gradients."""
    return jnp.matmul(x, w) * jnp.asarray(w.shape[0] ** -0.5, x.dtype)


def head(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns ``x @ w / n``: the logits. Name its scope in ``Recipe.keep``, so that it is wide."""
    return jnp.matmul(x, w) / jnp.asarray(w.shape[0], x.dtype)


def residual(x: jax.Array, branch: jax.Array, tau: float) -> jax.Array:
    """Returns ``sqrt(1 - tau) * x + sqrt(tau) * branch``, of variance 1 if both are.

    ``x`` is the residual stream, ``branch`` a norm's output; take a lower tau in deeper models.
    """
    if not 0 < tau < 1:
        raise ValueError(f"residual: tau is {tau!r}; expected a number between 0 and 1")
    return x * jnp.asarray((1 - tau) ** 0.5, x.dtype) + branch * jnp.asarray(tau**0.5, x.dtype)


def hidden_rates(base: int, hidden: str | Callable[[str], bool]) -> optax.GradientTransformation:
    """Scales the updates of hidden matrices by ``sqrt(base / n)``, where n is their inputs.

    Chain it behind Adam: ``optax.chain(optax.adam(rate), hidden_rates(256, "blocks"))``.

    Args:
        base: the width at which the learning rate was found.
        hidden: a regular expression that is found in the paths of hidden matrices, as
            ``jax.tree_util.keystr`` writes them, or a function of a path. All but embeddings, norms
            and the head are hidden.
    """
    if not isinstance(base, int) or base < 1:
        raise ValueError(f"hidden_rates: base is {base!r}; expected a positive integer")
    is_hidden = hidden if callable(hidden) else (lambda path: re.search(hidden, path) is not None)

    def chosen(path: jax.tree_util.KeyPath, x: PyTree) -> bool:
        return x.ndim > 1 and bool(is_hidden(jax.tree_util.keystr(path)))

    def begin(params: PyTree) -> optax.EmptyState:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        if not any(chosen(path, x) for path, x in leaves):
            raise ValueError(f"hidden_rates: {hidden!r} is in no path of a matrix")
        return optax.EmptyState()

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        del params

        def leaf(path: jax.tree_util.KeyPath, u: jax.Array) -> jax.Array:
            if not chosen(path, u):
                return u
            return u * jnp.asarray((base / u.shape[-2]) ** 0.5, u.dtype)

        return jax.tree_util.tree_map_with_path(leaf, updates), state

    return optax.GradientTransformation(begin, update)
