"""Adapters (LoRA) on a frozen quantised base: plain JAX, optax, scikit-learn's handwritten digits.

    python examples/lora.py --to nvfp4 --layout compressed-tensors

A network is trained on upright digits, saved, and cast. The stored FP4 or FP8 weights are loaded as
ScaledArrays, multiplied by `scalewise.scaled.matmul`, and never change; adapters of rank 4, which
are added to their products, are trained on the digits turned by 90 degrees. So are adapters on the
wide base.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import scalewise as sw

Tree = Any
LAYERS = (("layers.0", 64, 128), ("layers.1", 128, 64), ("layers.2", 64, 10))
OPTIMIZER = optax.adam(3e-3)


def init(seed: int) -> dict[str, np.ndarray]:
    """Weights of the base, (outputs, inputs) as checkpoints store them."""
    rng = np.random.default_rng(seed)
    return {
        f"{name}.weight": (rng.standard_normal((n, m)) * np.sqrt(2 / m)).astype(np.float32)
        for name, m, n in LAYERS
    }


def init_adapters(seed: int, rank: int) -> dict[str, dict[str, jax.Array]]:
    """Pairs of matrices whose product is zero at first."""
    rng = np.random.default_rng(seed)
    return {
        f"{name}.weight": {
            "down": jnp.asarray(rng.standard_normal((m, rank)) / np.sqrt(m), jnp.float32),
            "up": jnp.zeros((rank, n), jnp.float32),
        }
        for name, m, n in LAYERS
    }


def logits(base: Mapping[str, Tree], adapters: Tree, x: jax.Array) -> jax.Array:
    """The network's outputs; a layer's weight is an array, or a ScaledArray as it is stored."""
    for name, w in base.items():
        y = sw.scaled.matmul(x, w.T).value()
        if adapters is not None:
            y += x @ adapters[name]["down"] @ adapters[name]["up"]
        x = y if name == "layers.2.weight" else jax.nn.relu(y)
    return x


def cross_entropy(base: Mapping[str, Tree], adapters: Tree, batch: Tree) -> jax.Array:
    """Mean cross entropy, in nats."""
    scores = logits(base, adapters, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]).mean()


def digits(turned: bool) -> tuple[Tree, Tree]:
    """Digits to train on, and others to test with."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.float32(pixels / 16).reshape(-1, 8, 8)
    images = np.rot90(images, axes=(1, 2)) if turned else images
    found = {"images": images.reshape(len(images), -1), "labels": np.asarray(labels, np.int32)}
    return {k: x[:1500] for k, x in found.items()}, {k: x[1500:] for k, x in found.items()}


def batches(data: Tree, seed: int) -> Iterator[Tree]:
    """Random batches without end."""
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.integers(0, len(data["labels"]), 128)
        yield {k: x[chosen] for k, x in data.items()}


def train(loss: Any, params: Tree, frozen: Tree, data: Tree, steps: int) -> Tree:
    """Parameters after a number of steps of Adam; `loss` takes them, what is frozen, a batch."""

    @jax.jit
    def step(params: Tree, state: Tree, frozen: Tree, batch: Tree) -> tuple[Tree, Tree]:
        gradients = jax.grad(loss)(params, frozen, batch)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = OPTIMIZER.init(params)
    for _, batch in zip(range(steps), batches(data, 0), strict=False):
        params, state = step(params, state, frozen, batch)
    return params


def accuracy(base: Mapping[str, Tree], adapters: Tree, data: Tree) -> float:
    """The share of digits that are recognised."""
    return float(np.mean(np.argmax(logits(base, adapters, data["images"]), -1) == data["labels"]))


def run(to: str, layout: str, folder: Path, steps: int = 300) -> dict[str, float]:
    """Accuracies on the test digits."""
    upright, upright_test = digits(turned=False)
    turned, turned_test = digits(turned=True)
    wide = train(lambda base, _, batch: cross_entropy(base, None, batch), init(0), None, upright,
                 steps)  # fmt: skip
    sw.scaled.save_safetensors(folder / "wide.safetensors", wide)
    narrow = folder / f"{to}-{layout}.safetensors"
    sw.checkpoints.cast(folder / "wide.safetensors", to, out=narrow, layout=layout, keep="layers.2")
    tree = sw.checkpoints.load(narrow)
    base = {name: tree[name] for name in wide}
    found = {
        "wide base, upright digits": accuracy(wide, None, upright_test),
        f"{to} base, upright digits": accuracy(base, None, upright_test),
        f"{to} base, turned digits": accuracy(base, None, turned_test),
    }
    for name, frozen in (("wide", wide), (to, base)):
        adapters = train(
            lambda adapters, frozen, batch: cross_entropy(frozen, adapters, batch),
            init_adapters(1, rank=4), frozen, turned, steps,
        )  # fmt: skip
        found[f"{name} base with adapters, turned digits"] = accuracy(frozen, adapters, turned_test)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Adapters (LoRA) on a frozen quantised base.")
    parser.add_argument("--to", default="nvfp4", help="nvfp4, mxfp4, mxfp8_e4m3, e4m3fn")
    parser.add_argument("--layout", default="compressed-tensors")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, share in run(given.to, given.layout, Path(folder)).items():
            print(f"{name}: {share:.1%}")


if __name__ == "__main__":
    main()
