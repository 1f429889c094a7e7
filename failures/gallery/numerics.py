"""Simulations, statistics and recurrences that lose small terms or small differences."""

import jax
import jax.numpy as jnp
from jax.random import key, normal, split, uniform


def weights(seed, **shapes):
    keys = split(key(seed), len(shapes))
    return {n: normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def survival(hazard):
    return -jnp.log(1.0 - hazard)  # <- here


def survival_with_log1p(hazard):
    return -jnp.log1p(-hazard)


def rare_failures(params, x, rate=survival):
    """The rates that belong to the probabilities of rare failures, and the largest of a machine."""
    hidden = jnp.tanh(x @ params["hidden"])
    probability = jax.nn.sigmoid(hidden @ params["head"] - 14.0)
    rates = rate(probability)
    return rates, jnp.max(rates, axis=-1)


def rare_failures_arguments():
    return weights(0, hidden=(4, 8), head=(8, 6)), normal(key(1), (16, 4))


def rare_failures_fixed(params, x):
    return rare_failures(params, x, survival_with_log1p)


def edges(image):
    padded = jnp.pad(image, 1, mode="edge")
    down = padded[2:, 1:-1] - padded[:-2, 1:-1]
    across = padded[1:-1, 2:] - padded[1:-1, :-2]
    return jnp.sqrt(down * down + across * across)  # <- here


def edge_detector(image, threshold):
    """The share of an image's strength in its edges, of pixels with values up to 1023."""
    strength = edges(image)
    soft = jax.nn.sigmoid((strength - threshold) / 16.0)
    return strength * soft, jnp.mean(soft)


def edge_detector_arguments():
    ramp = jnp.where(jnp.arange(16)[None, :] > 7, 900.0, 100.0)
    return ramp + 40.0 * normal(key(0), (16, 16)), jnp.array(200.0)


def distance_to_ground(half_b, c):
    return -half_b - jnp.sqrt(jnp.square(half_b) - c)  # <- here


def stable_distance(half_b, c):
    return c / (-half_b + jnp.sqrt(jnp.square(half_b) - c))


def lit_ground(height, cosine, density, distance=distance_to_ground):
    """Where rays from small heights (in km) hit a planet, and the light that its air lets pass."""
    radius = 6360.0
    half_b = (radius + height) * cosine
    reached = distance(half_b, height * (2.0 * radius + height))
    air = density[:, None] * jnp.exp(-height / 8.0)[None, :]
    return reached, jnp.exp(-air * reached[None, :])


def lit_ground_arguments():
    height = 0.01 + 0.2 * uniform(key(0), (32,))
    return height, -0.5 - 0.5 * uniform(key(1), (32,)), jnp.array([0.1, 1.0, 10.0])


def lit_ground_fixed(height, cosine, density):
    return lit_ground(height, cosine, density, stable_distance)


def acceleration(position):
    squared = jnp.sum(jnp.square(position), axis=-1, keepdims=True)
    return -position / (squared * jnp.sqrt(squared))


def orbits(position, velocity):
    """Follows planets by the leapfrog method with small time steps."""

    def step(state, _):
        position, velocity = state
        velocity = velocity + 2e-3 * acceleration(position)  # <- here
        position = position + 2e-3 * velocity  # <- here
        return (position, velocity), None

    return jax.lax.scan(step, (position, velocity), None, length=200)[0]


def orbits_arguments():
    angle = 2.0 * jnp.pi * uniform(key(0), (8,))
    ring = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    return ring, jnp.stack([-ring[:, 1], ring[:, 0]], axis=1)


def noise_levels(betas):
    kept = jnp.cumprod(1.0 - betas)  # <- here
    return jnp.sqrt(kept), jnp.sqrt(1.0 - kept)


def noisy_samples(betas, x, noise, t):
    """A diffusion's noisy samples, and the weights of their losses by signal-to-noise ratio."""
    signal, deviation = noise_levels(betas)
    ratio = jnp.square(signal / jnp.maximum(deviation, 1e-3))
    weight = jnp.minimum(ratio, 5.0) / jnp.maximum(ratio, 1e-3)
    noisy = signal[t][:, None] * x + deviation[t][:, None] * noise
    return noisy, weight[t]


def noisy_samples_arguments():
    x, noise = normal(key(0), (2, 8, 16))
    return jnp.linspace(1e-4, 0.02, 256), x, noise, jnp.arange(8)


def pooled_features(params, image):
    """A classifier that averages a convolution's features over a large image."""
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
        image, params["kernel"], (2, 2), "SAME", dimension_numbers=layout
    )
    pooled = jnp.mean(jax.nn.relu(y), axis=(1, 2))  # <- here
    return jax.nn.log_softmax(pooled @ params["head"])


def pooled_features_arguments():
    params = {"kernel": 4.0 * normal(key(0), (3, 3, 1, 8)), "head": 0.05 * normal(key(1), (8, 4))}
    return params, 4.0 + 2.0 * normal(key(2), (2, 128, 128, 1))


def wave(phase):
    fraction = phase - jnp.floor(phase)  # <- here
    return jnp.abs(fraction - 0.5)


def oscillators(frequency, amplitude, sample):
    """A sound of triangular waves with given frequencies, some seconds into a piece."""
    phase = frequency[None, :] * (sample.astype(jnp.float32) / 1024.0)[:, None]  # <- here
    return jnp.sum(amplitude[None, :] * wave(phase), axis=-1)


def oscillators_arguments():
    return jnp.array([110.0, 165.0, 220.0, 440.0]), normal(key(1), (4,)), 2048 + jnp.arange(64)


def state_space(params, x):
    """A diagonal state-space model with long memory, and its read-out."""
    decay = jnp.exp(-jnp.exp(params["log_rate"]) * params["step"])  # <- here

    def step(state, inputs):
        state = decay * state + (1.0 - decay) * inputs
        return state, state @ params["out"]

    return jax.lax.scan(step, jnp.zeros_like(params["step"]), x @ params["in"])[1]


def state_space_arguments():
    params = weights(0, **{"in": (4, 16), "out": (16, 4)})
    params |= {"log_rate": -2.0 + normal(key(1), (16,)), "step": jnp.full(16, 0.01)}
    return params, 1.0 + normal(key(2), (64, 4))
