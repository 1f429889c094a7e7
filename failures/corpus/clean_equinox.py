"""Healthy programs after Equinox's public examples."""

import equinox as eqx
import jax
import jax.numpy as jnp

from failures.programs import clean, normal, uniform

DOCS = "https://docs.kidger.site/equinox/examples/"
POLICY = "p=f32,c=bf16,o=f32"


def arrays(model):
    return eqx.filter(model, eqx.is_array)


def rebuilt(model, params):
    return eqx.combine(params, eqx.filter(model, eqx.is_array, inverse=True))


def perceptron():
    return eqx.nn.MLP(4, 2, 16, 2, key=jax.random.key(0))


@clean(DOCS + "mnist/", "bf16", lambda: (arrays(perceptron()), normal(8, 4)))
def equinox_mlp(params, x):
    return jax.vmap(rebuilt(perceptron(), params))(x)


@clean(DOCS + "mnist/", POLICY, lambda: (arrays(perceptron()), normal(8, 4), normal(8, 2, seed=1)))
def equinox_descent(params, x, y):
    def loss(params):
        return jnp.mean((jax.vmap(rebuilt(perceptron(), params))(x) - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def convolution():
    return eqx.nn.Conv2d(1, 4, 3, key=jax.random.key(1))


@clean(DOCS + "mnist/", "fp16", lambda: (arrays(convolution()), uniform(2, 1, 8, 8)))
def equinox_cnn(params, x):
    features = jax.nn.relu(jax.vmap(rebuilt(convolution(), params))(x))
    return jax.nn.log_softmax(jnp.mean(features, axis=(2, 3)))


def spiral_cell():
    return eqx.nn.GRUCell(2, 8, key=jax.random.key(2))


@clean(
    DOCS + "train_rnn/", "bf16", lambda: (arrays(spiral_cell()), normal(10, 2), normal(8, seed=1))
)
def equinox_spirals(params, xs, readout):
    cell = rebuilt(spiral_cell(), params)
    state, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(8, xs.dtype), xs)
    return jax.nn.sigmoid(state @ readout)


def encoder():
    return eqx.nn.MultiheadAttention(2, 16, key=jax.random.key(3))


@clean(DOCS + "bert/", POLICY, lambda: (arrays(encoder()), normal(6, 16)))
def equinox_attention_layer(params, x):
    normed = jax.vmap(eqx.nn.LayerNorm(16))(x)
    return x + rebuilt(encoder(), params)(normed, normed, normed)
