"""Optimizers, schedules, averages of weights, and what is done to gradients."""

import jax
import jax.numpy as jnp
import optax

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/pytorch/pytorch/issues/101291", "bf16", "swamping precision",
    "total = total + gradient**2",
    args=lambda: (jnp.full(16, 1.0), uniform(600, 16, low=0.05, high=0.15))
)  # fmt: skip
def adagrad_steps(w, gradients):
    """Adagrad's sum of squares, over gradients that don't decrease."""

    def body(total, gradient):
        total = total + gradient**2
        return total, None

    total = jax.lax.scan(body, jnp.full_like(w, 0.1), gradients)[0]
    return gradients[-1] / jnp.sqrt(total)


@failing(
    "https://arxiv.org/abs/1907.08610", "bf16", "swamping precision",
    "return slow + 0.5 * (fast - slow)",
    args=lambda: (slow_weights(), slow_weights() * (1.0 + 2.0**-7)), change=True,
)  # fmt: skip
def synchronised_lookahead(slow, fast):
    return slow + 0.5 * (fast - slow)


def slow_weights():
    return 1.0 + 0.0625 * jnp.arange(16.0) / 16.0 * 8.0


@failing(
    "https://github.com/google-research/big_vision/issues/41", "bf16",
    "cancellation swamping precision",
    "return 0.5 * (1.0 + jnp.cos(jnp.pi * progress))", "progress = step / 1024.0",
    args=lambda: (1016.0 - 8.0 * jnp.arange(8.0),),
)  # fmt: skip
def cosine_schedule(step):
    """The learning rate near the end of a cosine schedule."""
    progress = step / 1024.0
    return 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def cosine_schedule_fixed(step):
    left = (1024.0 - step) / 1024.0
    return jnp.sin(0.5 * jnp.pi * left) ** 2


@failing(
    "https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/155", "fp16",
    "underflow precision",
    "rising = step * warmup**-1.5", "return 16.0 * jnp.minimum(step**-0.5, rising)",
    args=lambda: (500.0 + 100.0 * jnp.arange(16.0),),
)  # fmt: skip
def transformer_schedule(step):
    warmup = jnp.asarray(16000.0, step.dtype)
    rising = step * warmup**-1.5
    return 16.0 * jnp.minimum(step**-0.5, rising)


def transformer_schedule_fixed(step):
    warmup = jnp.asarray(16000.0, step.dtype)
    rising = step / warmup * warmup**-0.5
    return 16.0 * jnp.minimum(step**-0.5, rising)


@failing(
    "https://arxiv.org/abs/2305.14342", "fp16", "underflow nan overflow",
    "return jnp.clip(momentum / jnp.maximum(0.01 * curvature, 1e-12), -1.0, 1.0)",
    args=lambda: (normal(16, scale=1e-3) * (jnp.arange(16) != 4), uniform(16, high=1e-2)
                  * (jnp.arange(16) != 4)),
)  # fmt: skip
def clipped_by_curvature(momentum, curvature):
    return jnp.clip(momentum / jnp.maximum(0.01 * curvature, 1e-12), -1.0, 1.0)


@failing(
    "https://github.com/pytorch/pytorch/issues/64966", "bf16", "swamping precision",
    "return average + (weights - average) / (seen + 1.0)",
    args=lambda: (1.0 + 0.125 * jnp.arange(8.0) / 8.0, 1.25 + 0.125 * jnp.arange(8.0),
                  jnp.float32(340.0)),
    change=True, limit=0.2,
)  # fmt: skip
def stochastic_weight_average(average, weights, seen):
    return average + (weights - average) / (seen + 1.0)


@failing(
    "https://github.com/google-deepmind/jax_privacy/issues/14", "fp16", "overflow",
    "size = jnp.sqrt(jnp.sum(gradient**2))",
    args=lambda: (normal(8, 4), normal(16, 8, seed=1, scale=16.0),
                  normal(16, 4, seed=2, scale=16.0)),
)  # fmt: skip
def private_gradients(w, x, y):
    """Gradients of single examples, each clipped, and their mean."""

    def clipped(x, y):
        gradient = jax.grad(lambda w: 0.5 * jnp.sum((x @ w - y) ** 2))(w)
        size = jnp.sqrt(jnp.sum(gradient**2))
        return gradient / jnp.maximum(size, 1.0)

    return jnp.mean(jax.vmap(clipped)(x, y), axis=0)


@failing(
    "https://github.com/davda54/sam/issues/7", "fp16", "underflow nan overflow",
    "uphill = 0.05 * gradient / (jnp.sqrt(jnp.sum(gradient**2)) + 1e-12)",
    args=lambda: (normal(8, 4, scale=0.2), normal(32, 8, seed=1, scale=0.04),
                  normal(32, 4, seed=2, scale=0.04)),
)  # fmt: skip
def sharpness_aware(w, x, y):
    """Two gradients of a step, the second at the worst neighbour of the weights."""
    slope = jax.grad(lambda w: 0.01 * jnp.mean((x @ w - y) ** 2))
    gradient = slope(w)
    uphill = 0.05 * gradient / (jnp.sqrt(jnp.sum(gradient**2)) + 1e-12)
    return uphill


@failing(
    "https://github.com/GMvandeVen/continual-learning/issues/21", "fp16", "underflow",
    "importance = gradients**2", "return 0.5 * 30000.0 * jnp.sum(importance * (w - before) ** 2)",
    args=lambda: (normal(64, seed=1), normal(64), normal(64, seed=2, scale=1.5e-4)),
)  # fmt: skip
def elastic_penalty(w, before, gradients):
    importance = gradients**2
    return 0.5 * 30000.0 * jnp.sum(importance * (w - before) ** 2)


def elastic_penalty_fixed(w, before, gradients):
    return 0.5 * jnp.sum((173.20508 * gradients * (w - before)) ** 2)


@failing(
    "https://github.com/google-deepmind/optax/issues/577", "fp16", "underflow nan overflow",
    "updates, _ = optimizer.update(gradient, optimizer.init(w), w)",
    args=lambda: (normal(8, 8), normal(8, 8, seed=1, scale=2e-4)),
)  # fmt: skip
def layerwise_rates(w, gradient):
    """LARS, of gradients whose squares are below the smallest float16."""
    optimizer = optax.lars(1.0, weight_decay=0.0)
    updates, _ = optimizer.update(gradient, optimizer.init(w), w)
    return updates


@failing(
    "https://github.com/google-deepmind/optax/issues/377", "bf16", "swamping precision",
    "return optax.incremental_update(online, target, 0.002)",
    args=lambda: (1.0 + 0.25 * uniform(16), 1.0 + 0.25 * uniform(16, seed=1)), steps=50,
    change=True,
)  # fmt: skip
def polyak_target(target, online):
    return optax.incremental_update(online, target, 0.002)


@failing(
    "https://github.com/google-deepmind/optax/issues/1014", "bf16", "swamping precision",
    "second = 0.9999 * second + 0.0001 * gradient**2",
    args=lambda: (jnp.full(32, 0.25), normal(400, 32)), change=True,
)  # fmt: skip
def slow_second_moment(second, gradients):
    def body(second, gradient):
        second = 0.9999 * second + 0.0001 * gradient**2
        return second, None

    return jax.lax.scan(body, second, gradients)[0]


@failing(
    "https://github.com/facebookresearch/schedule_free/issues/40", "bf16", "swamping precision",
    "average = (1.0 - share) * average + share * fast",
    args=lambda: (1.0 + uniform(16), 0.01 * normal(300, 16, mean=1.0)), change=True, limit=0.15,
)  # fmt: skip
def schedule_free_average(w, gradients):
    """The average of iterates that is evaluated, its share falling with the step."""

    def body(carry, gradient):
        fast, average, step = carry
        fast = fast - 0.5 * gradient
        share = 1.0 / (step + 1.0)
        average = (1.0 - share) * average + share * fast
        return (fast, average, step + 1.0), None

    start = w, w, jnp.ones((), w.dtype)
    return jax.lax.scan(body, start, gradients)[0][1]
