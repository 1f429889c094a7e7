"""``scalify``: every result is narrow data with a scale of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from .._check import checked
from .._decorator import Params, Result
from ..formats import FP16, FormatLike
from ..interpret import mark, transform
from ..scaled import ScaledArray, State, is_stored
from ._every_op import EveryOp
from ._settings import Accumulation, Rescale, ResultFormats, Scalify


@checked
def scalify(
    f: Callable[Params, Result],
    format: FormatLike = FP16,
    *,
    rescale: Rescale | None = None,
    arithmetic: Accumulation = "float32",
    keep: ResultFormats = (),
    state: State = (),
) -> Callable[Params, Result]:
    """Returns a function of the same signature whose every result is narrow data with a scale.

    The arithmetic of a machine without float32 (Scalify, arXiv 2407.17353): an operation's result
    is rounded once, and its scale follows from those of the operands by
    :data:`scalewise.scaled.RULES`. Scales are found from the data where ``rescale`` says so, and
    where a program marks a value by :func:`rescale` or :func:`rescale_gradient`.

    Args:
        f: any function of pytrees made of JAX primitives, as for :func:`autoscale`.
        format: of all results, FP16 or BF16.
        rescale: where else scales are found from the data. None: after contractions, sums, powers,
            quotients and functions without a rule, in an optimizer, and where a propagated scale
            could overflow the format. ``"max"`` and ``"l2"``: after each operation that can change
            the magnitude, by that measure. ``"never"``: nowhere else. :class:`Scalify` describes
            them.
        arithmetic: the dtype in which contractions accumulate; ``"narrow"`` is the format's own.
        keep: exceptions, ``{name: format}``, as in :class:`Recipe`, of FP16, BF16 or FP32.
        state: the outputs that are returned stored, as in :class:`Recipe`.

    Returns:
        The transformed function. It composes with ``jit``, ``vmap`` and derivatives of every mode
        and order. Float outputs have ``f``'s own dtypes, but any ScaledArray among the arguments
        makes all of them ScaledArrays, unless ``state`` is given.

    Raises:
        TypeError: ``f`` isn't callable.
        ValueError: another format.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.square(x @ w))
        >>> w, x = jnp.full((4, 4), 256.0), jnp.full((8, 4), 1e3)
        >>> round(float(sw.scalify(loss)(w, x)) / 1e12, 2)
        1.05
        >>> float(loss(w.astype(jnp.float16), x.astype(jnp.float16)))
        inf
    """
    given: Any = format, keep  # which the class converts
    return scalified(f, Scalify(given[0], rescale, arithmetic, given[1], state))


def scalified(f: Callable[..., Result], settings: Scalify, name: str = "scalify") -> Callable:
    """Returns ``f`` under settings; ``name`` is the function's in messages."""

    @functools.wraps(f)
    def scaled(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_stored)
        scales = not settings.state and any(isinstance(x, ScaledArray) for x in leaves)
        chosen = EveryOp(settings, outputs="scales" if scales else "arrays")
        outs = transform(f, chosen, name=name)(*args, **kwargs)
        chosen.overrides.check(name)
        return outs

    mark(scaled, f, EveryOp(settings))
    return scaled
