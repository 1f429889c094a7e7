"""Healthy programs after Haiku's public examples."""

import haiku as hk
import jax
import jax.numpy as jnp

from failures.programs import clean, integers, normal

EXAMPLES = "https://github.com/google-deepmind/dm-haiku/tree/main/examples"
POLICY = "p=f32,c=bf16,o=f32"


def made(function, *args):
    return hk.without_apply_rng(hk.transform(function)).init(jax.random.key(0), *args)


def run(function, params, *args):
    return hk.without_apply_rng(hk.transform(function)).apply(params, *args)


def classifier(x):
    return hk.nets.MLP([16, 10])(hk.Flatten()(x))


@clean(EXAMPLES + "/mnist.py", POLICY,
       lambda: (made(classifier, normal(4, 6, 6)), normal(4, 6, 6), integers(4)))  # fmt: skip
def haiku_mnist_gradients(params, x, labels):
    def loss(params):
        logs = jax.nn.log_softmax(run(classifier, params, x))
        return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], axis=-1))

    return jax.grad(loss)(params)


def recurrent(xs):
    core = hk.LSTM(8)
    outputs, _ = hk.dynamic_unroll(core, xs, core.initial_state(xs.shape[1]))
    return hk.Linear(5)(outputs)


@clean(EXAMPLES + "/rnn", "bf16", lambda: (made(recurrent, normal(6, 2, 4)), normal(6, 2, 4)))
def haiku_lstm(params, xs):
    return run(recurrent, params, xs)


def attention(x):
    return x + hk.MultiHeadAttention(
        2, 8, w_init=hk.initializers.VarianceScaling(1.0), model_size=16
    )(x, x, x)


@clean(EXAMPLES + "/transformer", "c=bf16", lambda: (made(attention, normal(5, 16)), normal(5, 16)))
def haiku_attention(params, x):
    return run(attention, params, x)


def images(x):
    x = jax.nn.relu(hk.Conv2D(8, 3)(x))
    return hk.Linear(4)(jnp.mean(hk.LayerNorm(-1, True, True)(x), axis=(1, 2)))


@clean(EXAMPLES + "/imagenet", POLICY,
       lambda: (made(images, normal(2, 8, 8, 3)), normal(2, 8, 8, 3)))  # fmt: skip
def haiku_convolutions(params, x):
    return run(images, params, x)
