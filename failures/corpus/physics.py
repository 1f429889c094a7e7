"""Simulations and differential equations."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/CliMA/ClimaAtmos.jl/issues/955",
    "float32",
    "swamping precision cancellation",
    "later = time + 0.02",
    args=lambda: (jnp.float32(3.3696e6), jnp.float32(0.3)),
    steps=50,
    change=True,
)
def model_clock(time, rate):
    later = time + 0.02
    return later, jnp.exp(-rate)


@failing(
    "https://github.com/patrick-kidger/diffrax/issues/632",
    "float32",
    "swamping precision cancellation",
    "t = t + dt",
    args=lambda: (jnp.float32(1.0), jnp.float32(4096.0), jnp.float32(1e-4)),
)
def euler_at_late_times(y, t0, dt):
    """Integrates a decay from a late time to a little after it, with the step between the times."""

    def body(carry, _):
        t, y = carry
        before = t
        t = t + dt
        y = y - (t - before) * 10.0 * y
        return (t, y), None

    return jax.lax.scan(body, (t0, y), None, length=300)[0][1]


def euler_at_late_times_fixed(y, t0, dt):
    return jax.lax.fori_loop(0, 300, lambda _, y: y - dt * 10.0 * y, y)


@failing(
    "https://github.com/patrick-kidger/diffrax/issues/657", "bf16", "cancellation precision",
    "widths = edges[1:] - edges[:-1]", "edges = start + step * jnp.arange(33.0)",
    args=lambda: (jnp.float32(5e-10), jnp.float32(1.25e-11), normal(32)),
)  # fmt: skip
def nanosecond_steps(start, step, forcing):
    edges = start + step * jnp.arange(33.0)
    widths = edges[1:] - edges[:-1]
    return jnp.cumsum(1e9 * widths * forcing)


@failing(
    "https://github.com/openmm/openmm/issues/979", "fp16", "overflow underflow nan",
    "powers = (distances / sigma) ** 6",  "sigma * (0.5 + powers) ** (1.0 / 6.0)",
    args=lambda: (uniform(48, low=1.0, high=30.0), jnp.float32(1.5)),
)  # fmt: skip
def softcore_distances(distances, sigma):
    powers = (distances / sigma) ** 6
    return sigma * (0.5 + powers) ** (1.0 / 6.0)


def softcore_distances_fixed(distances, sigma):
    ratio = distances / sigma
    far = distances * (1.0 + 0.5 * jnp.minimum(1.0 / ratio, 2.0) ** 6) ** (1.0 / 6.0)
    near = sigma * (0.5 + jnp.minimum(ratio, 4.0) ** 6) ** (1.0 / 6.0)
    return jnp.where(ratio > 3.0, far, near)


@failing(
    "https://github.com/openmm/openmm/issues/5136", "fp16", "overflow underflow",
    "cubed = squared * jnp.sqrt(squared)",
    args=lambda: (normal(12, 3, scale=40.0), uniform(12, seed=1, low=1.0, high=4.0)),
)  # fmt: skip
def gravity(places, masses):
    gaps = places[None] - places[:, None]
    squared = jnp.sum(gaps * gaps, axis=-1) + 1.0
    cubed = squared * jnp.sqrt(squared)
    return jnp.sum(masses[None, :, None] * gaps / cubed[..., None], axis=1)


def gravity_fixed(places, masses):
    gaps = places[None] - places[:, None]
    inverse = jax.lax.rsqrt(jnp.sum(gaps * gaps, axis=-1) + 1.0)[..., None]
    return jnp.sum(masses[None, :, None] * (gaps * inverse) * inverse * inverse, axis=1)


@failing(
    "https://doi.org/10.1029/2020MS002246", "bf16", "swamping",
    "field = field + 2e-3 * (",
    args=lambda: (1.0 + jnp.sin(jnp.linspace(0.0, 6.2, 64)) * 0.3,), steps=80, change=True,
)  # fmt: skip
def diffusion_step(field):
    field = field + 2e-3 * (jnp.roll(field, 1) - 2.0 * field + jnp.roll(field, -1))
    return field


@failing(
    "https://doi.org/10.1029/2020MS002246", "bf16", "cancellation precision",
    "gradient = (pressure[1:] - pressure[:-1]) / 100.0", "pressure = surface + anomaly",
    args=lambda: (jnp.float32(1.0e5), 40.0 * jnp.sin(jnp.linspace(0.0, 3.0, 40)), uniform(39)),
)  # fmt: skip
def pressure_gradient(surface, anomaly, density):
    pressure = surface + anomaly
    gradient = (pressure[1:] - pressure[:-1]) / 100.0
    return gradient / (1.0 + density)


@failing(
    "https://github.com/cbherbert/stochrare/issues/22", "bf16", "precision decision cancellation",
    "spans = times[1:] - times[:-1]", "times = start + 0.1 * jnp.arange(24.0)",
    args=lambda: (jnp.float32(20.0), normal(23)),
)  # fmt: skip
def brownian_increments(start, noise):
    times = start + 0.1 * jnp.arange(24.0)
    spans = times[1:] - times[:-1]
    return jnp.sqrt(jnp.abs(spans)) * noise
