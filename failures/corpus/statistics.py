"""Means, variances, correlations."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/berceanu/openPMD-resampler/pull/3", "float32", "cancellation",
    "variance = jnp.mean(z * z) - jnp.mean(z) ** 2",
    args=lambda: (1e-2 + normal(512, scale=1e-6),),
)  # fmt: skip
def bunch_spread(z):
    variance = jnp.mean(z * z) - jnp.mean(z) ** 2
    return jnp.sqrt(jnp.maximum(variance, 0.0))


def bunch_spread_fixed(z):
    return jnp.sqrt(jnp.mean((z - jnp.mean(z)) ** 2))


@failing(
    "https://github.com/k2-fsa/sherpa-onnx/pull/3857", "float32", "cancellation",
    "spread = jnp.mean(frames**2, axis=0) - mean**2",
    args=lambda: (floor_pinned(),),
)  # fmt: skip
def normalised_features(frames):
    mean = jnp.mean(frames, axis=0)
    spread = jnp.mean(frames**2, axis=0) - mean**2
    return (frames - mean) / (jnp.sqrt(jnp.maximum(spread, 0.0)) + 1e-5)


def normalised_features_fixed(frames):
    centred = frames - jnp.mean(frames, axis=0)
    return centred / (jnp.sqrt(jnp.mean(centred**2, axis=0)) + 1e-5)


def floor_pinned():
    frames = normal(200, 6, mean=-8.0)
    frames[:, 2] = -15.942385
    frames[17, 2] += 0.07
    return frames


@failing(
    "https://github.com/gnuradio/volk/issues/290", "bf16", "cancellation nan",
    "power = jnp.mean(samples * samples) - jnp.square(jnp.mean(samples))",
    args=lambda: (normal(256, scale=0.02, mean=1.0),),
)  # fmt: skip
def sample_deviation(samples):
    power = jnp.mean(samples * samples) - jnp.square(jnp.mean(samples))
    return jnp.sqrt(jnp.abs(power))


def sample_deviation_fixed(samples):
    return jnp.sqrt(jnp.mean((samples - jnp.mean(samples)) ** 2))


@failing(
    "https://github.com/pytorch/pytorch/issues/12115", "fp16", "overflow",
    "return jnp.sum(image, axis=(1, 2)) / (64.0 * 64.0)",
    args=lambda: (uniform(2, 64, 64, 3, low=10.0, high=40.0),),
)  # fmt: skip
def global_average_pool(image):
    return jnp.sum(image, axis=(1, 2)) / (64.0 * 64.0)


def global_average_pool_fixed(image):
    return jnp.sum(image / (64.0 * 64.0) * 16.0, axis=(1, 2)) / 16.0


@failing(
    "https://github.com/huggingface/candle/pull/3719", "bf16", "swamping",
    "total = total + row",
    args=lambda: (uniform(1024, 16, low=0.5, high=1.5),),
)  # fmt: skip
def window_average(rows):
    def body(total, row):
        total = total + row
        return total, None

    total, _ = jax.lax.scan(body, jnp.zeros_like(rows[0]), rows)
    return total / rows.shape[0]


def window_average_fixed(rows):
    return jnp.mean(rows, axis=0)


@failing(
    "https://github.com/OPM/ResInsight/issues/14627", "float32", "cancellation nan",
    "radicand = n * jnp.sum(x * x, axis=0) - jnp.sum(x, axis=0) ** 2",
    args=lambda: (0.2345 + normal(100, 12, scale=1e-5),),
)  # fmt: skip
def grid_deviation(x):
    n = x.shape[0]
    radicand = n * jnp.sum(x * x, axis=0) - jnp.sum(x, axis=0) ** 2
    return jnp.sqrt(jnp.abs(radicand)) / n


def grid_deviation_fixed(x):
    return jnp.sqrt(jnp.mean((x - jnp.mean(x, axis=0)) ** 2, axis=0))


@failing(
    "https://github.com/dimforge/nalgebra/pull/1236", "float32", "cancellation",
    "covariance = jnp.mean(x * y) - jnp.mean(x) * jnp.mean(y)",
    args=lambda: (normal(256, mean=1000.0), normal(256, seed=0, mean=2000.0, scale=0.5)),
)  # fmt: skip
def regression_slope(x, y):
    covariance = jnp.mean(x * y) - jnp.mean(x) * jnp.mean(y)
    return covariance / jnp.mean((x - jnp.mean(x)) ** 2)


def regression_slope_fixed(x, y):
    centred = x - jnp.mean(x)
    return jnp.mean(centred * (y - jnp.mean(y))) / jnp.mean(centred**2)
