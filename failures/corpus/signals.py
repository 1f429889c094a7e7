"""Audio and other signals."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/kitzeslab/opensoundscape/issues/794", "fp16", "underflow overflow nan",
    "jnp.log10(jnp.maximum(power, 1e-10))", "power = jnp.square(magnitudes)",
    args=lambda: (jnp.abs(normal(12, 16, scale=1e-4)), uniform(16, 8, seed=1)),
)  # fmt: skip
def decibels(magnitudes, filters):
    power = jnp.square(magnitudes)
    bands = 10.0 * jnp.log10(jnp.maximum(power, 1e-10))
    return bands @ filters / 16.0


def decibels_fixed(magnitudes, filters):
    bands = 20.0 * jnp.log10(jnp.maximum(magnitudes * 4096.0, 0.04096)) - 72.247199
    return bands @ filters / 16.0


@failing(
    "https://github.com/tyiannak/pyAudioAnalysis/issues/194", "fp16", "overflow",
    "energy = jnp.sum(frames * frames, axis=-1)", "jnp.sqrt(energy / frames.shape[-1])",
    args=lambda: (normal(8, 64, scale=3000.0),),
)  # fmt: skip
def frame_energy(frames):
    energy = jnp.sum(frames * frames, axis=-1)
    return jnp.sqrt(energy / frames.shape[-1])


def frame_energy_fixed(frames):
    small = frames / 4096.0
    return 4096.0 * jnp.sqrt(jnp.mean(small * small, axis=-1))


@failing(
    "https://github.com/J-M-PUNK/tideway/pull/128", "bf16", "precision swamping cancellation",
    "y = b * x - a1 * y1 - a2 * y2",
    args=lambda: (jnp.sin(0.05 * jnp.arange(200.0)), jnp.float32(0.0039), jnp.float32(0.1)),
)  # fmt: skip
def crossfeed_filter(xs, b, gap):
    a1, a2 = -2.0 + gap, 1.0 - gap + b

    def body(carry, x):
        y1, y2 = carry
        y = b * x - a1 * y1 - a2 * y2
        return (y, y1), y

    zero = jnp.zeros((), xs.dtype)
    return jax.lax.scan(body, (zero, zero), xs)[1]


@failing(
    "https://github.com/pschatzmann/arduino-audio-tools/issues/138",
    "fp16",
    "precision swamping cancellation",
    "phase = phase + step",
    "jnp.sin(phase)",
    args=lambda: (jnp.float32(0.7853), uniform(600)),
)
def unwrapped_oscillator(step, gain):
    def body(phase, level):
        phase = phase + step
        return phase, level * jnp.sin(phase)

    return jax.lax.scan(body, jnp.zeros((), gain.dtype), gain)[1]


@failing(
    "https://github.com/chomeyama/SiFiGAN/pull/14", "bf16", "precision swamping cancellation",
    "cycles = jnp.cumsum(pitch / rate)", "jnp.sin(2.0 * jnp.pi * cycles)",
    args=lambda: (uniform(400, low=180.0, high=260.0), jnp.float32(4096.0)),
)  # fmt: skip
def harmonic_source(pitch, rate):
    cycles = jnp.cumsum(pitch / rate)
    return jnp.sin(2.0 * jnp.pi * cycles)


@failing(
    "https://github.com/ARM-software/CMSIS_5/issues/225", "fp16", "cancellation",
    "power = total / n - (summed / n) ** 2", "total = jnp.sum(samples", "summed = jnp.sum(samples)",
    args=lambda: (normal(64, scale=0.05, mean=8.0),),
)  # fmt: skip
def block_power(samples):
    n = samples.shape[0]
    total = jnp.sum(samples * samples)
    summed = jnp.sum(samples)
    power = total / n - (summed / n) ** 2
    return power


def block_power_fixed(samples):
    return jnp.mean((samples - jnp.mean(samples)) ** 2)


@failing(
    "https://github.com/adobe-research/convmelspec/pull/3", "fp16", "overflow",
    "squares = real * real + imaginary * imaginary",
    args=lambda: (normal(4, 128, scale=60.0), normal(128, 16, seed=1), normal(128, 16, seed=2)),
)  # fmt: skip
def power_spectrum(frames, cosines, sines):
    real, imaginary = frames @ cosines, frames @ sines
    squares = real * real + imaginary * imaginary
    return jnp.log(squares)


def power_spectrum_fixed(frames, cosines, sines):
    real, imaginary = (frames / 256.0) @ cosines, (frames / 256.0) @ sines
    return jnp.log(real * real + imaginary * imaginary) + 11.090355
