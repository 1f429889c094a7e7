"""Losses that compare: contrastive, ranking, quantile, survival and information losses."""

import jax
import jax.numpy as jnp

from failures.programs import failing, integers, normal, uniform


@failing(
    "https://arxiv.org/abs/1907.06902", "fp16", "overflow nan",
    "z = (observed - mean) / spread", "return jnp.mean(spread * (z * (2.0 * below - 1.0)",
    args=lambda: (normal(32, scale=100.0), normal(32, seed=1), jnp.full(32, 5e-4)),
)  # fmt: skip
def ranked_probability_score(observed, mean, spread):
    """The continuous ranked probability score of sharp normal forecasts."""
    z = (observed - mean) / spread
    below = 0.5 * (1.0 + jax.lax.erf(z / 1.4142135))
    density = jnp.exp(-0.5 * jnp.minimum(jnp.abs(z), 10.0) ** 2) / 2.5066283
    return jnp.mean(spread * (z * (2.0 * below - 1.0) + 2.0 * density - 0.5641896))


def ranked_probability_score_fixed(observed, mean, spread):
    away = observed - mean
    sign = jnp.sign(away)
    density = jnp.where(jnp.abs(away) < 10.0 * spread, 1.0, 0.0) * 0.4
    return jnp.mean(away * sign + spread * (2.0 * density - 0.5641896))


@failing(
    "https://github.com/adambielski/siamese-triplet/issues/25", "fp16", "underflow nan overflow",
    "return jnp.sqrt(jnp.sum((a - b) ** 2, axis=-1) + 1e-12)",
    args=lambda: (repeated_images(),),
)  # fmt: skip
def triplet_gradient(embedded):
    """The gradient of a margin loss where an anchor is its own positive."""

    def distance(a, b):
        return jnp.sqrt(jnp.sum((a - b) ** 2, axis=-1) + 1e-12)

    def loss(embedded):
        anchor, positive, negative = embedded
        margin = 0.5 + distance(anchor, positive) - distance(anchor, negative)
        return jnp.mean(jax.nn.relu(margin))

    return jax.grad(loss)(embedded)


def repeated_images():
    embedded = normal(3, 16, 8, scale=0.4)
    embedded[1, 3] = embedded[0, 3]
    embedded[2, 3] = embedded[0, 3] + 0.02
    return embedded


@failing(
    "https://github.com/HobbitLong/SupContrast/issues/104", "fp16", "underflow nan overflow",
    "others = jnp.sum(jnp.exp(logits) * away, axis=-1)",
    "return -jnp.mean(jnp.diag(logits) - jnp.log(others + 1e-10))",
    args=lambda: (distant_views(0), distant_views(1)),
)  # fmt: skip
def decoupled_contrast(first, second):
    """The positive pair is left out of the denominator; logits are shifted by the largest."""
    logits = first @ second.T / 0.05
    logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    away = 1.0 - jnp.eye(8, dtype=first.dtype)
    others = jnp.sum(jnp.exp(logits) * away, axis=-1)
    return -jnp.mean(jnp.diag(logits) - jnp.log(others + 1e-10))


def distant_views(seed):
    x = 0.02 * normal(8, 8, seed=seed) + 1.2 * jnp.eye(8)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def decoupled_contrast_fixed(first, second):
    logits = first @ second.T / 0.05
    away = ~jnp.eye(8, dtype=bool)
    others = jax.nn.logsumexp(logits, axis=-1, where=away)
    return -jnp.mean(jnp.diag(logits) - others)


@failing(
    "https://github.com/facebookresearch/barlowtwins/issues/7", "fp16", "overflow",
    "correlation = first.T @ second", "off = correlation / 128.0 * (1.0 - jnp.eye(8",
    args=lambda: (normal(128, 8, scale=40.0), normal(128, 8, scale=40.0)),
)  # fmt: skip
def redundancy(first, second):
    correlation = first.T @ second
    off = correlation / 128.0 * (1.0 - jnp.eye(8, dtype=first.dtype)) / 1600.0
    return jnp.sum(off**2)


def redundancy_fixed(first, second):
    correlation = (first / 128.0).T @ second
    off = correlation * (1.0 - jnp.eye(8, dtype=first.dtype)) / 1600.0
    return jnp.sum(off**2)


@failing(
    "https://github.com/deepinsight/insightface/issues/1126", "bf16",
    "cancellation nan overflow precision",
    "sine = jnp.sqrt(1.0 - cosine**2)", "cosine = jnp.sum(face * centre, axis=-1)",
    "x = x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True))",
    args=lambda: (normal(16, 8), normal(16, 8) + 0.02 * normal(16, 8, seed=1)),
)  # fmt: skip
def angular_margin(face, centre):
    """The angle's sine of ArcFace for faces close to their centres."""

    def unit(x):
        x = x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True))
        return x

    face, centre = unit(face), unit(centre)
    cosine = jnp.sum(face * centre, axis=-1)
    sine = jnp.sqrt(1.0 - cosine**2)
    return 0.479 * sine


@failing(
    "https://github.com/keras-team/keras/issues/11087", "fp16", "overflow",
    "return jnp.mean(jnp.log(jnp.cosh(predicted - target)))",
    args=lambda: (normal(64, scale=8.0), normal(64, seed=1, scale=8.0)),
)  # fmt: skip
def log_cosh(predicted, target):
    return jnp.mean(jnp.log(jnp.cosh(predicted - target)))


def log_cosh_fixed(predicted, target):
    away = jnp.abs(predicted - target)
    return jnp.mean(away + jax.nn.softplus(-2.0 * away) - 0.6931472)


@failing(
    "https://github.com/pytorch/pytorch/issues/75197", "bf16", "cancellation precision",
    "stirling = target * jnp.log(target) - target", "fit = rate - target * jnp.log(rate)",
    "return jnp.mean(fit + stirling)",
    args=lambda: (400.0 + 2.0 * integers(64, high=40), 400.0 + 2.0 * integers(64, seed=1, high=40)),
)  # fmt: skip
def poisson_deviance(rate, target):
    """The Poisson loss less that of a perfect fit, of large counts."""
    stirling = target * jnp.log(target) - target
    fit = rate - target * jnp.log(rate)
    return jnp.mean(fit + stirling)


def poisson_deviance_fixed(rate, target):
    away = (rate - target) / target
    return jnp.mean(target * (0.5 * away**2 - away**3 / 3.0 + 0.25 * away**4))


@failing(
    "https://github.com/havakv/pycox/issues/27", "fp16", "overflow",
    "at_risk = jnp.cumsum(jnp.exp(risk))", "return -jnp.mean(events * (risk - jnp.log(at_risk)))",
    args=lambda: (normal(64, scale=2.0, mean=9.0), 1.0 * integers(64, high=2)),
)  # fmt: skip
def partial_likelihood(risk, events):
    at_risk = jnp.cumsum(jnp.exp(risk))
    return -jnp.mean(events * (risk - jnp.log(at_risk)))


def partial_likelihood_fixed(risk, events):
    return -jnp.mean(events * (risk - jax.lax.cumlogsumexp(risk)))


@failing(
    "https://github.com/huggingface/evaluate/issues/241", "fp16", "overflow",
    "likelihood = jnp.exp(jnp.sum(losses) / 8.0)", "return likelihood ** (8.0 / losses.size)",
    args=lambda: (uniform(128, low=1.0, high=4.0),),
)  # fmt: skip
def corpus_perplexity(losses):
    likelihood = jnp.exp(jnp.sum(losses) / 8.0)
    return likelihood ** (8.0 / losses.size)


def corpus_perplexity_fixed(losses):
    return jnp.exp(jnp.mean(losses))


@failing(
    "https://github.com/mjpost/sacrebleu/issues/141", "fp16", "underflow",
    "return jnp.prod(precisions, axis=-1) ** 0.0625",
    args=lambda: (uniform(24, 16, low=0.05, high=0.6),),
)  # fmt: skip
def geometric_score(precisions):
    return jnp.prod(precisions, axis=-1) ** 0.0625


def geometric_score_fixed(precisions):
    return jnp.exp(jnp.mean(jnp.log(precisions), axis=-1))


@failing(
    "https://github.com/caogang/wgan-gp/issues/48", "fp16", "underflow nan overflow",
    "size = jnp.sqrt(jnp.sum(slopes**2, axis=-1) + 1e-12)",
    args=lambda: ({"in": normal(8, 16, scale=0.02), "out": normal(16, seed=1, scale=0.002)},
                  normal(12, 8, seed=2)),
)  # fmt: skip
def gradient_penalty(params, x):
    """The gradient of a critic's penalty, where the critic is nearly flat."""

    def critic(params, x):
        return jnp.tanh(x @ params["in"]) @ params["out"]

    def penalty(params):
        slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, x)
        size = jnp.sqrt(jnp.sum(slopes**2, axis=-1) + 1e-12)
        return jnp.mean((size - 1.0) ** 2)

    return jax.grad(penalty)(params)["out"]


@failing(
    "https://github.com/Kaixhin/Rainbow/issues/73", "fp16", "underflow nan overflow",
    "p, q = jax.nn.softmax(first), jax.nn.softmax(second)", "mixture = 0.5 * (p + q)",
    "return jnp.mean(jnp.sum(p * jnp.log(p / mixture)",
    args=lambda: (normal(12, 10, scale=6.0), normal(12, 10, seed=1, scale=6.0)),
)  # fmt: skip
def shannon_divergence(first, second):
    p, q = jax.nn.softmax(first), jax.nn.softmax(second)
    mixture = 0.5 * (p + q)
    return jnp.mean(jnp.sum(p * jnp.log(p / mixture) + q * jnp.log(q / mixture), axis=-1))


def shannon_divergence_fixed(first, second):
    p, q = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
    mixture = jnp.logaddexp(p, q) - 0.6931472
    return jnp.mean(jnp.sum(jnp.exp(p) * (p - mixture) + jnp.exp(q) * (q - mixture), axis=-1))
