"""Optimizers for 16-bit weights: float32 masters, stochastic rounding, compensated sums.

An update below half a unit in the last place of its weight is lost when the sum is rounded: below
2^-12 of the weight in FP16, below 2^-9 in BF16 (Micikevicius et al., ICLR 2018). Each of the three
wrappers takes the inner optimizer's update in float32, computes the new narrow weight, and returns
the update ``new - old``, which :func:`apply_updates` or ``optax.apply_updates`` adds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._check import checked, is_array, shown
from .._types import PyTree
from ..rounding import round_to
from ._finite import at_least_float32, is_float_array


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
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> MasterState:
        master = _wide(params)
        return MasterState(master, inner.init(master))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree):
        params = _required(params, "master_weights")
        updates, after = inner.update(_wide(updates), state.inner, state.master, **extra)
        master = apply_updates(state.master, updates)
        rounded = jax.tree.map(lambda m, p: at_least_float32(m.astype(p.dtype)), master, params)
        return _difference(rounded, params), MasterState(master, after)

    return optax.GradientTransformationExtraArgs(init, update)


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
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> StochasticState:
        return StochasticState(jax.random.key_data(jax.random.key(seed)), inner.init(_wide(params)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree):
        params = _required(params, "stochastic_rounding")
        updates, after = inner.update(_wide(updates), state.inner, _wide(params), **extra)
        key, *keys = jax.random.split(
            jax.random.wrap_key_data(state.key), 1 + len(jax.tree.leaves(params))
        )
        noise = jax.tree.unflatten(jax.tree.structure(params), keys)

        def leaf(p: jax.Array, u: jax.Array, key: jax.Array) -> jax.Array:
            total = at_least_float32(p) + u
            if p.dtype.itemsize >= 4:
                return total
            return round_to(total, p.dtype, rounding="stochastic", key=key)

        rounded = jax.tree.map(leaf, params, updates, noise)
        return _difference(rounded, params), StochasticState(jax.random.key_data(key), after)

    return optax.GradientTransformationExtraArgs(init, update)


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
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> CompensatedState:
        return CompensatedState(jax.tree.map(jnp.zeros_like, params), inner.init(_wide(params)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree):
        params = _required(params, "compensated")
        updates, after = inner.update(_wide(updates), state.inner, _wide(params), **extra)

        def leaf(p: jax.Array, u: jax.Array, lost: jax.Array) -> tuple[jax.Array, jax.Array]:
            if p.dtype.itemsize >= 4:
                return p + u, lost
            magnified = math.ldexp(1.0, jnp.finfo(p.dtype).nmant + 1)
            change = u + at_least_float32(lost) / magnified
            new = round_to(at_least_float32(p) + change, p.dtype)
            rest = change - (new - at_least_float32(p))
            return new, round_to(rest * magnified, p.dtype, saturate=True).astype(p.dtype)

        pairs = jax.tree.map(leaf, params, updates, state.lost)
        rounded, lost = jax.tree.transpose(jax.tree.structure(params), None, pairs)
        return _difference(rounded, params), CompensatedState(lost, after)

    return optax.GradientTransformationExtraArgs(init, update)


@checked
def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Returns ``params + updates``, summed in float32, rounded once to each parameter's dtype."""

    def leaf(p: jax.Array, u: ArrayLike) -> jax.Array:
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


def _difference(new: PyTree, old: PyTree) -> PyTree:
    """Returns ``new - old`` in float32; exact unless a weight shrinks 2^12-fold."""
    return jax.tree.map(lambda n, o: n - at_least_float32(o), new, old)


def _required(params: PyTree, name: str) -> PyTree:
    if params is None:
        raise ValueError(f"{name}: update(gradients, state, params) needs the params")
    return params
