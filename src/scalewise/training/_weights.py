"""Weights in 16 bits that still learn: float32 masters, stochastic rounding, compensation.

An update under half a unit in the last place of its weight is lost when the sum is rounded: in
FP16 whatever is under 2^-12 of the weight, in BF16 under 2^-9 (Micikevicius et al., ICLR 2018).
Each of the three takes the optimizer's update in float32 and hands on one that leads exactly to the
new narrow weight: ``new - old``, which :func:`apply_updates` or ``optax.apply_updates`` adds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..rounding import round_to
from ._finite import at_least_float32, is_float_array

Tree = Any


class MasterState(NamedTuple):
    """The float32 weights, and the inner optimizer's state."""

    master: Tree
    inner: Any


def master_weights(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that keeps the weights in float32; those it is given are rounded copies.

    The inner optimizer sees the masters as its parameters (weight decay, trust ratios) and float32
    gradients, so that its trajectory is that of float32 training on these gradients, to the bit.

    Give ``init`` the weights before they are narrowed, or the masters begin where those are. Four
    bytes a parameter.

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

    def init(params: Tree) -> MasterState:
        master = _wide(params)
        return MasterState(master, inner.init(master))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any):
        params = _given(params, "master_weights")
        updates, after = inner.update(_wide(updates), state.inner, state.master, **extra)
        master = apply_updates(state.master, updates)
        rounded = jax.tree.map(lambda m, p: at_least_float32(m.astype(p.dtype)), master, params)
        return _difference(rounded, params), MasterState(master, after)

    return optax.GradientTransformationExtraArgs(init, update)


class StochasticState(NamedTuple):
    """The random key of the next step, and the inner optimizer's state."""

    key: jax.Array
    inner: Any


def stochastic_rounding(
    optimizer: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose new weights are rounded up or down so that their mean is exact.

    No copy is kept: a weight takes its narrow dtype's bytes and no more. The sum of weight and
    update is made in float32, and rounded with probabilities in steps of 2^-13 (FP16) or 2^-16
    (BF16) of a unit in the last place. Float32 weights are rounded as ever.

    Args:
        optimizer: any optax transformation; it sees parameters and gradients in float32.
        seed: of the key in the state. Every step, and every leaf in it, draws anew.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> StochasticState:
        return StochasticState(jax.random.key_data(jax.random.key(seed)), inner.init(_wide(params)))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any):
        params = _given(params, "stochastic_rounding")
        updates, after = inner.update(_wide(updates), state.inner, _wide(params), **extra)
        key, *keys = jax.random.split(
            jax.random.wrap_key_data(state.key), 1 + len(jax.tree.leaves(params))
        )
        noise = jax.tree.unflatten(jax.tree.structure(params), keys)

        def leaf(p: Any, u: Any, key: jax.Array) -> Any:
            total = at_least_float32(p) + u
            if p.dtype.itemsize >= 4:
                return total
            return round_to(total, p.dtype, rounding="stochastic", key=key)

        rounded = jax.tree.map(leaf, params, updates, noise)
        return _difference(rounded, params), StochasticState(jax.random.key_data(key), after)

    return optax.GradientTransformationExtraArgs(init, update)


class CompensatedState(NamedTuple):
    """What rounding has taken from each weight so far, and the inner optimizer's state."""

    lost: Tree
    inner: Any


def compensated(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer that remembers what rounding took from each weight, and adds it next time.

    Kahan's summation over the steps: weight and remainder, both in the narrow dtype, hold together
    about twice its significant bits (BF16: 16, FP16: 22). Two bytes a parameter. The remainder is
    kept 2^p times as large, p the dtype's significant bits, so that it has the weight's exponent
    and FP16's range doesn't cut it. Deterministic, unlike stochastic rounding.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> CompensatedState:
        return CompensatedState(jax.tree.map(jnp.zeros_like, params), inner.init(_wide(params)))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any):
        params = _given(params, "compensated")
        updates, after = inner.update(_wide(updates), state.inner, _wide(params), **extra)

        def leaf(p: Any, u: Any, lost: Any) -> tuple[Any, Any]:
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


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``params + updates``, summed in float32 and rounded once to each parameter's own dtype."""

    def leaf(p: Any, u: Any) -> Any:
        return (at_least_float32(p) + u.astype(at_least_float32(p).dtype)).astype(p.dtype)

    return jax.tree.map(leaf, params, updates)


def _wide(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: at_least_float32(x) if is_float_array(x) else x, tree)


def _difference(new: Tree, old: Tree) -> Tree:
    """What has to be added to ``old`` to get ``new``: exact unless a weight shrinks 2^12-fold."""
    return jax.tree.map(lambda n, o: n - at_least_float32(o), new, old)


def _given(params: Tree, name: str) -> Tree:
    if params is None:
        raise ValueError(f"{name}: update(gradients, state, params) needs the params")
    return params
