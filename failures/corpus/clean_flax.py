"""Healthy programs after Flax's public examples, Linen and NNX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from failures.programs import clean, integers, normal, uniform

POLICY = "p=f32,c=bf16,o=f32"
GUIDE = "https://flax.readthedocs.io/en/latest/"


def labels_of(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


class Digits(nn.Module):
    """The convolutional network of the MNIST example."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(32)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


def initial(model, *args, **kwargs):
    return jax.tree.map(jnp.asarray, model.init(jax.random.key(0), *args, **kwargs))


def digits_args():
    x = uniform(4, 8, 8, 1)
    return initial(Digits(), x), x, integers(4)


@clean("https://github.com/google/flax/tree/main/examples/mnist", POLICY, digits_args)
def linen_mnist_step(params, x, labels):
    optimizer = optax.sgd(0.1, 0.9)
    loss, gradients = jax.value_and_grad(lambda p: labels_of(Digits().apply(p, x), labels))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params))
    return loss, optax.apply_updates(params, updates)


@clean("https://github.com/google/flax/tree/main/examples/mnist", "bf16", digits_args)
def linen_mnist_logits(params, x, labels):
    return Digits().apply(params, x)


class Auto(nn.Module):
    """The variational autoencoder of the VAE example."""

    @nn.compact
    def __call__(self, x, noise):
        hidden = nn.relu(nn.Dense(32)(x))
        mean, log_variance = nn.Dense(4)(hidden), nn.Dense(4)(hidden)
        code = mean + jnp.exp(0.5 * log_variance) * noise
        return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(32)(code))), mean, log_variance


def auto_args():
    x, noise = uniform(8, 16), normal(8, 4, seed=1)
    return initial(Auto(), x, noise), x, noise


@clean("https://github.com/google/flax/tree/main/examples/vae", POLICY, auto_args)
def linen_vae_loss(params, x, noise):
    logits, mean, log_variance = Auto().apply(params, x, noise)
    divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), axis=-1)
    return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x), axis=-1) + divergence)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, mask=mask)
        y = nn.LayerNorm()(x)
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(y)))


class Language(nn.Module):
    """A decoder as in the lm1b example."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(20, 16)(tokens)
        x = x + self.param("places", nn.initializers.normal(0.1), (tokens.shape[1], 16))
        x = Block()(x, nn.make_causal_mask(tokens))
        return nn.Dense(20)(nn.LayerNorm()(x))


def language_args():
    tokens = integers(2, 8, high=20)
    return initial(Language(), tokens), tokens


@clean("https://github.com/google/flax/tree/main/examples/lm1b", POLICY, language_args)
def linen_lm1b_step(params, tokens):
    optimizer = optax.adamw(1e-3)
    loss, gradients = jax.value_and_grad(
        lambda p: labels_of(Language().apply(p, tokens)[:, :-1], tokens[:, 1:])
    )(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return loss, optax.apply_updates(params, updates)


@clean("https://github.com/google/flax/tree/main/examples/lm1b", "c=bf16", language_args)
def linen_lm1b_loss(params, tokens):
    return labels_of(Language().apply(params, tokens)[:, :-1], tokens[:, 1:])


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Conv(8, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=True)(y))
        y = nn.Conv(8, (3, 3), use_bias=False)(y)
        return nn.Dense(4)(jnp.mean(nn.relu(x + nn.GroupNorm(2)(y)), axis=(1, 2)))


@clean(
    "https://github.com/google/flax/tree/main/examples/imagenet", POLICY,
    lambda: (initial(Residual(), normal(2, 8, 8, 8)), normal(2, 8, 8, 8)),
)  # fmt: skip
def linen_resnet_inference(variables, x):
    return Residual().apply(variables, x)


def split_args(make, *args):
    return lambda: (nnx.state(make()), *args)


def nnx_mlp():
    return nnx.Sequential(
        nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 4, rngs=nnx.Rngs(1))
    )


def merged(make, state):
    return nnx.merge(nnx.graphdef(make()), state)


@clean(GUIDE + "nnx_basics.html", "bf16", split_args(nnx_mlp, normal(4, 8)))
def nnx_mlp_forward(state, x):
    return merged(nnx_mlp, state)(x)


def nnx_block():
    return nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))


@clean(GUIDE + "api_reference/flax.nnx/nn/attention.html", POLICY,
       split_args(nnx_block, normal(2, 6, 16)))  # fmt: skip
def nnx_attention_layer(state, x):
    return x + merged(nnx_block, state)(x)


def nnx_narrow():
    return nnx.Sequential(
        nnx.Linear(8, 16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
        nnx.LayerNorm(16, rngs=nnx.Rngs(1)),
        nnx.gelu,
        nnx.Linear(16, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(2)),
    )


@clean("https://github.com/google/flax/issues/612", "c=bf16", split_args(nnx_narrow, normal(4, 8)))
def nnx_layer_with_dtypes(state, x):
    return merged(nnx_narrow, state)(x)
