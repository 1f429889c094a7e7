"""Attention, as torch's fused kernels compute it in 16 bits; ``flex_attention`` with functions of a
user."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._operation import operation
from .._registry import RULES, STAGED, WITH_GRAPHS, evaluated, rule
from .._torch import GraphModule, aten, torch
from ._creation import dropped, kept, random_rule

A = aten


@dataclasses.dataclass(frozen=True)
class Scores:
    """Products of queries and keys times ``scale``, and -inf where a query may not look."""

    scale: float
    is_causal: bool

    def __call__(self, query: Any, key: Any, *masks: Any) -> Any:
        scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2)) * self.scale
        if self.is_causal:
            masks = (jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_)),)
        for mask in masks:
            mask = jnp.broadcast_to(mask, scores.shape)
            if mask.dtype == jnp.bool_:
                scores = jnp.where(mask, scores, jnp.full_like(scores, -jnp.inf))
            else:
                scores = scores + mask.astype(scores.dtype)
        return scores


def _exponentials(scores: Any) -> Any:
    """Returns exp(scores - their maximum); 0 for a query that may look nowhere."""
    largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    return jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest)))


@dataclasses.dataclass(frozen=True)
class Weights:
    dropout: float

    def __call__(self, scores: Any, *seed: Any) -> Any:
        weights = _exponentials(scores)
        if self.dropout:
            (own,) = seed
            some = kept(own, 1 - self.dropout, weights.shape)
            weights = dropped(weights, some, self.dropout)
        return weights


def _averages(weights: Any, scores: Any, value: Any) -> Any:
    total = jnp.sum(_exponentials(scores), -1, keepdims=True)
    return jnp.matmul(weights, value) / jnp.where(total == 0, jnp.ones_like(total), total)


def _attended(scores, weights, seed, query, key, value, *others):
    """Returns averages of values, and their scores, which are float32."""
    low = query.dtype
    wide = low if low == jnp.float64 else jnp.dtype(jnp.float32)
    (found,) = operation("attention_scores", scores, [wide], query, key, *others)
    (shares,) = operation("attention_weights", weights, [low], found, *seed)
    return *operation("attention", _averages, [low], shares, found, value), found


def _has_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
    return dropout_p > 0


@random_rule(A.scaled_dot_product_attention.default, draws=_has_dropout)
def attention(
    seed, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
):  # fmt: skip
    """Scores are float32; what multiplies the values is rounded to the operands' dtype."""
    if enable_gqa:
        key, value = (jnp.repeat(v, query.shape[-3] // v.shape[-3], -3) for v in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    masks = () if attn_mask is None else (attn_mask,)
    scores, weights = Scores(scale, is_causal), Weights(dropout_p)
    return _attended(scores, weights, (seed,) * bool(dropout_p), query, key, value, *masks)[0]


def _plain(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """Returns a graph's result, whose steps aren't rounded: a kernel computes all in float32."""

    def result(node: Any, read: Any) -> Any:
        if node.op != "call_function":
            raise NotImplementedError(f"flex_attention: its function reads {node.target}; pass it")
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), read)
        return RULES[node.target](*args, **kwargs)

    return jax.tree.leaves(evaluated(module, inputs, result, {}))[0]


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


@rule(torch.ops.higher_order.flex_attention)
def flex_attention(
    compute, query, key, value, change, block_mask, scale, options, buffers=(), masks=()
):
    """Scores are float32, and so are the user's functions of them."""
    key, value = (jnp.repeat(x, query.shape[1] // x.shape[1], 1) for x in (key, value))
    functions = change, block_mask[-1]
    step = FlexScores(scale, (change.code, functions[1].code), functions, len(buffers))
    out, scores = _attended(step, Weights(0.0), (), query, key, value, *buffers, *masks)
    total = jax.scipy.special.logsumexp(scores, -1)
    return out, total / math.log(2), scores.max(-1) / math.log(2)


STAGED.add(A.scaled_dot_product_attention.default)
WITH_GRAPHS.add(torch.ops.higher_order.flex_attention)
