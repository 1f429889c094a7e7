"""Losses, advantages and statistics of reinforcement learning."""

import jax
import jax.numpy as jnp

from failures.programs import failing, integers, normal, uniform


@failing(
    "https://github.com/radixark/miles/pull/1363", "fp16", "overflow nan",
    "ratio = jnp.exp(new - old)",
    args=lambda: (-uniform(64, high=2.0), stale_policy(), jnp.abs(sparse_advantages())),
)  # fmt: skip
def clipped_surrogate(new, old, advantage):
    """PPO's objective, where the old policy thought some actions nearly impossible."""
    ratio = jnp.exp(new - old)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))


def stale_policy():
    old = -uniform(64, seed=1, high=2.0)
    old[::16] = -15.0
    return old


def sparse_advantages():
    advantage = normal(64, seed=2)
    advantage[::16] = 0.0
    return advantage


def clipped_surrogate_fixed(new, old, advantage):
    ratio = jnp.exp(jnp.clip(new - old, -8.0, 8.0))
    clipped = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))


@failing(
    "https://arxiv.org/abs/1802.01561", "fp16", "underflow nan overflow",
    "late = jnp.cumprod(jnp.minimum(ratios, 1.0))[88:]",
    "return jnp.sum(late * errors[88:]) / jnp.sum(late)",
    args=lambda: (uniform(96, low=0.5, high=0.9), normal(96, seed=1)),
)  # fmt: skip
def truncated_traces(ratios, errors):
    """The mean temporal difference of the last steps, weighted by products of ratios."""
    late = jnp.cumprod(jnp.minimum(ratios, 1.0))[88:]
    return jnp.sum(late * errors[88:]) / jnp.sum(late)


def truncated_traces_fixed(ratios, errors):
    late = jnp.cumprod(jnp.minimum(ratios[88:], 1.0))
    return jnp.sum(late * errors[88:]) / jnp.sum(late)


@failing(
    "https://github.com/DLR-RM/stable-baselines3/issues/1630", "fp16", "overflow nan",
    "between = delta**2 * seen * count / total",
    args=lambda: (normal(8, seed=1), 1.0 + uniform(8), normal(512, 8, seed=2)),
)  # fmt: skip
def merged_moments(mean, variance, batch):
    """Moments of observations after a batch, by the formula of Chan et al."""
    seen, count = 2048.0, 512.0
    total = seen + count
    delta = jnp.mean(batch, axis=0) - mean
    between = delta**2 * seen * count / total
    within = variance * seen + jnp.var(batch, axis=0) * count
    return mean + delta * count / total, (within + between) / total


def merged_moments_fixed(mean, variance, batch):
    share = 512.0 / (2048.0 + 512.0)
    delta = jnp.mean(batch, axis=0) - mean
    within = variance * (1.0 - share) + jnp.var(batch, axis=0) * share
    return mean + delta * share, within + delta**2 * share * (1.0 - share)


@failing(
    "https://github.com/rail-berkeley/rlkit/issues/68", "fp16", "underflow nan overflow",
    "discounts = rate ** jnp.arange(400", "to_go = jnp.cumsum(", "return to_go / discounts",
    args=lambda: (uniform(400, low=0.5, high=1.5),),
)  # fmt: skip
def returns_by_division(rewards):
    rate = 0.95
    discounts = rate ** jnp.arange(400, dtype=rewards.dtype)
    to_go = jnp.cumsum((rewards * discounts)[::-1])[::-1]
    return to_go / discounts


def returns_by_division_fixed(rewards):
    def body(total, reward):
        total = reward + 0.95 * total
        return total, total

    return jax.lax.scan(body, jnp.zeros((), rewards.dtype), rewards, reverse=True)[1]


@failing(
    "https://github.com/pytorch/rl/issues/1105", "fp16", "underflow precision",
    "variance = jnp.exp(2.0 * log_std)", "return -0.5 * (action - mean) ** 2 / variance",
    args=lambda: (narrow_actions(), jnp.zeros(64), jnp.full(64, -7.5)),
)  # fmt: skip
def narrow_policy(action, mean, log_std):
    """Log probabilities, but for a constant, of a policy that is nearly deterministic."""
    variance = jnp.exp(2.0 * log_std)
    return -0.5 * (action - mean) ** 2 / variance


def narrow_actions():
    return normal(64, scale=1e-3).astype("float16").astype("float32")


def narrow_policy_fixed(action, mean, log_std):
    return -0.5 * ((action - mean) * jnp.exp(-log_std)) ** 2


@failing(
    "https://github.com/huggingface/trl/issues/4637", "bf16", "cancellation swamping precision",
    "return jnp.mean(jnp.exp(difference) - 1.0 - difference)",
    args=lambda: (integers(256, high=16) / 256.0 - 8.0 / 256.0,),
)  # fmt: skip
def low_variance_divergence(difference):
    """The third estimator of Schulman's note, of two policies that are nearly the same."""
    return jnp.mean(jnp.exp(difference) - 1.0 - difference)


@failing(
    "https://github.com/pyro-ppl/numpyro/issues/1077", "fp16", "overflow nan",
    "weights = jnp.exp(log_weights)", "return jnp.sum(weights) ** 2 / jnp.sum(weights**2)",
    args=lambda: (normal(128, scale=2.0, mean=11.0),),
)  # fmt: skip
def effective_samples(log_weights):
    weights = jnp.exp(log_weights)
    return jnp.sum(weights) ** 2 / jnp.sum(weights**2)


def effective_samples_fixed(log_weights):
    weights = jnp.exp(log_weights - jnp.max(log_weights))
    return jnp.sum(weights) ** 2 / jnp.sum(weights**2)


@failing(
    "https://arxiv.org/abs/1602.07714", "bf16", "cancellation nan",
    "deviation = jnp.sqrt(second - first**2)", "first = 0.97 * first", "second = 0.97 * second",
    args=lambda: (normal(32), jnp.full(4, 48.0), jnp.full(4, 2320.0)),
)  # fmt: skip
def adaptive_targets(target, first, second):
    """Normalises targets by running moments, where the values are far from zero."""
    first = 0.97 * first + 0.03 * jnp.mean(49.0 + target)
    second = 0.97 * second + 0.03 * jnp.mean((49.0 + target) ** 2)
    deviation = jnp.sqrt(second - first**2)
    return target[:, None] / deviation


def adaptive_targets_fixed(target, first, second):
    """Keeps the variance instead of the second moment: v' = (1 - s) (v + s d^2) + s var."""
    centre = jnp.mean(49.0 + target)
    variance = second - first**2
    variance = 0.97 * (variance + 0.03 * (centre - first) ** 2) + 0.03 * jnp.var(target)
    return target[:, None] / jnp.sqrt(variance)


@failing(
    "https://github.com/google-deepmind/acme/issues/153", "bf16", "decision precision swamping",
    "thresholds = jnp.cumsum(priorities)", "drawn = jnp.searchsorted(thresholds,",
    args=lambda: (uniform(600, low=0.5, high=1.5), normal(600, seed=1)),
)  # fmt: skip
def prioritised_draws(priorities, values):
    """Values drawn at evenly spaced fractions of the cumulative priorities."""
    thresholds = jnp.cumsum(priorities)
    fractions = (jnp.arange(64, dtype=priorities.dtype) + 0.5) / 64.0
    drawn = jnp.searchsorted(thresholds, fractions * thresholds[-1])
    return values[drawn]
