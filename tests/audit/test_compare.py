"""Comparisons of two programs: where they part, why, and the change that makes them agree."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalewise.auditing import compare

BF16 = jnp.bfloat16
pytestmark = pytest.mark.usefixtures("as_users_write")


@pytest.fixture
def as_users_write():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


P = {
    "w1": normal(16, 24, seed=1, scale=0.3), "b1": normal(24, seed=2), "g": normal(24, seed=3),
    "w2": normal(24, 24, seed=4, scale=0.3), "b2": normal(24, seed=5), "w3": normal(24, 9, seed=6),
}  # fmt: skip
X = normal(10, 16, seed=7)


def network(p, x, *, eps=1e-5, slope=1.702, act=None, second=None, after=lambda h: h, last=None):
    h = x @ p["w1"] + p["b1"]
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps) * p["g"]
    h = h * jax.nn.sigmoid(slope * h) if act is None else act(h)
    h = after(h)
    h = jnp.tanh(second(p, h) if second else h @ p["w2"] + p["b2"])
    return last(p, h) if last else h @ p["w3"]


def int8(x, axis=None):
    scale = jnp.max(jnp.abs(x), axis, keepdims=True) / 127
    return jnp.round(x / scale) * scale


def chunks(p, h):
    def step(total, wh):
        return total + wh[1] @ wh[0], None

    rows = p["w2"].astype(BF16).reshape(24, 1, 24), h.astype(BF16).T.reshape(24, -1, 1)
    total = jax.lax.scan(step, jnp.zeros((10, 24), BF16), rows)[0]
    return total.astype(jnp.float32) + p["b2"]


def at_once(p, h):
    return (h.astype(BF16) @ p["w2"].astype(BF16)).astype(jnp.float32) + p["b2"]


def normed(h):
    return h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


SECOND = {
    "eps": ("constant", {"eps": 1e-3}, {}),
    "fewer digits": ("rounded constant", {"slope": 1.7}, {}),
    "no bias": ("missing", {"second": lambda p, h: h @ p["w2"]}, {}),
    "a norm": ("missing", {"after": normed}, {}),
    "a residual": ("missing", {"second": lambda p, h: h @ p["w2"] + p["b2"] + h}, {}),
    "gelu": ("function", {"act": jax.nn.gelu}, {}),
    "e4m3": ("quantised", {"after": lambda h: h.astype(jnp.float8_e4m3fn).astype(jnp.float32)}, {}),
    "int8": ("quantised", {"after": int8}, {}),
    "int8 weight": ("quantised", {}, {"w2": int8(P["w2"], 0)}),
    "bf16 weight": ("quantised", {}, {"w3": P["w3"].astype(BF16).astype(jnp.float32)}),
    "transposed": ("weight", {}, {"w2": P["w2"].T}),
    "vectors swapped": ("weight", {}, {"b1": P["b2"], "b2": P["b1"]}),
    "another weight": ("weight", {}, {"w3": normal(24, 9, seed=60)}),
    "head in bf16": (
        "dtype",
        {"last": lambda p, h: (h.astype(BF16) @ p["w3"].astype(BF16)).astype(jnp.float32)},
        {},
    ),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_planted_difference_is_named(name, swapped):
    kind, parts, weights = SECOND[name]
    sides = (network, P, X), (partial(network, **parts), P | weights, X)
    found = compare(*(sides[::-1] if swapped else sides))
    assert found.cause is not None
    assert found.cause.kind == kind
    assert found.causes[-1].after < 0.2 * found.cause.before


def test_an_order_of_sums_in_bf16():
    found = compare(
        (partial(network, second=at_once), P, X), (partial(network, second=chunks), P, X)
    )
    assert found.cause.kind == "order"
    assert found.cause.after < found.cause.before
