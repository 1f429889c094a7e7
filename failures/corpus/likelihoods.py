"""Probabilities and log-likelihoods."""

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln, log_ndtr, ndtr

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/pyro-ppl/numpyro/issues/563", "float32", "cancellation precision",
    "gammaln(count + shape) - gammaln(count + 1.0)", "gammaln(shape)",
    args=lambda: (jnp.float32([2e5, 3e5, 5e5]), jnp.float32(500.0), jnp.float32(1.0e-3)),
)  # fmt: skip
def gamma_poisson(count, shape, rate):
    choose = gammaln(count + shape) - gammaln(count + 1.0) - gammaln(shape)
    return choose + shape * jnp.log(rate / (1.0 + rate)) - count * jnp.log1p(rate)


@failing(
    "https://github.com/pyro-ppl/pyro/issues/1706", "float32", "cancellation precision",
    "ways = gammaln(total + 1.0) - gammaln(hits + 1.0) - gammaln(total - hits + 1.0)",
    "likely = hits * jnp.log(p) + (total - hits) * jnp.log1p(-p)", "return ways + likely",
    args=lambda: (jnp.float32(3849.0), jnp.float32(5e6), jnp.float32([7.6e-4, 7.7e-4, 7.8e-4])),
)  # fmt: skip
def rare_binomial(hits, total, p):
    ways = gammaln(total + 1.0) - gammaln(hits + 1.0) - gammaln(total - hits + 1.0)
    likely = hits * jnp.log(p) + (total - hits) * jnp.log1p(-p)
    return ways + likely


@failing(
    "https://github.com/stan-dev/math/issues/1611", "float32", "cancellation precision",
    "gammaln(a) + gammaln(b) - gammaln(a + b)",
    args=lambda: (jnp.float32([1e6, 3e6, 2e7]), jnp.float32([3.0, 4.5, 2.5])),
)  # fmt: skip
def log_beta(a, b):
    return gammaln(a) + gammaln(b) - gammaln(a + b)


def log_beta_fixed(a, b):
    series = 1.0 / (12.0 * a) - 1.0 / (12.0 * (a + b))
    return gammaln(b) - b * jnp.log(a) - (a + b - 0.5) * jnp.log1p(b / a) + b + series


@failing(
    "https://github.com/infer-actively/pymdp/pull/415", "float32", "cancellation",
    "1.0 / counts + jax.scipy.special.digamma(counts)",
    args=lambda: (jnp.float32([1e-6, 3e-6, 1e-5, 4e-5]),),
)  # fmt: skip
def information_gain(counts):
    total = jnp.sum(counts) + 1.0
    gain = 1.0 / counts + jax.scipy.special.digamma(counts)
    return gain + jnp.log(total)


def information_gain_fixed(counts):
    return jax.scipy.special.digamma(counts + 1.0) + jnp.log(jnp.sum(counts) + 1.0)


@failing(
    "https://github.com/jax-ml/jax/pull/1200", "float32", "cancellation precision swamping",
    "jnp.log(1.0 - rate)",
    args=lambda: (uniform(32, low=1e-7, high=4e-6), jnp.float32(1000.0)),
)  # fmt: skip
def survival_of_rare(rate, trials):
    return trials * jnp.log(1.0 - rate)


def survival_of_rare_fixed(rate, trials):
    return trials * jnp.log1p(-rate)


@failing(
    "https://github.com/handley-lab/blackjax/pull/61", "float32", "cancellation precision",
    "shell = jnp.log(1.0 - jnp.exp(delta))",
    args=lambda: (-uniform(24, low=1e-6, high=1e-4), normal(24, scale=5.0)),
)  # fmt: skip
def evidence_shells(delta, likelihood):
    shell = jnp.log(1.0 - jnp.exp(delta))
    return shell + likelihood


def evidence_shells_fixed(delta, likelihood):
    return jnp.log(-jnp.expm1(delta)) + likelihood


@failing(
    "https://github.com/pymc-devs/pymc/pull/2832", "float32", "overflow nan",
    "bessel = jax.scipy.special.i0(concentration)", "jnp.log(2.0 * jnp.pi * bessel)",
    args=lambda: (normal(8, scale=0.2), jnp.float32(120.0)),
)  # fmt: skip
def von_mises(angle, concentration):
    bessel = jax.scipy.special.i0(concentration)
    return concentration * jnp.cos(angle) - jnp.log(2.0 * jnp.pi * bessel)


def von_mises_fixed(angle, concentration):
    scaled = jax.scipy.special.i0e(concentration)
    return concentration * (jnp.cos(angle) - 1.0) - jnp.log(2.0 * jnp.pi * scaled)


@failing(
    "https://github.com/mlpack/mlpack/issues/160", "float32", "underflow nan overflow",
    "alpha = (alpha @ transitions) * emitted", "return jnp.log(jnp.sum(alpha))",
    args=lambda: (jax.nn.softmax(normal(4, 4)), uniform(160, 4, low=0.01, high=0.6)),
)  # fmt: skip
def hidden_markov(transitions, emissions):
    def body(alpha, emitted):
        alpha = (alpha @ transitions) * emitted
        return alpha, None

    alpha, _ = jax.lax.scan(body, jnp.full(4, 0.25, emissions.dtype), emissions)
    return jnp.log(jnp.sum(alpha))


def hidden_markov_fixed(transitions, emissions):
    def body(carry, emitted):
        alpha, total = carry
        alpha = (alpha @ transitions) * emitted
        size = jnp.sum(alpha)
        return (alpha / size, total + jnp.log(size)), None

    start = (jnp.full(4, 0.25, emissions.dtype), jnp.zeros((), emissions.dtype))
    return jax.lax.scan(body, start, emissions)[0][1]


@failing(
    "https://github.com/NVIDIA/apex/issues/812", "fp16", "overflow",
    "ratio = jnp.square(scale / prior)",
    args=lambda: (normal(8), uniform(8, low=0.5, high=2.0), jnp.float32(2e-3)),
)  # fmt: skip
def normal_divergence(mean, scale, prior):
    ratio = jnp.square(scale / prior)
    return jnp.log(ratio) + mean * mean


def normal_divergence_fixed(mean, scale, prior):
    return 2.0 * jnp.log(scale / prior) + mean * mean


@failing(
    "https://github.com/chainer/chainer/issues/6168", "fp16", "overflow",
    "variance = jnp.exp(log_variance)", "jnp.sum(1.0 + log_variance - mean**2 - variance)",
    args=lambda: (normal(16), jnp.full(16, 10.5) + normal(16, seed=1, scale=0.1)),
)  # fmt: skip
def gaussian_code(mean, log_variance):
    """A divergence from the prior whose weight of 2^-16 is applied after the sum."""
    variance = jnp.exp(log_variance)
    divergence = -0.5 * jnp.sum(1.0 + log_variance - mean**2 - variance)
    return divergence * 2.0**-16


def gaussian_code_fixed(mean, log_variance):
    shift = 16.0 * jnp.log(2.0)
    rest = 1.0 + log_variance - mean**2
    return -0.5 * (jnp.sum(rest * 2.0**-16) - jnp.sum(jnp.exp(log_variance - shift)))


@failing(
    "https://github.com/stan-dev/math/issues/3150",
    "float32",
    "cancellation precision underflow nan overflow",
    "below = jnp.log(ndtr(z))",
    args=lambda: (-uniform(12, low=6.0, high=16.0),),
)
def log_tail(z):
    below = jnp.log(ndtr(z))
    return below


def log_tail_fixed(z):
    return log_ndtr(z)
