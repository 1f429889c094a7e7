"""µnit scaling: unit variance at every operand, so that FP8 needs no scales."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scalewise as sw
from cases import nightly
from scalewise.training import mu_s

pytestmark = pytest.mark.usefixtures("users_promotion")


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True))


def stream(params, x):
    for up, down in params["blocks"]:
        branch = norm(mu_s.linear(jnp.tanh(mu_s.linear(x, up)) * 1.6, down))
        x = mu_s.residual(x, branch, 0.3)
    return x


def loss(params, x):
    with jax.named_scope("head"):
        logits = mu_s.head(stream(params, x), params["head"])
    return jnp.mean(jnp.square(logits - 1))


def model(width, depth=4):
    keys = jax.random.split(jax.random.key(0), 2 * depth + 2)
    matrices = [mu_s.init(k, (width, width)) for k in keys[:-1]]
    blocks = [matrices[2 * i : 2 * i + 2] for i in range(depth)]
    return {"blocks": blocks, "head": mu_s.init(keys[-1], (width, 8))}


@pytest.mark.parametrize("width", [64, *nightly([512])])
def test_activations_keep_unit_variance_at_every_width(width):
    x = stream(model(width), jax.random.normal(jax.random.key(1), (64, width)))
    assert float(jnp.std(x)) == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_fp8_without_scales_is_close_to_float32():
    params, x = model(256), jax.random.normal(jax.random.key(1), (64, 256))
    recipe = dataclasses.replace(sw.recipes.mu_s, keep={"head": "bf16"})
    program = sw.autoscale(jax.value_and_grad(loss), recipe)
    got, gradient = jax.jit(program)(params, x)
    want, exact = jax.value_and_grad(loss)(params, x)
    np.testing.assert_allclose(got, want, rtol=0.01)
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True)
    assert all(np.linalg.norm(a - b) < 0.15 * np.linalg.norm(b) for a, b in pairs)


def test_operands_are_rounded_as_they_are():
    x, w = (jax.random.normal(jax.random.key(i), (32, 32)) for i in range(2))
    got = sw.autoscale(jnp.matmul, "mu_s")(x, w)
    a, b = (sw.round_to(z, "e4m3fn", saturate="finite") for z in (x, w))
    np.testing.assert_allclose(got, a @ b, rtol=1e-5, atol=1e-5)
    large = sw.autoscale(jnp.matmul, "mu_s")(x * 1e4, w)
    clipped = sw.round_to(x * 1e4, "e4m3fn", saturate="finite")
    np.testing.assert_allclose(large, clipped @ b, rtol=1e-5, atol=1e-2)


def test_rates_of_hidden_matrices_fall_with_the_root_of_the_width():
    params = model(64)
    optimizer = optax.chain(optax.sgd(1.0), mu_s.hidden_rates(16, "blocks"))
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(ones, optimizer.init(params), params)
    assert float(updates["blocks"][0][0][0, 0]) == -0.5
    assert float(updates["head"][0, 0]) == -1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: mu_s.residual(jnp.ones(2), jnp.ones(2), 1.0), "tau is 1.0; expected a number"),
        (lambda: mu_s.hidden_rates(0, "w"), "base is 0; expected a positive integer"),
        (lambda: mu_s.hidden_rates(8, "none").init(model(8)), "'none' is in no path of a matrix"),
        (lambda: sw.Fixed(200), "exponent is 200; expected an integer from -126 to 126"),
    ],
)
def test_bad_input_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
