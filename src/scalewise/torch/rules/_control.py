"""Control flow with graphs of its own.

These rules get, before torch's arguments, a function that computes a graph within the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._registry import WITH_GRAPHS, rule
from .._torch import GraphModule, torch

HIGHER_ORDER = torch.ops.higher_order
Compute = Callable[[GraphModule], Callable[..., Sequence[Any]]]


def _arrays(values: Sequence[Any]) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.asarray, values))


def _like(values: Sequence[Any], carried: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns values in the dtypes of what a loop carries: an audit gives the float32 model's loop
    the 16-bit model's arrays, and under autocast a body's results may be wider than it takes."""
    return tuple(jnp.asarray(y, c.dtype) for y, c in zip(values, carried, strict=True))


@rule(HIGHER_ORDER.cond)
def cond(compute: Compute, predicate, true, false, operands=()):
    """Each run of an audit takes its own branch."""
    ways = [lambda *x, way=way: _arrays(compute(way)(*x)) for way in (true, false)]
    return jax.lax.cond(jnp.asarray(predicate).reshape(()), *ways, *_arrays(operands))


@rule(HIGHER_ORDER.while_loop)
def while_loop(compute: Compute, condition, body, carried, captured=()):
    def goes_on(carried):
        return jnp.asarray(jax.tree.leaves(compute(condition)(*carried, *captured))[0]).reshape(())

    def step(carried):
        return _like(compute(body)(*carried, *captured), carried)

    return jax.lax.while_loop(goes_on, step, _arrays(carried))


@rule(HIGHER_ORDER.scan)
def scan(compute: Compute, combine, init, rows, captured=()):
    def step(carried, row):
        outs = _arrays(compute(combine)(*carried, *row, *captured))
        return _like(outs[: len(init)], carried), outs[len(init) :]

    carried, stacked = jax.lax.scan(step, _arrays(init), _arrays(rows))
    return [*carried, *stacked]


WITH_GRAPHS.update(map(HIGHER_ORDER.__getattr__, ("cond", "while_loop", "scan")))
