"""Pairwise reduction of anything by one compiled step, however many levels there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 2048  # a step works on about so many numbers: enough to keep a vector unit busy


def reduce_pairwise(add: Callable[[Any, Any], Any], terms: Any, zero: Any) -> Any:
    """The sum over the first axis of a pytree of arrays, by halves: depth ceil(log2 n) and no more.

    A step adds one run of terms to another and stands in a scan, so that a long ``add`` is compiled
    once and not at each of the levels. Sums that wait for their partner lie on a stack, which is
    all that is carried.

    Args:
        add: of two pytrees of one shape, elementwise.
        terms: a pytree of arrays (n, ...), n positive.
        zero: a pytree of numbers that ``add`` leaves a term alone with.
    """
    leaves = jax.tree.leaves(terms)
    n, width = leaves[0].shape[0], max(leaves[0][0].size, 1)
    run = 1
    while run < n and run * width < LANES:
        run *= 2
    runs = 1 << (-(-n // run) - 1).bit_length()
    steps, depth = _schedule(runs, run)
    if not len(steps):
        return jax.tree.map(lambda t: t[0], terms)
    if runs == 1:  # one run: it lies on the stack from the start
        depth = 1

    def padded(t: jax.Array, fill: Any, length: int) -> jax.Array:
        rest = jnp.full((length - t.shape[0], *t.shape[1:]), fill, t.dtype)
        return jnp.concatenate([t, rest])

    source = jax.tree.map(lambda t, z: padded(t, z, runs * run), terms, zero)
    empty = source if runs == 1 else jax.tree.map(lambda t: t[:0], source)
    stack = jax.tree.map(lambda t, z: padded(t, z, depth * run + run // 2), empty, zero)

    def step(stack: Any, at: jax.Array) -> tuple[Any, None]:
        fresh, to = at[0] >= 0, at[3]

        def operand(new: jax.Array, old: jax.Array) -> Any:
            def pick(s: jax.Array, t: jax.Array) -> jax.Array:
                kept = lax.dynamic_slice_in_dim(t, old, run)
                if runs == 1:
                    return kept
                return jnp.where(fresh, lax.dynamic_slice_in_dim(s, new, run), kept)

            return jax.tree.map(pick, source, stack)

        total = add(operand(at[0], to), operand(at[1], at[2]))
        put = lambda t, s: lax.dynamic_update_slice_in_dim(t, s, to, 0)  # noqa: E731
        return jax.tree.map(put, stack, total), None

    stack = lax.scan(step, stack, jnp.asarray(steps))[0]
    return jax.tree.map(lambda t: t[0], stack)


def _schedule(runs: int, run: int) -> tuple[np.ndarray, int]:
    """Steps (new, new, old, to): a sum of two new runs, or (-1, ...) of what lies at ``to`` and at
    ``old`` on the stack, goes to ``to``; and how many runs the stack must hold.

    Whole runs first; then the last one onto itself, half by half: what its upper lanes hold from
    there on is never read again.
    """
    steps, waiting = [], 0
    for pair in range(runs // 2):
        steps.append((2 * pair * run, (2 * pair + 1) * run, 0, waiting * run))
        waiting += 1
        done = pair + 1
        while done % 2 == 0:
            steps.append((-1, -1, (waiting - 1) * run, (waiting - 2) * run))
            waiting, done = waiting - 1, done // 2
    half = run // 2
    while half:
        steps.append((-1, -1, half, 0))
        half //= 2
    return np.asarray(steps, np.int32).reshape(-1, 4), max(runs.bit_length() - 1, 1)
