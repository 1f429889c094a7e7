"""Optimizers for 16-bit weights: float32 masters, stochastic rounding, compensated sums.

An update below half a unit in the last place of its weight is lost when the sum is rounded: below
2^-12 of the weight in FP16, below 2^-9 in BF16 (Micikevicius et al., ICLR 2018). Each of the three
wrappers takes the inner optimizer's update in float32, computes the new narrow weight, and returns
the update ``new - old``, which :func:`apply_updates` or ``optax.apply_updates`` adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._check import checked, is_array, shown
from .._types import PyTree
from ..rounding import round_to
from ._gradients import at_least_float32, is_float_array, own_buffers


class MasterState(NamedTuple):
    """The state of :func:`master_weights`: float32 weights and the inner optimizer's state."""

    master: PyTree
    inner: optax.OptState


@checked
def master_weights(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to keep a float32 copy of narrow weights.

    The inner optimizer gets the float32 copy as its parameters (weight decay, trust ratios) and
    float32 gradients: its trajectory equals float32 training on these gradients to the bit. The
    copy takes four bytes per parameter.

    Pass the weights to ``init`` before they are cast to the narrow dtype, since the copy starts
    from them.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer, w = master_weights(optax.sgd(1.0)), jnp.bfloat16(1.0)
        >>> state = optimizer.init(w)
        >>> for _ in range(4):  # each update is lost on the BF16 weight, not on the master
        ...     updates, state = optimizer.update(jnp.bfloat16(2.0**-10), state, w)
        ...     w = apply_updates(w, updates)
        >>> float(w), float(state.master)
        (0.99609375, 0.99609375)
    """

    def add(params: PyTree, updates: PyTree, master: PyTree) -> tuple[PyTree, PyTree]:
        master = apply_updates(master, updates)
        rounded = jax.tree.map(lambda m, p: at_least_float32(m.astype(p.dtype)), master, params)
        return rounded, master

    def init(params: PyTree) -> PyTree:
        return own_buffers(_wide(params), params)

    return _wrapped("master_weights", optimizer, MasterState, init, add)


class StochasticState(NamedTuple):
    """The state of :func:`stochastic_rounding`: the next step's key and the inner state."""

    key: jax.Array
    inner: optax.OptState


@checked
def stochastic_rounding(
    optimizer: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to round new weights up or down at random, exact on average.

    No float32 copy is kept. The sum of weight and update is computed in float32 and rounded with
    probabilities in steps of 2^-13 (FP16) or 2^-16 (BF16) of a unit in the last place. Float32
    weights are rounded to nearest.

    Args:
        optimizer: any optax transformation; it gets parameters and gradients in float32.
        seed: of the key in the state. Every step and every leaf uses new random bits.
    """

    def init(params: PyTree) -> jax.Array:
        return jax.random.key_data(jax.random.key(seed))

    def add(params: PyTree, updates: PyTree, data: jax.Array) -> tuple[PyTree, jax.Array]:
        count = 1 + len(jax.tree.leaves(params))
        key, *keys = jax.random.split(jax.random.wrap_key_data(data), count)
        noise = jax.tree.unflatten(jax.tree.structure(params), keys)

        def leaf(p: jax.Array, u: jax.Array, key: jax.Array) -> jax.Array:
            total = at_least_float32(p) + u
            if p.dtype.itemsize >= 4:
                return total
            return round_to(total, p.dtype, rounding="stochastic", key=key)

        return jax.tree.map(leaf, params, updates, noise), jax.random.key_data(key)

    return _wrapped("stochastic_rounding", optimizer, StochasticState, init, add)


class CompensatedState(NamedTuple):
    """The state of :func:`compensated`: each weight's rounding error and the inner state."""

    lost: PyTree
    inner: optax.OptState


@checked
def compensated(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to add each weight's rounding error to its next update.

    This is Kahan's summation over the steps: weight and error, both in the narrow dtype, hold about
    twice its significant bits (BF16: 16, FP16: 22). The error takes two bytes per parameter. It is
    stored times 2^p, where p is the number of significant bits, so that it has the weight's
    exponent and doesn't underflow in FP16. Unlike stochastic rounding it is deterministic.
    """

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def add(params: PyTree, updates: PyTree, lost: PyTree) -> tuple[PyTree, PyTree]:
        def leaf(p: jax.Array, u: jax.Array, lost: jax.Array) -> tuple[jax.Array, jax.Array]:
            if p.dtype.itemsize >= 4:
                return p + u, lost
            magnified = math.ldexp(1.0, jnp.finfo(p.dtype).nmant + 1)
            change = u + at_least_float32(lost) / magnified
            new = round_to(at_least_float32(p) + change, p.dtype)
            rest = change - (new - at_least_float32(p))
            return new, round_to(rest * magnified, p.dtype, saturate=True).astype(p.dtype)

        pairs = jax.tree.map(leaf, params, updates, lost)
        return jax.tree.transpose(jax.tree.structure(params), None, pairs)

    return _wrapped("compensated", optimizer, CompensatedState, init, add)


@checked
def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Returns ``params + updates``, summed in float32, rounded once to each parameter's dtype."""

    def leaf(p: jax.Array, u: ArrayLike) -> jax.Array:
        p = jnp.asarray(p)
        return (at_least_float32(p) + jnp.asarray(u, at_least_float32(p).dtype)).astype(p.dtype)

    kinds = jax.tree.structure(params), jax.tree.structure(updates)
    if kinds[0] != kinds[1]:
        raise ValueError(f"apply_updates: updates are {kinds[1]}; expected params' {kinds[0]}")
    for x in jax.tree.leaves((params, updates)):
        if not is_array(x):
            raise TypeError(f"apply_updates: params or updates hold {shown(x)}; expected arrays")
    return jax.tree.map(leaf, params, updates)


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: at_least_float32(x) if is_float_array(x) else x, tree)


def _wrapped(
    name: str,
    optimizer: optax.GradientTransformation,
    kind: Callable[[PyTree, optax.OptState], PyTree],
    begin: Callable[[PyTree], PyTree],
    add: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for float32, with a state of its own beside the inner one.

    ``add`` takes the narrow weights, the inner optimizer's updates and that state, and returns the
    new weights, still in float32, and the next state.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> PyTree:
        return kind(begin(params), inner.init(_wide(params)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree):
        if params is None:
            raise ValueError(f"{name}: update(gradients, state, params) needs the params")
        own, before = state
        weights = own if kind is MasterState else _wide(params)
        updates, after = inner.update(_wide(updates), before, weights, **extra)
        new, own = add(params, updates, own)
        # exact unless a weight shrinks 2^12-fold
        change = jax.tree.map(lambda n, p: n - at_least_float32(p), new, params)
        return change, kind(own, after)

    return optax.GradientTransformationExtraArgs(init, update)
