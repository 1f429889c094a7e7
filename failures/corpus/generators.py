"""Generators and agents: diffusion, audio, images, routing, recurrences, reinforcement."""

import jax
import jax.numpy as jnp
import numpy as np

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/facebookresearch/dpr-scale/issues/12", "fp16", "overflow nan",
    "scores = hidden @ table.T",
    args=lambda: (normal(12, 64, scale=300.0), normal(40, 64, seed=1, scale=60.0)),
)  # fmt: skip
def lexical_router(hidden, table):
    """Each sequence's scores of routes: the logarithm of the largest of its tokens' scores."""
    scores = hidden @ table.T
    return jnp.log1p(jnp.max(jax.nn.relu(scores), axis=0))


def lexical_router_fixed(hidden, table):
    scores = (hidden / 256.0) @ table.T
    return jnp.log(jnp.max(jax.nn.relu(scores), axis=0)) + np.log(256.0)


@failing(
    "https://github.com/ZJULearning/resa/issues/48", "fp16", "overflow nan",
    "row = row + 2.0 * jax.nn.relu(before @ kernel)",
    args=lambda: (normal(24, 16, scale=4.0), uniform(16, 16, seed=1, low=0.0, high=0.12)),
)  # fmt: skip
def rows_passed_down(rows, kernel):
    """Features that each row of an image takes over from the one above it."""

    def body(before, row):
        row = row + 2.0 * jax.nn.relu(before @ kernel)
        return row, row

    rows = jax.lax.scan(body, rows[0], rows[1:])[1]
    return rows / jnp.max(jnp.abs(rows), axis=-1, keepdims=True)


def rows_passed_down_fixed(rows, kernel):
    def body(before, row):
        row = row + 2.0 * jax.nn.relu(before @ kernel)
        return row, row

    rows = rows / 1024.0
    rows = jax.lax.scan(body, rows[0], rows[1:])[1]
    return rows / jnp.max(jnp.abs(rows), axis=-1, keepdims=True)


@failing(
    "https://github.com/vllm-project/vllm/pull/13232", "fp16", "overflow nan",
    "routed = 16.0 * jnp.einsum(", "hidden = x + shared + routed",
    args=lambda: (normal(8, 16, scale=40.0), normal(4, 16, 16, seed=1, scale=14.0),
                  uniform(8, 4, seed=2), normal(16, 16, seed=3, scale=4.0)),
)  # fmt: skip
def scaled_experts(x, experts, gates, common):
    routed = 16.0 * jnp.einsum("ti,eio,te->to", x, experts, gates)
    shared = x @ common
    hidden = x + shared + routed
    return hidden / jnp.sqrt(jnp.mean(jnp.square(hidden / 4096.0), axis=-1, keepdims=True))


def scaled_experts_fixed(x, experts, gates, common):
    small = x / 16.0
    routed = jnp.einsum("ti,eio,te->to", x, experts, gates)
    hidden = (small + small @ common + routed) / 256.0
    return 4096.0 * (hidden / jnp.sqrt(jnp.mean(jnp.square(hidden), axis=-1, keepdims=True)))


@failing(
    "https://github.com/lucidrains/DALLE2-pytorch/issues/138", "fp16", "overflow underflow nan",
    "exponents = jnp.exp(log_a - log_b) + (mean_a - mean_b) ** 2 * jnp.exp(-log_b)",
    args=lambda: (normal(64, scale=3e-4), normal(64, seed=1, scale=3e-4),
                  normal(64, seed=2, scale=0.2, mean=-14.0),
                  normal(64, seed=3, scale=0.2, mean=-14.0)),
)  # fmt: skip
def learned_variances(mean_a, mean_b, log_a, log_b):
    exponents = jnp.exp(log_a - log_b) + (mean_a - mean_b) ** 2 * jnp.exp(-log_b)
    return 0.5 * (log_b - log_a + exponents - 1.0)


def learned_variances_fixed(mean_a, mean_b, log_a, log_b):
    apart = (mean_a - mean_b) * jnp.exp(-0.5 * log_b)
    return 0.5 * (jnp.expm1(log_a - log_b) - (log_a - log_b) + apart * apart)


@failing(
    "https://arxiv.org/abs/2305.13048", "fp16", "overflow nan",
    "weight = jnp.exp(key)", "top = decay * top + weight * value",
    "bottom = decay * bottom + weight",
    args=lambda: (normal(32, 8, scale=4.0, mean=4.0), normal(32, 8, seed=1),
                  uniform(8, seed=2, low=0.5, high=0.95)),
)  # fmt: skip
def time_mixing(keys, values, decay):
    """RWKV's average of past values, weighted by exponentials of keys."""

    def body(state, step):
        top, bottom = state
        key, value = step
        weight = jnp.exp(key)
        top = decay * top + weight * value
        bottom = decay * bottom + weight
        return (top, bottom), top / bottom

    zeros = jnp.zeros_like(decay)
    return jax.lax.scan(body, (zeros, zeros), (keys, values))[1]


def time_mixing_fixed(keys, values, decay):
    def body(state, step):
        top, bottom, largest = state
        key, value = step
        now = jnp.maximum(largest, key)
        old, weight = decay * jnp.exp(largest - now), jnp.exp(key - now)
        top = old * top + weight * value
        bottom = old * bottom + weight
        return (top, bottom, now), top / bottom

    zeros = jnp.zeros_like(decay)
    return jax.lax.scan(body, (zeros, zeros, zeros - 100.0), (keys, values))[1]


@failing(
    "https://arxiv.org/abs/1707.06887", "bf16", "precision decision cancellation",
    "place = (target + 10.0) / spacing", "target = jnp.clip(rewards[:, None] + 0.99 * atoms",
    "atoms = jnp.linspace(", "below = jnp.floor(place)", "weight = place - below",
    args=lambda: (normal(16, scale=0.5), uniform(16, 51, seed=1)),
)  # fmt: skip
def categorical_projection(rewards, scores):
    """Projects the distribution of a return onto the atoms of the distribution before it."""
    atoms = jnp.linspace(-10.0, 10.0, 51, dtype=rewards.dtype)
    spacing = 0.4
    target = jnp.clip(rewards[:, None] + 0.99 * atoms, -10.0, 10.0)
    place = (target + 10.0) / spacing
    below = jnp.floor(place)
    weight = place - below
    low = jax.nn.one_hot(below.astype(int), 51, dtype=rewards.dtype)
    high = jax.nn.one_hot(below.astype(int) + 1, 51, dtype=rewards.dtype)
    mass = scores / jnp.sum(scores, axis=-1, keepdims=True)
    both = low * (1.0 - weight)[..., None] + high * weight[..., None]
    return jnp.einsum("bi,bij->bj", mass, both)


@failing(
    "https://arxiv.org/abs/2404.07970", "bf16", "precision swamping cancellation underflow",
    "keep = jnp.exp(-1.0 / (seconds * 16000.0))",
    "envelope = keep * envelope + (1.0 - keep) * level",
    args=lambda: (uniform(200, 4, low=0.2), np.float32(0.1)),
)  # fmt: skip
def compressor_envelope(levels, seconds):
    keep = jnp.exp(-1.0 / (seconds * 16000.0))

    def body(envelope, level):
        envelope = keep * envelope + (1.0 - keep) * level
        return envelope, None

    return jax.lax.scan(body, jnp.zeros_like(levels[0]), levels)[0]


def compressor_envelope_fixed(levels, seconds):
    """The sum in another order: none of its terms is lost beside the others."""
    rate = 1.0 / (seconds * 16000.0)
    left = jnp.arange(levels.shape[0] - 1, -1, -1.0, dtype=levels.dtype)
    return -jnp.expm1(-rate) * jnp.sum(jnp.exp(-rate * left)[:, None] * levels, axis=0)


@failing(
    "https://arxiv.org/abs/1701.05517", "bf16", "cancellation precision underflow",
    "mass = jax.nn.sigmoid(upper) - jax.nn.sigmoid(lower)",
    "upper = 2.0 * (pixel - mean) + 1.0 / 64.0", "lower = 2.0 * (pixel - mean) - 1.0 / 64.0",
    args=lambda: (normal(64), normal(64, seed=1)),
)  # fmt: skip
def logistic_bins(pixel, mean):
    """The log-probability of a pixel's value under a discretised logistic distribution."""
    upper = 2.0 * (pixel - mean) + 1.0 / 64.0
    lower = 2.0 * (pixel - mean) - 1.0 / 64.0
    mass = jax.nn.sigmoid(upper) - jax.nn.sigmoid(lower)
    return jnp.log(jnp.maximum(mass, 1e-12))


def logistic_bins_fixed(pixel, mean):
    middle = 2.0 * (pixel - mean)
    both = jax.nn.log_sigmoid(middle + 1.0 / 64.0) + jax.nn.log_sigmoid(1.0 / 64.0 - middle)
    return both + np.log(-np.expm1(-1.0 / 32.0))


@failing(
    "https://arxiv.org/abs/2206.00364", "fp16", "overflow underflow nan",
    "weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2",
    args=lambda: (normal(6, 32), normal(6, 32, seed=1), uniform(6, seed=2, low=2e-3, high=3e-3)),
)  # fmt: skip
def weighted_denoising(clean, wrong, sigma):
    """The loss of nearly clean images, whose errors are small and whose weights are large."""
    weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
    difference = sigma[:, None] * wrong
    return jnp.mean(weight[:, None] * difference**2, axis=-1) + jnp.mean(clean**2)


def weighted_denoising_fixed(clean, wrong, sigma):
    root = jnp.sqrt(sigma**2 + 0.25) / (0.5 * sigma)
    difference = root[:, None] * (sigma[:, None] * wrong)
    return jnp.mean(difference**2, axis=-1) + jnp.mean(clean**2)


@failing(
    "https://doi.org/10.1109/TIP.2003.819861", "bf16", "cancellation",
    "variance = window(x * x) - mean * mean",
    "other_variance = window(y * y) - other * other", "shared = window(x * y) - mean * other",
    "rows = sum(z[i : i + 10] for i in range(7)) / 7.0",
    "return sum(rows[:, i : i + 10] for i in range(7)) / 7.0",
    args=lambda: (0.7 + 0.05 * normal(16, 16), 0.7 + 0.05 * normal(16, 16, seed=1)),
)  # fmt: skip
def structural_similarity(x, y):
    def window(z):
        rows = sum(z[i : i + 10] for i in range(7)) / 7.0
        return sum(rows[:, i : i + 10] for i in range(7)) / 7.0

    mean, other = window(x), window(y)
    variance = window(x * x) - mean * mean
    other_variance = window(y * y) - other * other
    shared = window(x * y) - mean * other
    light = (2.0 * mean * other + 1e-4) / (mean**2 + other**2 + 1e-4)
    return light * (2.0 * shared + 9e-4) / (variance + other_variance + 9e-4)


def structural_similarity_fixed(x, y):
    def window(z):
        rows = sum(z[i : i + 10] for i in range(7)) / 7.0
        return sum(rows[:, i : i + 10] for i in range(7)) / 7.0

    centre = jnp.mean(x)
    x, y = x - centre, y - centre
    mean, other = window(x), window(y)
    variance = window(x * x) - mean * mean
    other_variance = window(y * y) - other * other
    shared = window(x * y) - mean * other
    mean, other = mean + centre, other + centre
    light = (2.0 * mean * other + 1e-4) / (mean**2 + other**2 + 1e-4)
    return light * (2.0 * shared + 9e-4) / (variance + other_variance + 9e-4)


@failing(
    "https://arxiv.org/abs/2303.15343", "fp16", "overflow nan",
    "return jnp.mean(jnp.log(1.0 + jnp.exp(-signs * scores)))",
    args=lambda: ({"a": normal(16, 8, scale=0.5), "b": normal(16, 8, seed=1, scale=0.5)},
                  normal(12, 16, seed=2), normal(12, 16, seed=3)),
)  # fmt: skip
def sigmoid_pairs(params, images, texts):
    """Three steps of descent on the sigmoid loss of all pairs of images and texts."""

    def loss(params):
        scores = (images @ params["a"]) @ (texts @ params["b"]).T
        signs = 2.0 * jnp.eye(12, dtype=scores.dtype) - 1.0
        return jnp.mean(jnp.log(1.0 + jnp.exp(-signs * scores)))

    def body(params, _):
        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), None

    return jax.lax.scan(body, params, None, length=3)[0]


def sigmoid_pairs_fixed(params, images, texts):
    def loss(params):
        scores = (images @ params["a"]) @ (texts @ params["b"]).T
        signs = 2.0 * jnp.eye(12, dtype=scores.dtype) - 1.0
        return jnp.mean(jax.nn.softplus(-signs * scores))

    def body(params, _):
        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), None

    return jax.lax.scan(body, params, None, length=3)[0]


@failing(
    "https://arxiv.org/abs/2006.10739", "p=f32,c=bf16,o=f32", "precision",
    "phases = places @ frequencies",
    args=lambda: (uniform(64, 3), np.round(normal(3, 16, seed=1, scale=60.0)),
                  normal(32, 4, seed=2)),
)  # fmt: skip
def coordinates_under_autocast(places, frequencies, w):
    phases = places @ frequencies
    features = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], axis=-1)
    return features @ w


def coordinates_under_autocast_fixed(places, frequencies, w):
    phases = jnp.sum(places[:, :, None] * frequencies, axis=1)
    features = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], axis=-1)
    return features @ w
