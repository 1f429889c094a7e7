"""Embeddings, indices, positions as floats."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal


@failing(
    "https://github.com/modelscope/DiffSynth-Studio/issues/562",
    "bf16",
    "precision cancellation decision",
    "angles = scaled[:, None] * rates",
    "scaled = 500.0 + 37.3 * index",
    "jnp.cos(angles)",
    "jnp.sin(angles)",
    args=lambda: (jnp.arange(12.0), normal(12, 16)),
)
def flow_timesteps(index, x):
    rates = jnp.exp(-jnp.log(1e4) * jnp.arange(8.0) / 8.0)
    scaled = 500.0 + 37.3 * index
    angles = scaled[:, None] * rates
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return x * jnp.concatenate([cos, sin], axis=-1)


@failing(
    "https://github.com/Nerogar/OneTrainer/issues/1177", "bf16", "precision decision cancellation",
    "places = start + jnp.arange(24.0)", "gaps = places[:, None] - places[None, :]",
    args=lambda: (jnp.float32(488.0), normal(24, 8), jnp.float32(0.5)),
)  # fmt: skip
def relative_text_positions(start, values, slope):
    places = start + jnp.arange(24.0)
    gaps = places[:, None] - places[None, :]
    return jax.nn.softmax(-slope * jnp.abs(gaps)) @ values


def relative_text_positions_fixed(start, values, slope):
    places = jnp.arange(24.0)
    gaps = places[:, None] - places[None, :]
    return jax.nn.softmax(-slope * jnp.abs(gaps)) @ values


@failing(
    "https://github.com/tinygrad/tinygrad/pull/9173", "bf16", "decision precision",
    "address = segment * 64.0 + token",
    args=lambda: (normal(512, 8), jnp.arange(24.0) % 8, 40.0 + jnp.arange(24.0) % 13),
)  # fmt: skip
def float_token_ids(table, segment, token):
    address = segment * 64.0 + token
    return table[address.astype(jnp.int32)]


def float_token_ids_fixed(table, segment, token):
    return table[segment.astype(jnp.int32) * 64 + token.astype(jnp.int32)]


@failing(
    "https://github.com/huggingface/diffusers/issues/13920", "c=bf16", "precision decision",
    "angles = places @ rates[None, :]",
    args=lambda: (normal(16, 8), jnp.float32(65536.0) + jnp.arange(16.0)[:, None]),
    limit=0.2,
)  # fmt: skip
def image_rope_under_autocast(x, places):
    rates = 10000.0 ** (-jnp.arange(4.0) / 4.0)
    angles = places @ rates[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def image_rope_under_autocast_fixed(x, places):
    rates = 10000.0 ** (-jnp.arange(4.0) / 4.0)
    angles = places * rates[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


@failing(
    "https://github.com/HorizonRobotics/alf/pull/268", "float32", "precision decision swamping",
    "steps = first + jnp.arange(64.0)", "late = steps - first",
    args=lambda: (jnp.float32(16777190.0), normal(64)),
)  # fmt: skip
def replay_positions(first, rewards):
    steps = first + jnp.arange(64.0)
    late = steps - first
    return jnp.sum(rewards * late) / 64.0, late


def replay_positions_fixed(first, rewards):
    late = jnp.arange(64.0)
    return jnp.sum(rewards * late) / 64.0, late


@failing(
    "https://github.com/sgl-project/sglang/pull/33764",
    "bf16",
    "decision precision",
    "logits = x @ gate + (8.0 + bias)",
    args=lambda: (
        normal(256, 32),
        normal(32, 16, seed=1, scale=0.02),
        normal(16, 4, seed=2, scale=2.0),
        normal(16, seed=3, scale=0.03),
    ),
    limit=0.2,
)
def biased_router(x, gate, experts, bias):
    logits = x @ gate + (8.0 + bias)
    chosen = jnp.argmax(logits, axis=-1)
    return experts[chosen]


def biased_router_fixed(x, gate, experts, bias):
    chosen = jnp.argmax(x @ gate + bias, axis=-1)
    return experts[chosen]


@failing(
    "https://github.com/ViperEkura/AstrAI/pull/57", "bf16", "decision precision",
    "probabilities = jax.nn.softmax(logits)",
    args=lambda: (normal(128, 8, scale=0.004, mean=0.0), normal(8, 4, seed=2, scale=2.0)),
    limit=0.2,
)  # fmt: skip
def flat_router(logits, experts):
    probabilities = jax.nn.softmax(logits)
    chosen = jnp.argmax(probabilities, axis=-1)
    return experts[chosen]


def flat_router_fixed(logits, experts):
    return experts[jnp.argmax(logits, axis=-1)]


@failing(
    "https://github.com/Comfy-Org/ComfyUI/pull/16001",
    "bf16",
    "decision precision cancellation",
    "sigmas = 1.0 - (1.0 - grid) / 8.0",
    "shifted = 3.0 * sigmas / (1.0 + 2.0 * sigmas)",
    "steps = shifted[1:] - shifted[:-1]",
    args=lambda: (jnp.linspace(1.0, 0.5, 33), normal(32)),
)
def shifted_schedule(grid, velocity):
    sigmas = 1.0 - (1.0 - grid) / 8.0
    shifted = 3.0 * sigmas / (1.0 + 2.0 * sigmas)
    steps = shifted[1:] - shifted[:-1]
    return steps * velocity
