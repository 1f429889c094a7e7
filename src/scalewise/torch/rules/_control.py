"""Control flow with graphs of its own, and attention with functions of a user (``flex_attention``).

These rules get, before torch's arguments, a function that computes a graph within the graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._operation import operation
from .._registry import RULES, WITH_GRAPHS, rule
from .._torch import GraphModule, torch
from ._attention import Weights, averages

HIGHER_ORDER = torch.ops.higher_order
Compute = Callable[[GraphModule], Callable[..., Sequence[Any]]]


def _arrays(values: Sequence[Any]) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.asarray, values))


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
        return _arrays(compute(body)(*carried, *captured))

    return jax.lax.while_loop(goes_on, step, _arrays(carried))


@rule(HIGHER_ORDER.scan)
def scan(compute: Compute, combine, init, rows, captured=()):
    def step(carried, row):
        outs = _arrays(compute(combine)(*carried, *row, *captured))
        return outs[: len(init)], outs[len(init) :]

    carried, stacked = jax.lax.scan(step, _arrays(init), _arrays(rows))
    return [*carried, *stacked]


def _plain(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """Returns a graph's result, whose steps aren't rounded: a kernel computes all in float32."""
    known, left = {}, iter(inputs)
    for node in module.graph.nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), known.get)
        if node.op == "placeholder":
            known[node] = next(left)
        elif node.op == "call_function":
            known[node] = RULES[node.target](*args, **kwargs)
        elif node.op == "output":
            return jax.tree.leaves(args)[0]
        else:
            raise NotImplementedError(f"flex_attention: its function reads {node.target}; pass it")
    raise AssertionError("a graph ends with its output")


@dataclasses.dataclass(frozen=True)
class FlexScores:
    """Scores times ``scale``, as two functions change and mask them."""

    scale: float
    codes: tuple[str, str]  # the functions' code, by which layers share what is compiled
    # of a score and its four indices, and of the indices alone
    functions: tuple[GraphModule, GraphModule] = dataclasses.field(compare=False)
    buffers: int  # how many arrays the first function gets besides; the second gets the others

    def __call__(self, query: Any, key: Any, *buffers: Any) -> Any:
        scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2)) * self.scale
        places = [jnp.arange(n, dtype=jnp.int32) for n in scores.shape]
        change, mask = self.functions

        def one(score: Any, *at: Any) -> Any:
            changed = _plain(change, (score, *at, *buffers[: self.buffers]))
            seen = _plain(mask, (*at, *buffers[self.buffers :]))
            low = jnp.full_like(changed, -jnp.inf)
            return jnp.where(seen, changed, low)

        for axis in reversed(range(4)):
            one = jax.vmap(one, (0, *(0 if i == axis else None for i in range(4))))
        return one(scores, *places)


@rule(HIGHER_ORDER.flex_attention)
def flex_attention(
    compute: Compute, query, key, value, change, block_mask, scale, options, buffers=(), masks=()
):
    """Scores are float32, and so are the user's functions of them."""
    key, value = (jnp.repeat(x, query.shape[1] // x.shape[1], 1) for x in (key, value))
    low = query.dtype
    wide = low if low == jnp.float64 else jnp.dtype(jnp.float32)
    functions = change, block_mask[-1]
    step = FlexScores(scale, (change.code, functions[1].code), functions, len(buffers))
    (scores,) = operation("attention_scores", step, [wide], query, key, *buffers, *masks)
    (weights,) = operation("attention_weights", Weights(0.0, 0), [low], scores)
    (out,) = operation("attention", averages, [low], weights, scores, value)
    total = jax.scipy.special.logsumexp(scores, -1)
    return out, total / math.log(2), scores.max(-1) / math.log(2)


WITH_GRAPHS.update((*map(HIGHER_ORDER.__getattr__, ("cond", "while_loop", "scan")),
                    HIGHER_ORDER.flex_attention))  # fmt: skip
