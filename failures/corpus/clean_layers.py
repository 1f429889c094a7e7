"""Healthy layers, densities and steps after libraries' examples, from fields not covered so far."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from failures.programs import clean, integers, normal, uniform

POLICY = "p=f32,c=bf16,o=f32"


@clean("https://docs.kidger.site/equinox/examples/train_rnn/", "bf16",
       lambda: (eqx.filter(GRU, eqx.is_array), normal(12, 4)),
)  # fmt: skip
def equinox_gru(cell, sequence):
    cell = eqx.combine(cell, GRU)
    return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(8), sequence)[0]


GRU = eqx.nn.GRUCell(4, 8, key=jax.random.key(0))


@clean("https://optax.readthedocs.io/en/latest/api/losses.html", "fp16",
       lambda: (normal(4, 20, 6), np.zeros((4, 20), np.float32),
                1 + integers(4, 6, high=5), np.zeros((4, 6), np.float32)),
)  # fmt: skip
def transcripts_loss(logits, logit_padding, labels, label_padding):
    return optax.ctc_loss(logits, logit_padding, labels, label_padding, log_epsilon=-1e4)


@clean("https://optax.readthedocs.io/en/latest/api/losses.html", "fp16",
       lambda: (normal(32, 4), np.float32(integers(32, 4, high=2))),
)  # fmt: skip
def detector_loss(logits, labels):
    return jnp.mean(optax.sigmoid_focal_loss(logits, labels, alpha=0.25))


@clean("https://docs.jax.dev/en/latest/_autosummary/jax.image.resize.html", "bf16",
       lambda: (uniform(16, 16, 3),),
)  # fmt: skip
def resized_image(image):
    return jax.image.resize(image, (24, 24, 3), "bilinear")


@clean("https://docs.jax.dev/en/latest/notebooks/convolutions.html", "fp16",
       lambda: (uniform(24, 24), 3),
)  # fmt: skip
def smoothed_image(image, _):
    x = jnp.linspace(-3.0, 3.0, 7, dtype=image.dtype)
    window = jnp.exp(-0.5 * x**2)[:, None] * jnp.exp(-0.5 * x**2)
    window = window / jnp.sum(window)
    return jax.scipy.signal.convolve2d(image, window, mode="same")


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, z):
        x = nn.Dense(64)(z).reshape(-1, 4, 4, 4)
        x = nn.gelu(nn.ConvTranspose(8, (3, 3), (2, 2))(x))
        return nn.sigmoid(nn.ConvTranspose(1, (3, 3), (2, 2))(x))


@clean("https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/layers.html", "bf16",
       lambda: (Decoder().init(jax.random.key(0), jnp.ones((1, 6))), normal(2, 6)),
)  # fmt: skip
def linen_decoder(params, z):
    return Decoder().apply(params, z)


@clean("https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/layers.html", "fp16",
       lambda: (HEADS.init(jax.random.key(1), jnp.ones((1, 10, 16))), normal(2, 10, 16)),
)  # fmt: skip
def linen_causal_attention(params, x):
    mask = nn.make_causal_mask(x[..., 0])
    return HEADS.apply(params, x, mask=mask)


HEADS = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=16)


@clean("https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/lora.html", POLICY,
       lambda: (nnx.state(LORA, nnx.Param), normal(12, 16), normal(12, 8, seed=1)),
)  # fmt: skip
def nnx_lora_step(state, x, y):
    def loss(state):
        return jnp.mean((nnx.merge(nnx.graphdef(LORA), state)(x) - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))


LORA = nnx.LoRALinear(16, 8, lora_rank=2, rngs=nnx.Rngs(0))


def encode_sequence(x):
    core = hk.GRU(8)
    return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]


UNROLLED = hk.without_apply_rng(hk.transform(encode_sequence))


@clean("https://dm-haiku.readthedocs.io/en/latest/api.html#recurrent", "fp16",
       lambda: (UNROLLED.init(jax.random.key(0), normal(10, 2, 6)), normal(10, 2, 6)),
)  # fmt: skip
def haiku_gru(params, x):
    return UNROLLED.apply(params, x)


@clean("https://num.pyro.ai/en/stable/distributions.html", "fp16",
       lambda: (uniform(24, low=0.5, high=2.0), normal(24, seed=1), normal(24, seed=2, scale=3.0)),
)  # fmt: skip
def cauchy_density(scale, place, value):
    import numpyro.distributions as dist

    return dist.Cauchy(place, scale).log_prob(value)


@clean("https://keras.io/api/layers/convolution_layers/separable_convolution2d/", "bf16",
       lambda: (uniform(2, 8, 8, 4), normal(3, 3, 4, 1, scale=0.3), normal(1, 1, 4, 8, scale=0.5)),
)  # fmt: skip
def separable_convolution(x, depthwise, pointwise):
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        x, depthwise.reshape(3, 3, 1, 4), (1, 1), "SAME", dimension_numbers=dimensions,
        feature_group_count=4,
    )  # fmt: skip
    x = jax.lax.conv_general_dilated(x, pointwise, (1, 1), "SAME", dimension_numbers=dimensions)
    return jax.nn.relu(x)


@clean("https://optax.readthedocs.io/en/latest/api/contrib.html", POLICY,
       lambda: (normal(8, 8, scale=0.3), normal(24, 8, seed=1), normal(24, 8, seed=2)),
)  # fmt: skip
def averaged_sgd_steps(w, x, y):
    tx = optax.contrib.schedule_free(optax.sgd(0.05), 0.05)

    def body(state, _):
        w, inner = state
        gradient = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)
        updates, inner = tx.update(gradient, inner, w)
        return (optax.apply_updates(w, updates), inner), None

    return jax.lax.scan(body, (w, tx.init(w)), None, length=4)[0][0]


@clean("https://github.com/google-deepmind/rlax", "bf16",
       lambda: (normal(20, 4), normal(20, 4, seed=1), normal(4, seed=2),
                np.full((20, 4), 0.9375, np.float32)),
)  # fmt: skip
def generalised_advantages(rewards, values, last, discounts):
    after = jnp.concatenate([values[1:], last[None]])
    errors = rewards + discounts * after - values

    def body(advantage, step):
        error, discount = step
        advantage = error + 0.9375 * discount * advantage
        return advantage, advantage

    return jax.lax.scan(body, jnp.zeros_like(last), (errors, discounts), reverse=True)[1]


@clean("https://scikit-learn.org/stable/modules/gaussian_process.html", "bf16",
       lambda: (uniform(20, 2), uniform(6, 2, seed=1), normal(20, seed=2)),
)  # fmt: skip
def kernel_regression(x, new, y):
    def kernel(a, b):
        apart = jnp.sum((a[:, None] - b) ** 2, axis=-1)
        return jnp.exp(-2.0 * apart)

    weights = kernel(new, x)
    return weights @ y / jnp.sum(weights, axis=-1)
