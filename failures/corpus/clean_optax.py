"""Healthy programs after Optax's public examples."""

import jax
import jax.numpy as jnp
import optax

from failures.programs import clean, integers, normal, uniform

POLICY = "p=f32,c=bf16,o=f32"
EXAMPLES = "https://optax.readthedocs.io/en/latest/"


def mlp_params():
    return {"in": normal(8, 16, scale=0.3), "out": normal(16, 4, seed=1, scale=0.25)}


def mlp(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def regression():
    return mlp_params(), normal(16, 8, seed=2), normal(16, 4, seed=3)


def step(optimizer, params, x, y):
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean((mlp(p, x) - y) ** 2))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return loss, optax.apply_updates(params, updates)


@clean(EXAMPLES + "getting_started.html", POLICY, regression)
def adam_regression(params, x, y):
    return step(optax.adam(1e-2), params, x, y)


@clean(EXAMPLES + "getting_started.html", POLICY, regression)
def clipped_adamw(params, x, y):
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=1e-2))
    return step(chain, params, x, y)


@clean(EXAMPLES + "api/optimizers.html#optax.lion", POLICY, regression)
def lion_regression(params, x, y):
    return step(optax.lion(1e-3), params, x, y)


@clean(EXAMPLES + "api/optimizers.html#optax.rmsprop", POLICY, regression)
def rmsprop_regression(params, x, y):
    return step(optax.rmsprop(1e-3), params, x, y)


@clean(EXAMPLES + "_collections/examples/linear_assignment_problem.html", "bf16",
       lambda: (normal(6, 5), normal(6, 5, seed=1)))  # fmt: skip
def huber_residuals(predicted, wanted):
    return jnp.mean(optax.huber_loss(predicted, wanted))


@clean(EXAMPLES + "api/losses.html", "fp16", lambda: (normal(8, 10), integers(8)))
def integer_cross_entropy(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


@clean(EXAMPLES + "api/losses.html", "bf16", lambda: (normal(8), integers(8, high=2)))
def binary_cross_entropy(logits, labels):
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, jnp.float32(labels)))


@clean(EXAMPLES + "_collections/examples/contrib/sam.html", POLICY, regression)
def sharpness_step(params, x, y):
    def loss(p):
        return jnp.mean((mlp(p, x) - y) ** 2)

    ascent = jax.tree.map(lambda p, g: p + 0.05 * g, params, jax.grad(loss)(params))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(ascent))


@clean(EXAMPLES + "_collections/examples/lbfgs.html", "float32", lambda: (uniform(6, low=-1.0),))
def rosenbrock_gradient(w):
    return jax.grad(lambda w: jnp.sum(100.0 * (w[1:] - w[:-1] ** 2) ** 2 + (1.0 - w[:-1]) ** 2))(w)
