"""A classifier of handwritten digits in Keras 3, on its JAX backend.

It doesn't deal with low precision: `scalewise compare examples/digits_keras.py` does.
"""

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras  # pyright: ignore[reportMissingImports]
import numpy as np

Tree = Any
MODEL = keras.Sequential([
    keras.layers.Input((8, 8, 1)),
    keras.layers.Conv2D(16, 3, activation="relu"),
    keras.layers.BatchNormalization(),
    keras.layers.Flatten(),
    keras.layers.Dense(128, activation="relu"),
    keras.layers.Dense(10),
])  # fmt: skip
OPTIMIZER = keras.optimizers.Adam(1e-3)
OPTIMIZER.build(MODEL.trainable_variables)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def init(seed: int) -> Tree:
    """Trainable and other variables of the model, and those of the optimizer."""
    random = np.random.default_rng(seed)
    weights = [np.asarray(v) for v in MODEL.trainable_variables]
    # kernels as Keras draws them (Glorot), here from the seed alone
    drawn = [
        random.uniform(-1, 1, w.shape).astype(np.float32)
        * np.sqrt(6 / (np.prod(w.shape[:-2], initial=1) * (w.shape[-2] + w.shape[-1])))
        if w.ndim > 1
        else w
        for w in weights
    ]
    rest = [np.asarray(v) for v in MODEL.non_trainable_variables]
    return jax.tree.map(jax.numpy.asarray, (drawn, rest, [v.numpy() for v in OPTIMIZER.variables]))


def loss_and_rest(params: Tree, rest: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    logits, rest = MODEL.stateless_call(params, rest, batch["images"], training=True)
    return CROSS_ENTROPY(batch["labels"], logits), rest


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    params, rest, moments = state
    gradient = jax.value_and_grad(loss_and_rest, has_aux=True)
    (loss, rest), gradients = gradient(params, rest, batch)
    params, moments = OPTIMIZER.stateless_apply(moments, gradients, params)
    return (params, rest, moments), loss


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Random digits of scikit-learn, pixels from 0 to 1, without end."""
    del data
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, 8, 8, 1) / 16
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(images), 64)
        yield {"images": images[chosen], "labels": np.asarray(digits, np.int32)[chosen]}
