"""Reinforcement learning."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/PrimeIntellect-ai/prime-rl/issues/2972", "fp16", "overflow nan",
    "ratio = jnp.exp(new - old)",
    args=lambda: (jnp.float32([-2.0, -1.0, -3.0, -0.5]), jnp.float32([-2.1, -0.9, -16.0, -0.6]),
                  jnp.float32([1.0, -0.5, 0.7, 0.2])),
)  # fmt: skip
def stale_importance(new, old, advantage):
    ratio = jnp.exp(new - old)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    return jnp.minimum(clipped * advantage, 2.0) + jnp.tanh(ratio / 1024.0 / 1024.0)


def stale_importance_fixed(new, old, advantage):
    difference = new - old
    clipped = jnp.clip(jnp.exp(jnp.minimum(difference, 5.0)), 0.8, 1.2)
    tail = jnp.tanh(jnp.exp(difference - 13.862944))
    return jnp.minimum(clipped * advantage, 2.0) + tail


@failing(
    "https://github.com/openai/spinningup/issues/101",
    "fp16",
    "underflow overflow nan cancellation precision",
    "jnp.log(1.0 - squashed**2 + 1e-6)",
    "squashed = jnp.tanh(raw)",
    args=lambda: (jnp.float32([[0.3, 5.2, -4.6], [6.0, -0.2, 1.4]]), normal(2, 3)),
)
def squashed_policy(raw, noise):
    squashed = jnp.tanh(raw)
    correction = jnp.log(1.0 - squashed**2 + 1e-6)
    return jnp.sum(-0.5 * noise**2 - correction, axis=-1)


def squashed_policy_fixed(raw, noise):
    correction = 2.0 * (jnp.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))
    return jnp.sum(-0.5 * noise**2 - correction, axis=-1)


@failing(
    "https://github.com/huggingface/trl/issues/6626",
    "fp16",
    "underflow nan overflow",
    "weights = 0.9 ** jnp.arange(256.0)",
    "weighted = weights * rewards",
    "jnp.cumsum(weighted[::-1])[::-1] / weights",
    args=lambda: (uniform(256),),
)
def advantages_by_position(rewards):
    weights = 0.9 ** jnp.arange(256.0)
    weighted = weights * rewards
    return jnp.cumsum(weighted[::-1])[::-1] / weights


def advantages_by_position_fixed(rewards):
    def body(after, reward):
        after = reward + 0.9 * after
        return after, after

    return jax.lax.scan(body, jnp.zeros((), rewards.dtype), rewards, reverse=True)[1]


@failing(
    "https://github.com/HorizonRobotics/alf/pull/1330",
    "fp16",
    "overflow",
    "error = jnp.square(target - value)",
    "jnp.mean(error) / 16.0",
    args=lambda: (
        normal(16, scale=300.0, mean=2000.0),
        normal(16, seed=1, scale=300.0, mean=2400.0),
    ),
)
def value_loss(value, target):
    error = jnp.square(target - value)
    return jnp.sqrt(jnp.mean(error) / 16.0)


def value_loss_fixed(value, target):
    return jnp.sqrt(jnp.mean(jnp.square((target - value) / 64.0))) * 16.0


@failing(
    "https://github.com/natolambert/rlhf-book/pull/53", "bf16", "precision swamping",
    "total = reward + gamma * total", "gamma = 1.0 - rate",
    args=lambda: (uniform(600), jnp.float32(0.0015)),
)  # fmt: skip
def long_horizon_return(rewards, rate):
    gamma = 1.0 - rate

    def body(total, reward):
        total = reward + gamma * total
        return total, None

    return jax.lax.scan(body, jnp.zeros((), rewards.dtype), rewards, reverse=True)[0]


@failing(
    "https://github.com/huggingface/trl/issues/1236", "bf16", "cancellation precision",
    "chosen = policy_chosen - reference_chosen", "policy_chosen = reference_chosen + gain",
    args=lambda: (-uniform(8, low=200.0, high=700.0), normal(8, scale=0.5)),
)  # fmt: skip
def preference_margin(reference_chosen, gain):
    policy_chosen = reference_chosen + gain
    chosen = policy_chosen - reference_chosen
    return jax.nn.log_sigmoid(0.1 * chosen), chosen


def preference_margin_fixed(reference_chosen, gain):
    return jax.nn.log_sigmoid(0.1 * gain), gain
