"""Normalisation layers."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


def outliers(*shape, size=900.0):
    x = normal(*shape, seed=3)
    x[..., 5] = size
    return x


@failing(
    "https://github.com/microsoft/onnxruntime/pull/28442", "fp16", "overflow",
    "jnp.square(total)",
    args=lambda: (outliers(4, 256), outliers(4, 256), uniform(256)),
)  # fmt: skip
def skip_rms_norm(x, skip, gain):
    total = x + skip
    size = jnp.mean(jnp.square(total), axis=-1, keepdims=True)
    return total * jax.lax.rsqrt(size + 1e-5) * gain


def skip_rms_norm_fixed(x, skip, gain):
    total = x + skip
    small = total / 64.0
    size = jnp.mean(jnp.square(small), axis=-1, keepdims=True)
    return small * jax.lax.rsqrt(size + 1e-5 / 4096) * gain


@failing(
    "https://github.com/neuroneural/brainchop-cli/pull/56", "fp16", "overflow",
    "square = centred * centred", "variance = jnp.mean(square",
    args=lambda: (normal(2, 8, 8, 24, scale=150.0),),
)  # fmt: skip
def segmentation_group_norm(x):
    groups = x.reshape(*x.shape[:3], 6, 4)
    centred = groups - jnp.mean(groups, axis=(1, 2, 4), keepdims=True)
    square = centred * centred
    variance = jnp.mean(square, axis=(1, 2, 4), keepdims=True)
    return (centred / jnp.sqrt(variance + 1e-5)).reshape(x.shape)


@failing(
    "https://github.com/nntrainer/nntrainer/issues/3935", "fp16", "overflow",
    "size = jnp.sum(acc",
    args=lambda: (normal(4, 4096, scale=5.0), uniform(4096)),
)  # fmt: skip
def width_rms_norm(x, gain):
    """Sums squares in a loop over slices of the width, as a vectorised kernel does."""
    rows = jnp.moveaxis(x.reshape(x.shape[0], -1, 8), 1, 0)

    def body(acc, row):
        acc = acc + row * row
        return acc, None

    acc, _ = jax.lax.scan(body, jnp.zeros_like(rows[0]), rows)
    size = jnp.sum(acc, axis=-1, keepdims=True) / x.shape[-1]
    return x * jax.lax.rsqrt(size + 1e-3) * gain


def width_rms_norm_fixed(x, gain):
    small = x / 64.0
    size = jnp.mean(small * small, axis=-1, keepdims=True)
    return small * jax.lax.rsqrt(size + 1e-3 / 4096) * gain


@failing(
    "https://github.com/microsoft/onnxruntime/issues/17692", "fp16", "overflow",
    "variance = jnp.mean(",
    args=lambda: (normal(3, 128, scale=200.0), uniform(128, seed=1), normal(128, seed=2)),
)  # fmt: skip
def layer_norm_of_large_variance(x, gain, bias):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return gain * centred / jnp.sqrt(variance + 1e-5) + bias


@failing(
    "https://github.com/tensorflow/tensorflow/pull/24979", "fp16", "underflow overflow nan",
    "jnp.sqrt(variance + 1e-12)",
    args=lambda: (jnp.zeros((4, 32)), uniform(32), normal(32, seed=1)),
)  # fmt: skip
def norm_of_padding(x, gain, bias):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return gain * ((x - mean) / jnp.sqrt(variance + 1e-12)) + bias


def norm_of_padding_fixed(x, gain, bias):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return gain * ((x - mean) / jnp.sqrt(variance + 1e-6)) + bias


@failing(
    "https://github.com/pytorch/pytorch/issues/32137", "fp16", "underflow nan overflow",
    "jnp.maximum(length, 1e-12)",
    args=lambda: (normal(6, 16) * (jnp.arange(6.0) > 0)[:, None], normal(16, 8, seed=1)),
)  # fmt: skip
def normalised_rows(x, w):
    length = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return (x / jnp.maximum(length, 1e-12)) @ w


def normalised_rows_fixed(x, w):
    length = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return (x / jnp.maximum(length, 1e-6)) @ w


@failing(
    "https://github.com/MinishLab/model2vec/pull/368", "fp16", "underflow nan overflow",
    "jnp.sum(pooled**2",
    args=lambda: (normal(5, 12, 16, scale=1e-4),),
)  # fmt: skip
def sentence_embedding(tokens):
    pooled = jnp.mean(tokens, axis=1)
    length = jnp.sqrt(jnp.sum(pooled**2, axis=-1, keepdims=True))
    return pooled / length


def sentence_embedding_fixed(tokens):
    pooled = jnp.mean(tokens, axis=1)
    pooled = pooled / jnp.max(jnp.abs(pooled), axis=-1, keepdims=True)
    return pooled / jnp.sqrt(jnp.sum(pooled**2, axis=-1, keepdims=True))


@failing(
    "https://github.com/pytorch/pytorch/issues/66707", "bf16", "cancellation",
    "jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean", "mean = jnp.mean(x, axis=-1",
    args=lambda: (normal(8, 128, scale=0.05, mean=1.0), uniform(128)),
)  # fmt: skip
def fast_variance_norm(x, gain):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean
    return gain * (x - mean) * jax.lax.rsqrt(jnp.maximum(variance, 0.0) + 1e-5)


def fast_variance_norm_fixed(x, gain):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return gain * centred * jax.lax.rsqrt(variance + 1e-5)
