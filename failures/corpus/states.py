"""Averages and counters that are carried from step to step."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/d8ahazard/sd_dreambooth_extension/pull/1415", "bf16",
    "precision swamping", "0.9999 * average + (1.0 - 0.9999) * weight",
    args=lambda: (normal(64), normal(64, seed=1)), steps=100, change=True,
)  # fmt: skip
def shadow_weights(average, weight):
    return 0.9999 * average + (1.0 - 0.9999) * weight


@failing(
    "https://github.com/lucidrains/DALLE2-pytorch/issues/131", "fp16", "swamping precision",
    "return average + (1.0 - decay) * (weight - average)",
    args=lambda: (normal(64, mean=3.0, scale=0.1), normal(64, seed=1, mean=3.2, scale=0.1)),
    steps=400, change=True,
)  # fmt: skip
def lerped_prior(average, weight):
    decay = 0.999
    return average + (1.0 - decay) * (weight - average)


@failing(
    "https://github.com/Oneflow-Inc/oneflow/pull/9388", "bf16", "swamping precision",
    "0.999 * running + 0.001 * jnp.var(x, axis=0)",
    args=lambda: (jnp.ones(16), normal(64, 16, scale=1.5)), steps=200, change=True,
)  # fmt: skip
def slow_running_variance(running, x):
    return 0.999 * running + 0.001 * jnp.var(x, axis=0)


@failing(
    "https://github.com/jax-ml/jax/issues/29323", "fp16", "swamping",
    "new = count + 1.0",
    args=lambda: (jnp.float32(2040.0), uniform(8)), steps=40, change=True,
)  # fmt: skip
def visits(count, reward):
    new = count + 1.0
    return new, jnp.mean(reward) / new


@failing(
    "https://github.com/NVIDIA/Megatron-LM/issues/1482", "bf16", "swamping precision",
    "return bias + 1e-3 * jnp.sign(target - load)",
    args=lambda: (normal(8, mean=1.5, scale=0.2), uniform(8, seed=1), jnp.float32(0.5)),
    steps=50, change=True,
)  # fmt: skip
def expert_bias(bias, load, target):
    return bias + 1e-3 * jnp.sign(target - load)


@failing(
    "https://arxiv.org/abs/1906.10465", "bf16", "swamping",
    "return total + loss, jnp.mean(x)",
    args=lambda: (jnp.float32(300.0), uniform(32)), steps=100, change=True,
)  # fmt: skip
def epoch_loss(total, x):
    loss = jnp.mean(x * x)
    return total + loss, jnp.mean(x)


@failing(
    "https://github.com/scikit-learn/scikit-learn/pull/12338",
    "bf16",
    "swamping precision cancellation",
    "return mean + (jnp.mean(x, axis=0) - mean) * 16.0 / count",
    args=lambda: (
        normal(8, mean=4.0, scale=0.1),
        jnp.float32(16384.0),
        normal(16, 8, seed=1, mean=5.0),
    ),
    steps=200,
    change=True,
)
def running_observation_mean(mean, count, x):
    return mean + (jnp.mean(x, axis=0) - mean) * 16.0 / count


@failing(
    "https://github.com/jax-ml/ml_dtypes/issues/63", "bf16", "swamping",
    "total = total + jnp.mean(batch, axis=0)",
    args=lambda: (uniform(600, 4, 8, high=1.0),),
)  # fmt: skip
def accumulated_features(batches):
    def body(total, batch):
        total = total + jnp.mean(batch, axis=0)
        return total, None

    zero = jnp.zeros(batches.shape[-1], batches.dtype)
    return jax.lax.scan(body, zero, batches)[0] / batches.shape[0]


def accumulated_features_fixed(batches):
    return jnp.mean(jnp.mean(batches, axis=1), axis=0)
