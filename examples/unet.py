"""A small diffusion U-Net on scikit-learn's handwritten digits, in plain JAX and optax.

This file doesn't deal with low precision. It defines what `scalewise compare` and train.py
read from any file (see gpt.py), and digits that it doesn't train on, `held_out`. A batch contains
its noise, so that two runs see the same noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


@dataclass(frozen=True)
class Config:
    width: int = 16
    time: int = 32  # features of the time
    batch: int = 64
    held: int = 256  # digits that are held out


CONFIG = Config()
OPTIMIZER = optax.adam(2e-3)


def init(seed: int) -> Tree:
    """Parameters of the model and the state of its optimizer."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    width, time = CONFIG.width, CONFIG.time

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * float(np.prod(shape[:-1])) ** -0.5

    def block(fan_in: int, fan_out: int) -> Tree:
        return {
            "kernel": weight(3, 3, fan_in, fan_out),
            "time": weight(time, fan_out),
            "gain": jnp.ones(fan_out),
            "bias": jnp.zeros(fan_out),
        }

    params = {
        "time": weight(time, time),
        "first": block(1, width),
        "down": block(width, 2 * width),
        "middle": block(2 * width, 2 * width),
        "up": block(3 * width, width),
        "last": 0.1 * weight(3, 3, width, 1),
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def block(p: Tree, x: jax.Array, time: jax.Array, stride: int = 1) -> jax.Array:
    """Convolution, norm over each image, the time's share, a smooth rectifier."""
    x = convolve(x, p["kernel"], stride)
    mean = x.mean(axis=(1, 2, 3), keepdims=True)
    variance = jnp.square(x - mean).mean(axis=(1, 2, 3), keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["gain"] + p["bias"]
    return jax.nn.silu(x + (time @ p["time"])[:, None, None])


def noise_of(params: Tree, noisy: jax.Array, time: jax.Array) -> jax.Array:
    """The noise in images (batch, 8, 8, 1) at times (batch,) between 0 and 1."""
    waves = time[:, None] * 2.0 ** jnp.linspace(0, 6, CONFIG.time // 2)
    features = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)
    features = jax.nn.silu(features @ params["time"])
    high = block(params["first"], noisy, features)
    low = block(params["down"], high, features, stride=2)
    low = low + block(params["middle"], low, features)
    wide = jnp.repeat(jnp.repeat(low, 2, axis=1), 2, axis=2)
    x = block(params["up"], jnp.concatenate([wide, high], axis=-1), features)
    return convolve(x, params["last"])


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """Mean squared error of the noise found in the images."""
    angle = (batch["time"] * (jnp.pi / 2))[:, None, None, None]
    noisy = jnp.cos(angle) * batch["images"] + jnp.sin(angle) * batch["noise"]
    return jnp.square(noise_of(params, noisy, batch["time"]) - batch["noise"]).mean()


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def digits() -> np.ndarray:
    from sklearn.datasets import load_digits

    pixels, _ = load_digits(return_X_y=True)
    return np.reshape(pixels, (-1, 8, 8, 1)).astype(np.float32) / 8 - 1


def noised(images: np.ndarray, random: np.random.Generator) -> Tree:
    noise = random.standard_normal(images.shape, np.float32)
    return {"images": images, "noise": noise, "time": random.random(len(images), np.float32)}


def held_out() -> Tree:
    """Digits that `batches` never gives."""
    return noised(digits()[-CONFIG.held :], np.random.default_rng(0))


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Random digits, pixels from -1 to 1, each with noise and a time, without end."""
    del data
    images = digits()[: -CONFIG.held]
    random = np.random.default_rng(seed)
    while True:
        yield noised(images[random.integers(0, len(images), CONFIG.batch)], random)
