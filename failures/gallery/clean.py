"""Healthy low-precision programs, of which an audit has nothing to report."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.random import key, normal, split

from ..programs import Program, register
from . import attention, losses, optimizers, positions

SAFE_ADAM = optax.adam(1e-2, b1=0.875, b2=0.9375, eps=1e-4)


def weights(seed, **shapes):
    keys = split(key(seed), len(shapes))
    return {n: normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def convolutions(params, x):
    layout = ("NHWC", "HWIO", "NHWC")
    for kernel in params["kernels"]:
        x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x)
    return jax.nn.log_softmax(jnp.mean(x, axis=(1, 2)) @ params["head"])


def convolutions_arguments():
    first, second = normal(key(0), (3, 3, 3, 8)), normal(key(1), (3, 3, 8, 16))
    params = {"kernels": [first * 27**-0.5, second * 72**-0.5]} | weights(2, head=(16, 4))
    return params, normal(key(3), (2, 16, 16, 3))


def cnn_gradients(params, x, labels):
    """The gradient of a cross-entropy; a loss scale of 2^6 stays in it."""

    def loss(params):
        logs = convolutions(params, x)
        return -64.0 * jnp.mean(jnp.take_along_axis(logs, labels[:, None], axis=1))

    return jax.grad(loss)(params)


def cnn_gradients_arguments():
    return *convolutions_arguments(), jnp.array([1, 3])


def causal_transformer(params, x):
    """Two layers with masks that every format holds."""
    causal = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))

    def attend(query, keys, value):
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys) * query.shape[-1] ** -0.5
        scores = jnp.where(causal[None, None], scores, -1e4)
        return jax.nn.softmax(scores) @ value

    for layer in params:
        x = attention.block(layer, x, attend)
    return attention.layer_norm(x)


def causal_transformer_arguments():
    params = [attention.block_params(0), attention.block_params(1)]
    return params, normal(key(2), (2, 8, attention.WIDTH))


def infinite_mask(params, x):
    """A layer of attention whose mask is -inf, with no row wholly masked."""
    causal = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))

    def attend(query, keys, value):
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys) * query.shape[-1] ** -0.5
        return jax.nn.softmax(jnp.where(causal[None, None], scores, -jnp.inf)) @ value

    return attention.block(params, x, attend)


def infinite_mask_arguments():
    return attention.block_params(0), normal(key(2), (2, 8, attention.WIDTH))


def kahan_sum(xs):
    """A compensated sum: every addition's lost digits are added to the next term."""

    def add(carry, x):
        total, lost = carry
        y = x - lost
        new = total + y
        return (new, (new - total) - y), None

    zero = jnp.zeros((), xs.dtype)
    return jax.lax.scan(add, (zero, zero), xs)[0][0]


def kahan_sum_arguments():
    return (jax.random.uniform(key(0), (512,)),)


def scaled_layer_norm(x, gain, bias):
    return losses.large_layer_norm(x) * gain[None, :] + bias[None, :]


def scaled_layer_norm_arguments():
    return 3.0 * normal(key(0), (8, 64)), 1.0 + 0.1 * normal(key(1), (64,)), normal(key(2), (64,))


def temperature_softmax(logits):
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    powers = jnp.exp(shifted)
    return powers / jnp.sum(powers, axis=-1, keepdims=True)


def temperature_softmax_arguments():
    return (2.0 * normal(key(0), (8, 32)),)


def adam_training(params, state, x, y):
    """A step of Adam with constants that BF16 holds; returns the updates."""
    gradients = jax.grad(optimizers.squared_error)(params, x, y)
    updates, state = SAFE_ADAM.update(gradients, state, params)
    return updates, state


def adam_training_arguments():
    params = optimizers.mlp_params(0, 8, 16, 1)
    return params, SAFE_ADAM.init(params), normal(key(1), (16, 8)), normal(key(2), (16, 1))


def rectified(params, x):
    """Three layers; a few of the ReLUs' inputs are so small that their signs differ."""
    for w in params:
        x = jax.nn.relu(x @ w)
    return x


def rectified_arguments():
    keys = split(key(0), 3)
    return [normal(k, (32, 32)) * 0.25 for k in keys], normal(key(1), (16, 32))


def dropout(params, x, random):
    hidden = jax.nn.gelu(x @ params["up"])
    kept = jax.random.bernoulli(random, 0.75, hidden.shape)
    return jnp.where(kept, hidden / 0.75, 0.0) @ params["down"]


def dropout_arguments():
    return weights(0, up=(16, 64), down=(64, 16)), normal(key(1), (8, 16)), key(2)


def sorted_pool(x):
    """The mean of each row's largest values."""
    return jnp.mean(jnp.sort(x, axis=-1)[:, -8:], axis=-1)


def sorted_pool_arguments():
    return (normal(key(0), (8, 64)),)


def greedy(params, x):
    """Embeds the likeliest token, which leads by a clear margin."""
    token = jnp.argmax(x @ params["head"], axis=-1)
    return params["tokens"][token] @ params["out"]


def greedy_arguments():
    params = {"head": jnp.eye(16), "tokens": normal(key(0), (16, 8)), "out": normal(key(1), (8, 8))}
    return params, 4.0 * jax.nn.one_hot(jnp.arange(8) * 2, 16) + 0.25 * normal(key(2), (8, 16))


def recurrent(params, xs):
    def step(state, x):
        state = jnp.tanh(x @ params["in"] + state @ params["state"])
        return state, state @ params["out"]

    return jax.lax.scan(step, jnp.zeros((4, 16), xs.dtype), xs)[1]


def recurrent_arguments():
    return weights(0, **{"in": (8, 16), "state": (16, 16), "out": (16, 4)}), normal(
        key(1), (16, 4, 8)
    )


def power_iteration(matrix, start):
    """Eight iterations of a `while` loop that counts in integers."""

    def step(carry):
        n, x = carry
        y = matrix @ x
        return n + 1, y / jnp.max(jnp.abs(y))

    return jax.lax.while_loop(lambda carry: carry[0] < 8, step, (0, start))[1]


def power_iteration_arguments():
    vector = normal(key(0), (16,))
    return jnp.outer(vector, vector) / 4.0 + 0.05 * jnp.eye(16), jnp.ones(16)


def embedded(params, tokens):
    x = jax.nn.one_hot(tokens, 32) @ params["tokens"] + params["positions"][None, :8]
    return positions.feed_forward(params, x)


def embedded_arguments():
    params = weights(0, up=(16, 64), down=(64, 16)) | {"tokens": normal(key(1), (32, 16))}
    params["positions"] = normal(key(2), (16, 16))
    return params, jax.random.randint(key(3), (2, 8), 0, 32)


def perceptron_gradients(params, x, y):
    return jax.value_and_grad(optimizers.squared_error)(params, x, y)


def perceptron_gradients_arguments():
    return optimizers.mlp_params(0, 32, 64, 8), normal(key(1), (32, 32)), normal(key(2), (32, 8))


def normaliser(scores):
    return jax.nn.logsumexp(scores, axis=-1), jax.nn.log_softmax(scores)


def normaliser_arguments():
    return (5.0 * normal(key(0), (8, 16)),)


def two_pass(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return mean[:, 0], jnp.mean(jnp.square(x - mean), axis=-1)


def two_pass_arguments():
    return (8.0 + normal(key(0), (8, 256)),)


def short_range(frequency, time):
    return jnp.sin(frequency[None, :] * time[:, None])


def short_range_arguments():
    return jnp.array([0.25, 0.5, 0.75, 1.0]), jnp.arange(16.0) / 16


CLEAN: dict[str, Program] = {
    "CNN, forward": Program(convolutions, convolutions_arguments, "fp16"),
    "CNN, scaled gradients": Program(cnn_gradients, cnn_gradients_arguments, "fp16"),
    "Transformer": Program(causal_transformer, causal_transformer_arguments, "bf16"),
    "Transformer in FP16": Program(causal_transformer, causal_transformer_arguments, "fp16"),
    "A mask of -inf": Program(infinite_mask, infinite_mask_arguments, "fp16"),
    "Kahan's sum": Program(kahan_sum, kahan_sum_arguments, "bf16"),
    "LayerNorm": Program(scaled_layer_norm, scaled_layer_norm_arguments, "fp16"),
    "Softmax": Program(temperature_softmax, temperature_softmax_arguments, "bf16"),
    "Adam": Program(adam_training, adam_training_arguments, "bf16"),
    "ReLUs near 0": Program(rectified, rectified_arguments, "bf16"),
    "Dropout": Program(dropout, dropout_arguments, "bf16"),
    "Sort": Program(sorted_pool, sorted_pool_arguments, "bf16"),
    "Argmax with a margin": Program(greedy, greedy_arguments, "bf16"),
    "Recurrent network": Program(recurrent, recurrent_arguments, "bf16"),
    "A counted loop": Program(power_iteration, power_iteration_arguments, "fp16"),
    "One-hot lookups": Program(embedded, embedded_arguments, "bf16"),
    "MLP under autocast": Program(perceptron_gradients, perceptron_gradients_arguments, "c=bf16"),
    "MLP under FP8": Program(perceptron_gradients, perceptron_gradients_arguments, "fp8"),
    "logsumexp": Program(normaliser, normaliser_arguments, "fp16"),
    "Two-pass variance": Program(two_pass, two_pass_arguments, "float32"),
}

for name, program in CLEAN.items():
    reference = "float64" if program.low == "float32" else "float32"
    options = {"reference": reference}
    register("gallery", name, dataclasses.replace(program, reference=reference, options=options))
