"""Operands that a recipe rounds: how many saturate or are flushed, and the fixes for that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal

DECAYS = jnp.asarray(np.random.default_rng(0).uniform(0.90, 0.99, (8, 64)), jnp.float32)
INPUTS = normal(1, (64, 16)) * np.exp2(np.linspace(-12, 12, 64, dtype=np.float32))[:, None]


def product(w, x):
    return w @ x


def blocks_of_32(x, axis):
    """Returns ``x / 2**(floor(log2(amax)) - 8)`` for blocks of 32 along an axis (OCP MX, 6.3)."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    return np.abs(blocks) / 2.0 ** (np.floor(np.log2(amax)) - 8)


def operands(f, recipe, *arguments):
    rows = [e for e in sw.audit(f, recipe, trials=0)(*arguments).equations if e["operands"]]
    (row,) = rows
    return row


def test_numbers_beyond_the_largest_with_their_scale_are_counted():
    row = operands(product, "mxfp8_floor", DECAYS, INPUTS)
    scaled = [blocks_of_32(DECAYS, 1), blocks_of_32(INPUTS, 0)]
    assert row["operands"] == DECAYS.size + INPUTS.size
    assert row["operands_saturated"] == sum(np.sum(x > 464) for x in scaled)  # 448 + half of 32
    assert row["operands_flushed"] == sum(np.sum((x > 0) & (x <= 2.0**-10)) for x in scaled)
    assert row["operands_saturated"] > 256
    assert row["operands_flushed"] > 0


def test_scales_that_are_rounded_up_saturate_nothing():
    assert operands(product, "mxfp8", DECAYS, INPUTS)["operands_saturated"] == 0
    assert operands(product, "fp8", DECAYS, INPUTS)["operands_saturated"] == 0


@pytest.mark.slow
def test_a_convolution():
    x, w = INPUTS.reshape(1, 8, 8, 16), jnp.ones((3, 3, 16, 4))

    def convolved(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    row = operands(convolved, "fp8", x, w)
    scaled = np.abs(np.asarray(x)) * 2.0 ** -np.ceil(np.log2(np.abs(x).max() / 448))
    assert row["operands"] == x.size + w.size
    assert row["operands_flushed"] == np.sum((scaled > 0) & (scaled <= 2.0**-10))


def loss(params, x):
    h = jnp.tanh(x @ params["in"])
    for w in params["layers"]:
        h = jnp.tanh(h @ w)
    scores = h @ h.T
    return jnp.sum(scores**2)


@pytest.mark.slow
def test_the_gradients_of_weights_and_of_inputs_are_told_apart():
    params = {"in": jnp.ones((4, 6)) / 8, "layers": [jnp.eye(6) / 2, jnp.eye(6) / 3]}
    report = sw.audit(jax.grad(loss), "bf16", trials=0)(params, jnp.ones((3, 4)))
    lines = {}
    for e in report.equations:
        if e.primitive == "dot_general" and e.direction == "backward":
            lines.setdefault(e.line, []).append(e.gradient)
    first, layers, scores = (sorted(lines[n]) for n in sorted(lines))
    assert first == ["weight"]
    assert layers == ["input", "input", "weight", "weight"]
    assert scores == ["input", "input"]
