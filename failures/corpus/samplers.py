"""Diffusion and flow models, their schedules, and samplers of distributions."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


def rounded(x, dtype="bfloat16"):
    return jnp.asarray(x).astype(dtype).astype("float32")


@failing(
    "https://github.com/crowsonkb/k-diffusion/issues/25", "bf16", "cancellation precision",
    "root = largest + ramp * (smallest - largest)", "sigmas = root**7.0",
    args=lambda: (normal(24),), limit=0.03,
)  # fmt: skip
def karras_schedule(noise):
    ramp = jnp.linspace(0.0, 1.0, 24, dtype=noise.dtype)
    largest, smallest = 80.0 ** (1.0 / 7.0), 0.002 ** (1.0 / 7.0)
    root = largest + ramp * (smallest - largest)
    sigmas = root**7.0
    return noise / sigmas


@failing(
    "https://github.com/NVlabs/edm/issues/15", "fp16", "overflow",
    "total = jnp.square(sigma) + 0.25",
    args=lambda: (normal(8, 16), uniform(8, seed=1, low=280.0, high=700.0)),
)  # fmt: skip
def preconditioned_denoiser(x, sigma):
    total = jnp.square(sigma) + 0.25
    scale = 0.5 * sigma / jnp.sqrt(total)
    return scale[:, None] * jnp.tanh(x / jnp.sqrt(total)[:, None] * sigma[:, None])


def preconditioned_denoiser_fixed(x, sigma):
    total = jnp.sqrt(1.0 + jnp.square(0.5 / sigma))
    return (0.5 / total)[:, None] * jnp.tanh(x / total[:, None])


@failing(
    "https://github.com/huggingface/diffusers/issues/2633", "bf16", "cancellation precision",
    "clean = (x - jnp.sqrt(1.0 - alpha) * noise) / jnp.sqrt(alpha)",
    args=lambda: (rounded(normal(64) + 0.06 * normal(64, seed=1)), rounded(normal(64)),
                  jnp.float32(2.0**-8)),
)  # fmt: skip
def first_denoising_step(x, noise, alpha):
    clean = (x - jnp.sqrt(1.0 - alpha) * noise) / jnp.sqrt(alpha)
    return jnp.clip(clean, -3.0, 3.0)


@failing(
    "https://arxiv.org/abs/2303.09556", "fp16", "overflow nan",
    "ratio = jnp.square(alpha / sigma)",
    args=lambda: (uniform(32, low=0.001, high=0.003), jnp.full(32, 1.0), normal(32, 8)),
)  # fmt: skip
def weighted_by_noise(sigma, alpha, residual):
    """A loss weighted by signal to noise, divided by the largest weight."""
    ratio = jnp.square(alpha / sigma)
    weight = ratio / jnp.max(ratio)
    return jnp.mean(weight * jnp.mean(residual**2, axis=-1))


def weighted_by_noise_fixed(sigma, alpha, residual):
    ratio = alpha / sigma
    weight = jnp.square(ratio / jnp.max(ratio))
    return jnp.mean(weight * jnp.mean(residual**2, axis=-1))


@failing(
    "https://arxiv.org/abs/1907.05600", "bf16", "swamping precision",
    "x = x + step * score + jnp.sqrt(2.0 * step) * noise",
    args=lambda: (normal(32, mean=2.0), normal(64, 32, seed=1)), change=True,
)  # fmt: skip
def annealed_langevin(x, noises):
    def body(x, noise):
        step = 1e-6
        score = -x
        x = x + step * score + jnp.sqrt(2.0 * step) * noise
        return x, None

    return jax.lax.scan(body, x, noises)[0]


@failing(
    "https://arxiv.org/abs/2303.01469", "bf16", "cancellation precision swamping",
    "tangent = (after - before) / step", "after = jnp.tanh((x + step * velocity) @ w)",
    "before = jnp.tanh(x @ w)",
    args=lambda: (normal(8, 6), normal(8, 6, seed=1), normal(6, 6, seed=2, scale=0.3)),
)  # fmt: skip
def consistency_tangent(x, velocity, w):
    step = 0.0078125
    before = jnp.tanh(x @ w)
    after = jnp.tanh((x + step * velocity) @ w)
    tangent = (after - before) / step
    return tangent


def consistency_tangent_fixed(x, velocity, w):
    return jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (velocity,))[1]


@failing(
    "https://github.com/google-research/vdm/issues/9", "fp16", "cancellation swamping nan overflow",
    "noise_to_signal = jnp.exp(1e-4 + 10.0 * t * t) - 1.0",
    args=lambda: (uniform(32, low=0.0, high=0.02),),
)  # fmt: skip
def log_signal_to_noise(t):
    noise_to_signal = jnp.exp(1e-4 + 10.0 * t * t) - 1.0
    return -jnp.log(noise_to_signal)


def log_signal_to_noise_fixed(t):
    return -jnp.log(jnp.expm1(1e-4 + 10.0 * t * t))


def energy(position, momentum, spread):
    return 0.5 * jnp.sum(position**2 / spread) + 0.5 * jnp.sum(momentum**2)


@failing(
    "https://github.com/blackjax-devs/blackjax/issues/441", "fp16", "cancellation precision",
    "ratio = jnp.exp(start - end)",
    "return 0.5 * jnp.sum(position**2 / spread) + 0.5 * jnp.sum(momentum**2)",
    args=lambda: (normal(900, scale=4.0), normal(900, seed=1), jnp.full(900, 1.0)),
    inside=(energy,),
)  # fmt: skip
def hamiltonian_acceptance(position, momentum, spread):
    """The probability of accepting a leapfrog step, from two energies of about 7,500."""
    step = 0.0625
    start = energy(position, momentum, spread)
    half = momentum - 0.5 * step * position / spread
    moved = position + step * half
    arrived = half - 0.5 * step * moved / spread
    end = energy(moved, arrived, spread)
    ratio = jnp.exp(start - end)
    return ratio


def hamiltonian_acceptance_fixed(position, momentum, spread):
    """Sums the differences of the energies' terms: a^2 - b^2 = (a - b) (a + b)."""
    step = 0.0625
    half = momentum - 0.5 * step * position / spread
    moved = position + step * half
    arrived = half - 0.5 * step * moved / spread
    potential = -step * half * (position + moved) / spread
    kinetic = 0.5 * step * (position + moved) / spread * (momentum + arrived)
    return jnp.exp(0.5 * jnp.sum(potential + kinetic))


@failing(
    "https://github.com/pyro-ppl/pyro/issues/2813", "fp16", "overflow nan",
    "weights = jnp.exp(-energies / temperature)", "return weights @ observed / jnp.sum(weights)",
    args=lambda: (-uniform(40, low=0.1, high=0.4), normal(40, 3, seed=1)),
)  # fmt: skip
def boltzmann_average(energies, observed):
    """A thermal average, of energies in electron volts at room temperature."""
    temperature = 0.0257
    weights = jnp.exp(-energies / temperature)
    return weights @ observed / jnp.sum(weights)


def boltzmann_average_fixed(energies, observed):
    return jax.nn.softmax(-energies / 0.0257) @ observed


@failing(
    "https://github.com/jax-ml/jax/issues/13529", "bf16", "cancellation precision overflow nan",
    "return jnp.log(confidence / (1.0 - confidence))", "confidence = jax.nn.sigmoid(logits)",
    args=lambda: (rounded(uniform(64, low=4.0, high=7.0)),),
)  # fmt: skip
def recovered_logits(logits):
    """Logits of saved probabilities."""
    confidence = jax.nn.sigmoid(logits)
    return jnp.log(confidence / (1.0 - confidence))


def recovered_logits_fixed(logits):
    confidence, doubt = jax.nn.sigmoid(logits), jax.nn.sigmoid(-logits)
    return jnp.log(confidence / doubt)
