"""A Bayesian classifier of handwritten digits in NumPyro, by variational inference.

It doesn't deal with low precision: `scalewise compare examples/digits_numpyro.py` does.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro  # pyright: ignore[reportMissingImports]
import numpyro.distributions as dist  # pyright: ignore[reportMissingImports]
from numpyro.infer import SVI, Trace_ELBO  # pyright: ignore[reportMissingImports]
from numpyro.infer.autoguide import AutoNormal  # pyright: ignore[reportMissingImports]

Tree = Any
IMAGES = 1797


def model(images: jax.Array, labels: jax.Array) -> None:
    up = numpyro.sample("up", dist.Normal(jnp.zeros((64, 32)), 0.3).to_event(2))
    down = numpyro.sample("down", dist.Normal(jnp.zeros((32, 10)), 0.3).to_event(2))
    with numpyro.plate("images", IMAGES, subsample_size=len(images)):
        logits = jnp.tanh(images @ up) @ down
        numpyro.sample("labels", dist.Categorical(logits=logits), obs=labels)


SVI_OF_MODEL = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), Trace_ELBO())


def init(seed: int) -> Tree:
    """The state of the inference: means and deviations of the weights, moments, a random key."""
    images, labels = np.zeros((64, 64), np.float32), np.zeros(64, np.int32)
    return SVI_OF_MODEL.init(jax.random.key(seed), images, labels)


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    state, loss = SVI_OF_MODEL.update(state, batch["images"], batch["labels"])
    return state, loss / IMAGES


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Random digits of scikit-learn, pixels from 0 to 1, without end."""
    del data
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(pixels), 64)
        images = np.asarray(pixels, np.float32)[chosen] / 16
        yield {"images": images, "labels": np.asarray(digits, np.int32)[chosen]}
