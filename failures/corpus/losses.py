"""Losses and their gradients."""

import jax
import jax.numpy as jnp
import optax

from failures.programs import failing, integers, normal, uniform


@failing(
    "https://github.com/lightonai/pylate/issues/239", "fp16", "underflow nan overflow",
    "- low + 1e-8)",
    args=lambda: (jnp.concatenate([uniform(3, 4, low=0.2), jnp.full((1, 4), 0.5)]),
                  normal(4, 4, seed=1)),
)  # fmt: skip
def distillation_scores(teacher, student):
    low, high = (f(teacher, axis=-1, keepdims=True) for f in (jnp.min, jnp.max))
    scores = (teacher - low) / (high - low + 1e-8)
    return optax.kl_divergence(jax.nn.log_softmax(student), jax.nn.softmax(scores))


def distillation_scores_fixed(teacher, student):
    low, high = (f(teacher, axis=-1, keepdims=True) for f in (jnp.min, jnp.max))
    scores = (teacher - low) / (high - low + 1e-4)
    return optax.kl_divergence(jax.nn.log_softmax(student), jax.nn.softmax(scores))


@failing(
    "https://github.com/fastino-ai/GLiNER2/pull/155", "bf16", "precision nan overflow",
    "1.0 - 1e-6",
    args=lambda: (saturated_logits(),),
)  # fmt: skip
def marginal_consistency(logits):
    """The gradient of a loss of the probability that none of the pairs holds."""

    def loss(logits):
        probabilities = jnp.minimum(jax.nn.sigmoid(logits), 1.0 - 1e-6)
        survival = jnp.sum(jnp.log1p(-probabilities), axis=-1)
        return jnp.mean((jnp.exp(survival) - 0.5) ** 2)

    return jax.grad(loss)(logits)


def marginal_consistency_fixed(logits):
    def loss(logits):
        survival = jnp.sum(jax.nn.log_sigmoid(-logits), axis=-1)
        return jnp.mean((jnp.exp(survival) - 0.5) ** 2)

    return jax.grad(loss)(logits)


def saturated_logits():
    logits = normal(4, 3)
    logits[0, 0] = 9.0
    return logits


@failing(
    "https://github.com/PaddlePaddle/models/issues/2909", "fp16", "underflow overflow nan",
    "probabilities = jax.nn.softmax(logits)", "-jnp.log(",
    args=lambda: (separated_logits(), integers(6, seed=4, high=8)),
)  # fmt: skip
def softmax_then_log(logits, labels):
    probabilities = jax.nn.softmax(logits)
    picked = jnp.take_along_axis(probabilities, labels[:, None], axis=-1)
    return jnp.mean(-jnp.log(picked))


def softmax_then_log_fixed(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def separated_logits():
    logits = normal(6, 8, scale=2.0)
    logits[:, 0] += 22.0
    return logits


@failing(
    "https://github.com/huggingface/transformers/issues/10674", "fp16", "overflow",
    "smooth = jnp.sum(-logs",
    args=lambda: (normal(2, 8192, scale=3.0), integers(2, high=8192)),
)  # fmt: skip
def label_smoother(logits, labels):
    logs = jax.nn.log_softmax(logits)
    picked = -jnp.take_along_axis(logs, labels[:, None], axis=-1)
    smooth = jnp.sum(-logs, axis=-1, keepdims=True)
    return 0.9 * picked + 0.1 * smooth / logits.shape[-1]


def label_smoother_fixed(logits, labels):
    logs = jax.nn.log_softmax(logits)
    picked = -jnp.take_along_axis(logs, labels[:, None], axis=-1)
    return 0.9 * picked + jnp.sum(logs * (-0.1 / logits.shape[-1]), axis=-1, keepdims=True)


@failing(
    "https://github.com/tracel-ai/burn/issues/5373", "fp16", "overflow",
    "jnp.exp(-beta * labels * logits)",
    args=lambda: (normal(16, scale=6.0), jnp.sign(normal(16, seed=1))),
)  # fmt: skip
def soft_margin(logits, labels, beta=4.0):
    return jnp.mean(jnp.log(1.0 + jnp.exp(-beta * labels * logits))) / beta


def soft_margin_fixed(logits, labels, beta=4.0):
    return jnp.mean(jax.nn.softplus(-beta * labels * logits)) / beta


@failing(
    "https://github.com/unslothai/unsloth-zoo/pull/830", "fp16", "underflow nan overflow",
    "jnp.maximum(-jnp.expm1(logp), 1e-12)",
    args=lambda: (jnp.float32([-1.1, -0.4, -3.0]), jnp.float32([-0.7, -2.0, 0.0])),
)  # fmt: skip
def odds_ratio(chosen, rejected):
    def odds(logp):
        return logp - jnp.log(jnp.maximum(-jnp.expm1(logp), 1e-12))

    return -jnp.mean(jax.nn.log_sigmoid(odds(chosen) - odds(rejected)))


@failing(
    "https://github.com/huggingface/trl/pull/1491", "bf16", "cancellation precision",
    "jnp.log(1.0 - jnp.exp(logp))",
    args=lambda: (jnp.float32([-9.0, -8.0, -10.5]), jnp.float32([-7.0, -9.5, -8.5])),
)  # fmt: skip
def log_of_complements(chosen, rejected):
    def complement(logp):
        return jnp.log(1.0 - jnp.exp(logp))

    return jnp.stack([complement(chosen), complement(rejected)])


def log_of_complements_fixed(chosen, rejected):
    return jnp.stack([jnp.log1p(-jnp.exp(chosen)), jnp.log1p(-jnp.exp(rejected))])


@failing(
    "https://github.com/google-deepmind/optax/issues/1020", "bf16", "precision cancellation",
    "jax.nn.logsumexp(logits, axis=-1) - picked",
    args=lambda: (confident_logits(), jnp.zeros(8, jnp.int32)),
)  # fmt: skip
def confident_cross_entropy(logits, labels):
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def confident_cross_entropy_fixed(logits, labels):
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    others = jnp.where(
        jnp.arange(logits.shape[-1]) == labels[:, None], 0.0, jnp.exp(logits - picked)
    )
    return jnp.mean(jnp.log1p(jnp.sum(others, axis=-1)))


def confident_logits():
    logits = normal(8, 32)
    logits[:, 0] = 10.0
    return logits


@failing(
    "https://github.com/open-mmlab/mmagic/issues/1340", "fp16", "overflow",
    "squared = error * error", "jnp.sum(squared)",
    args=lambda: (uniform(32, 32, high=255.0), uniform(32, 32, seed=1, high=255.0)),
)  # fmt: skip
def peak_signal_to_noise(image, decoded):
    error = image - decoded
    squared = error * error
    mean = jnp.sum(squared) / image.size
    return 20.0 * jnp.log10(255.0) - 10.0 * jnp.log10(mean)


def peak_signal_to_noise_fixed(image, decoded):
    error = (image - decoded) / 255.0
    return -10.0 * jnp.log10(jnp.mean(error * error))
