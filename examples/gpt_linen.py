"""A transformer as in MaxText: Flax Linen, a scan over layers with remat, bfloat16, a TrainState.

It doesn't deal with low precision: `scalewise compare examples/gpt_linen.py` does.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 64, 4, 64, 8


def dense(features: int, axes: tuple[str, str], **options: Any) -> nn.Dense:
    """A layer in bfloat16 with float32 weights, whose axes have names for a mesh."""
    kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
    return nn.Dense(features, use_bias=False, dtype=jnp.bfloat16, kernel_init=kernel, **options)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        q, k, v = jnp.split(dense(3 * WIDTH, ("embed", "heads"), name="qkv")(h), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], HEADS, -1) for a in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + dense(WIDTH, ("heads", "embed"), name="out")(mixed)
        h = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        h = nn.silu(dense(4 * WIDTH, ("embed", "mlp"), name="up")(h))
        return x + dense(WIDTH, ("mlp", "embed"), name="down")(h), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, WIDTH, dtype=jnp.bfloat16)(tokens)
        position = self.param("position", nn.initializers.normal(0.02), (CONTEXT, WIDTH))
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(name="layers")(x + position.astype(jnp.bfloat16), None)
        logits = dense(256, ("embed", "vocab"))(nn.RMSNorm(dtype=jnp.bfloat16)(x))
        return logits.astype(jnp.float32)


def init(seed: int) -> TrainState:
    params = Decoder().init(jax.random.key(seed), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    return TrainState.create(apply_fn=Decoder().apply, params=params, tx=optimizer)


def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def batches(data: bytes, seed: int) -> Iterator[np.ndarray]:
    """Random windows of the text, one byte longer than the context, without end."""
    text, random = np.frombuffer(data, np.uint8), np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - CONTEXT, (BATCH, 1))
        yield text[starts + np.arange(CONTEXT + 1)].astype(np.int32)
