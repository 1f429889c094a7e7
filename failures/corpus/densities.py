"""Densities, samples and losses of probabilistic models."""

import jax
import jax.numpy as jnp

from failures.programs import failing, integers, normal, uniform


@failing(
    "https://github.com/pytorch/pytorch/issues/41663", "fp16", "underflow nan overflow",
    "inner = -jnp.log(noise + 1e-20)", "gumbels = -jnp.log(inner + 1e-20)",
    args=lambda: (normal(8, 32), noise_with_ends()),
)  # fmt: skip
def relaxed_choice(logits, noise):
    """A sample of the Gumbel softmax, with noise that can be 0 and 1."""
    inner = -jnp.log(noise + 1e-20)
    gumbels = -jnp.log(inner + 1e-20)
    return jax.nn.softmax((logits + gumbels) / 20.0)


def noise_with_ends():
    noise = uniform(8, 32, seed=1, low=0.01, high=0.99)
    noise[0, 3], noise[5, 7] = 0.0, 1.0
    return noise


def relaxed_choice_fixed(logits, noise):
    """Both offsets as the logarithm that they lead to."""
    inner = jnp.where(noise > 0.0, -jnp.log(jnp.maximum(noise, 1e-4)), 46.05)
    gumbels = jnp.where(inner > 0.0, -jnp.log(jnp.where(inner > 0.0, inner, 1.0)), 46.05)
    return jax.nn.softmax((logits + gumbels) / 20.0)


@failing(
    "https://github.com/pyro-ppl/numpyro/issues/563", "bf16", "cancellation",
    "ratio = gammaln(count + rate) - gammaln(rate) - gammaln(count + 1.0)",
    args=lambda: (jnp.round(uniform(64, low=5.0, high=40.0)), uniform(64, seed=1, low=200.0,
                                                                      high=400.0)),
)  # fmt: skip
def overdispersed_reads(count, rate):
    gammaln = jax.scipy.special.gammaln
    ratio = gammaln(count + rate) - gammaln(rate) - gammaln(count + 1.0)
    share = rate / (rate + 20.0)
    return ratio + rate * jnp.log(share) + count * jnp.log1p(-share)


@failing(
    "https://arxiv.org/abs/1306.0895", "fp16", "underflow nan overflow",
    "kernel = jnp.exp(-cost / 0.02)", "left = (1.0 / 12.0) / (kernel @ right)",
    "right = (1.0 / 12.0) / (kernel.T @ left)", "return left[:, None] * kernel * right",
    args=lambda: (uniform(12, 12, low=0.3, high=0.9),),
)  # fmt: skip
def optimal_transport(cost):
    kernel = jnp.exp(-cost / 0.02)
    right = jnp.ones(cost.shape[1], cost.dtype)
    for _ in range(4):
        left = (1.0 / 12.0) / (kernel @ right)
        right = (1.0 / 12.0) / (kernel.T @ left)
    return left[:, None] * kernel * right


def optimal_transport_fixed(cost):
    scores = -cost / 0.02
    right = jnp.zeros(cost.shape[1], cost.dtype)
    for _ in range(4):
        left = -jax.nn.logsumexp(scores + right, axis=1) - jnp.log(12.0)
        right = -jax.nn.logsumexp(scores + left[:, None], axis=0) - jnp.log(12.0)
    return jnp.exp(scores + left[:, None] + right)


@failing(
    "http://joschu.net/blog/kl-approx.html", "bf16", "cancellation precision",
    "return jnp.mean((ratio - 1.0) - log_ratio)", "ratio = jnp.exp(log_ratio)",
    args=lambda: (normal(64, scale=0.02),),
)  # fmt: skip
def divergence_estimate(log_ratio):
    ratio = jnp.exp(log_ratio)
    return jnp.mean((ratio - 1.0) - log_ratio)


@failing(
    "https://github.com/qubvel-org/segmentation_models.pytorch/issues/463", "fp16", "overflow",
    "overlap = jnp.sum(predicted * target)", "whole = jnp.sum(predicted + target)",
    "return 1.0 - (2.0 * overlap + 1.0) / (whole + 1.0)",
    args=lambda: (uniform(300, 300, low=0.6), 1.0 * (uniform(300, 300, seed=1) < 0.9)),
)  # fmt: skip
def overlap_of_masks(predicted, target):
    """The Dice loss of one large image."""
    overlap = jnp.sum(predicted * target)
    whole = jnp.sum(predicted + target)
    return 1.0 - (2.0 * overlap + 1.0) / (whole + 1.0)


def overlap_of_masks_fixed(predicted, target):
    overlap = jnp.sum(predicted * target / 1024.0)
    return 1.0 - 2.0 * overlap / jnp.sum(predicted / 1024.0 + target / 1024.0)


@failing(
    "https://arxiv.org/abs/2006.11239", "bf16", "precision cancellation swamping",
    "kept = jnp.cumprod(1.0 - betas)",
    args=lambda: (jnp.linspace(1e-4, 1e-3, 40), normal(40, 6), normal(40, 6, seed=1)),
)  # fmt: skip
def schedule_of_noise(betas, images, noise):
    kept = jnp.cumprod(1.0 - betas)
    spread = jnp.sqrt(1.0 - kept)
    return jnp.sqrt(kept)[:, None] * images / 64.0, spread[:, None] * noise


def schedule_of_noise_fixed(betas, images, noise):
    """Sums of logarithms, and expm1."""
    log_kept = jnp.cumsum(jnp.log1p(-betas))
    spread = jnp.sqrt(-jnp.expm1(log_kept))
    return jnp.exp(0.5 * log_kept)[:, None] * images / 64.0, spread[:, None] * noise


@failing(
    "https://doi.org/10.1109/5.18626", "fp16", "underflow",
    "forward = (forward @ transition) * emission[symbol]",
    "return jnp.log(jnp.sum(jax.lax.scan(body, start, symbols)[0]))",
    args=lambda: (jax.nn.softmax(normal(5, 5)), jax.nn.softmax(normal(8, 5, seed=1), axis=0),
                  integers(24, seed=2, high=8)),
)  # fmt: skip
def chain_evidence(transition, emission, symbols):
    """The evidence of a hidden Markov model, by its forward pass in probabilities."""

    def body(forward, symbol):
        forward = (forward @ transition) * emission[symbol]
        return forward, None

    start = jnp.full(5, 0.2, transition.dtype)
    return jnp.log(jnp.sum(jax.lax.scan(body, start, symbols)[0]))


def chain_evidence_fixed(transition, emission, symbols):
    def body(carry, symbol):
        forward, evidence = carry
        forward = (forward @ transition) * emission[symbol]
        scale = jnp.sum(forward)
        return (forward / scale, evidence + jnp.log(scale)), None

    start = (jnp.full(5, 0.2, transition.dtype), jnp.zeros((), transition.dtype))
    return jax.lax.scan(body, start, symbols)[0][1]


@failing(
    "https://arxiv.org/abs/1707.06887", "bf16", "decision precision",
    "place = (targets - low) / step", "below = jnp.floor(place)",
    "targets = reward[:, None] + 0.99 * atoms", "atoms = low + step * jnp.arange(",
    "targets = jnp.clip(targets, low, -low)", "share = place - index.astype(",
    args=lambda: (uniform(16, seed=1, low=-1.0, high=1.0),
                  jax.nn.softmax(normal(16, 401, scale=2.0))),
)  # fmt: skip
def projected_atoms(reward, probabilities):
    """The projection of categorical deep Q-learning, with 401 atoms."""
    low, step = -10.0, 0.05
    atoms = low + step * jnp.arange(401.0, dtype=reward.dtype)
    targets = reward[:, None] + 0.99 * atoms
    targets = jnp.clip(targets, low, -low)
    place = (targets - low) / step
    below = jnp.floor(place)
    index = jnp.clip(below.astype(jnp.int32), 0, 399)
    share = place - index.astype(reward.dtype)
    rows = jnp.arange(16)[:, None]
    lower = jnp.zeros_like(probabilities).at[rows, index].add(probabilities * (1.0 - share))
    return lower.at[rows, index + 1].add(probabilities * share)


@failing(
    "https://arxiv.org/abs/1511.05952", "fp16", "underflow overflow nan",
    "chance = priority / jnp.sum(priority)", "weights = (20000.0 * chance) ** -0.4",
    "priority = jnp.abs(errors) ** 2",
    args=lambda: (jnp.abs(normal(20000, scale=0.5)) + 1e-3,),
)  # fmt: skip
def weights_of_replays(errors):
    """Importance weights of prioritised replay."""
    priority = jnp.abs(errors) ** 2
    chance = priority / jnp.sum(priority)
    weights = (20000.0 * chance) ** -0.4
    return weights / jnp.max(weights)


def weights_of_replays_fixed(errors):
    scores = 2.0 * jnp.log(jnp.abs(errors))
    weights = -0.4 * scores
    return jnp.exp(weights - jnp.max(weights))


@failing(
    "https://github.com/huggingface/trl/issues/7221", "fp16", "underflow nan overflow",
    "probabilities = jax.nn.softmax(logits)", "return -jnp.sum(probabilities * jnp.log(",
    args=lambda: (normal(6, 20, scale=8.0),),
)  # fmt: skip
def policy_entropy(logits):
    probabilities = jax.nn.softmax(logits)
    return -jnp.sum(probabilities * jnp.log(probabilities), axis=-1)


def policy_entropy_fixed(logits):
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)


@failing(
    "https://arxiv.org/abs/2003.08934", "bf16", "cancellation precision",
    "opacity = 1.0 - jnp.exp(-density * 0.004)",
    args=lambda: (uniform(8, 64, low=0.05, high=1.0), normal(8, 64, 3)),
)  # fmt: skip
def rendered_volume(density, colour):
    opacity = 1.0 - jnp.exp(-density * 0.004)
    through = jnp.cumprod(1.0 - opacity, axis=-1)
    return jnp.sum((opacity * through)[..., None] * colour, axis=1)


def rendered_volume_fixed(density, colour):
    depth = density * 0.004
    opacity = -jnp.expm1(-depth)
    through = jnp.exp(-jnp.cumsum(depth, axis=-1))
    return jnp.sum((opacity * through)[..., None] * colour, axis=1)


@failing(
    "https://publications.aston.ac.uk/id/eprint/373/", "fp16", "underflow nan overflow",
    "dense = jnp.prod(jnp.exp(-0.5 * z**2), axis=-1)",
    "return jnp.log(jnp.sum(jax.nn.softmax(logits) * dense, axis=-1))",
    args=lambda: (normal(16, 1, 24), normal(1, 4, 24, seed=1, scale=0.3), normal(16, 4, seed=2)),
)  # fmt: skip
def mixture_density(x, means, logits):
    """The log likelihood of a mixture density network, from products of 24 densities."""
    z = x - means
    dense = jnp.prod(jnp.exp(-0.5 * z**2), axis=-1)
    return jnp.log(jnp.sum(jax.nn.softmax(logits) * dense, axis=-1))


def mixture_density_fixed(x, means, logits):
    scores = -0.5 * jnp.sum((x - means) ** 2, axis=-1)
    return jax.nn.logsumexp(jax.nn.log_softmax(logits) + scores, axis=-1)
