"""Mixed precision: autocast policies, scaled recipes, and programs with dtypes of their own."""

import dataclasses

import jax
import jax.numpy as jnp

import scalewise as sw
from failures.programs import failing, normal, uniform

WIDE = "p=f32,c=f32,o=f32"


def kept(recipe, **formats):
    return dataclasses.replace(recipe, keep=formats)


@failing(
    "https://github.com/mlfoundations/open_clip/issues/80", "c=bf16", "precision cancellation",
    "similarity = 100.0 * (image @ text.T)",
    args=lambda: (unit_rows(0), unit_rows(1)), better=WIDE,
)  # fmt: skip
def similarity_under_autocast(image, text):
    """CLIP's loss at its largest temperature."""
    similarity = 100.0 * (image @ text.T)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(similarity, axis=-1)))


def unit_rows(seed):
    x = normal(16, 32) + 0.15 * normal(16, 32, seed=seed + 1) + 4.0
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@failing(
    "https://github.com/pytorch/pytorch/issues/57109", "c=bf16", "cancellation precision",
    "cross = queries @ places.T", "return squares + jnp.sum(places**2, axis=-1) - 2.0 * cross",
    args=lambda: (normal(8, 3, mean=6.0), normal(12, 3, seed=1, mean=6.0)), better=WIDE,
)  # fmt: skip
def neighbours_under_autocast(queries, places):
    squares = jnp.sum(queries**2, axis=-1, keepdims=True)
    cross = queries @ places.T
    return squares + jnp.sum(places**2, axis=-1) - 2.0 * cross


@failing(
    "https://github.com/NVlabs/stylegan2-ada/issues/34", "c=f16", "underflow",
    "features = jax.lax.conv(image, kernel", "return jnp.mean(jnp.tanh(features) ** 2) / 65536.0",
    args=lambda: (normal(4, 3, 3, 3, scale=0.2), normal(2, 3, 16, 16, seed=1)), better="c=bf16",
)  # fmt: skip
def pixel_gradients(kernel, image):
    """Gradients of a convolution, from a mean over many pixels."""

    def loss(kernel):
        features = jax.lax.conv(image, kernel, (1, 1), "SAME")
        return jnp.mean(jnp.tanh(features) ** 2) / 65536.0

    return jax.grad(loss)(kernel)


@failing(
    "https://github.com/huggingface/transformers/issues/23989", "c=f16", "overflow nan",
    "scores = jnp.einsum(",
    args=lambda: (normal(1, 6, 2, 8, scale=150.0), normal(1, 6, 2, 8, seed=1, scale=150.0),
                  normal(1, 6, 2, 8, seed=2)), better="c=bf16", limit=0.05,
)  # fmt: skip
def late_scaled_attention(query, key, value):
    """Scales the scores after the product, and bounds them by a tanh."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = 8.0 * jnp.tanh(scores / 300000.0)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


@failing(
    "https://github.com/huggingface/transformers/issues/25420", "fp16", "precision",
    "places = jnp.arange(6000).astype(x.dtype)",
    args=lambda: (normal(6000, 4),), native=True,
)  # fmt: skip
def narrowed_positions(x):
    """Positions up to 5,999 in the dtype of the model."""
    places = jnp.arange(6000).astype(x.dtype)
    angles = places[:, None] * jnp.asarray([1.0, 0.25, 0.0625, 0.015625], x.dtype)
    return x * jnp.cos(angles)


def narrowed_positions_fixed(x):
    angles = jnp.arange(6000)[:, None] * jnp.asarray([1.0, 0.25, 0.0625, 0.015625])
    return x * jnp.cos(angles).astype(x.dtype)


@failing(
    "https://github.com/NVIDIA/apex/issues/1422", "fp16", "overflow",
    "power = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1).astype(x.dtype)",
    args=lambda: (normal(8, 64, scale=400.0), uniform(64)), native=True,
)  # fmt: skip
def narrowed_mean_square(x, gain):
    """Computes a mean square in float32, and narrows it before the root."""
    power = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1).astype(x.dtype)
    return x * jax.lax.rsqrt(power + 1e-3)[:, None] * gain


def narrowed_mean_square_fixed(x, gain):
    power = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(power + 1e-3).astype(x.dtype) * gain


@failing(
    "https://github.com/Lightning-AI/torchmetrics/issues/1526", "bf16", "swamping",
    "total = total + loss.astype(total.dtype)",
    args=lambda: (normal(8, 4, scale=0.3), normal(500, 16, 8, seed=1), normal(500, 16, 4, seed=2)),
    native=True,
)  # fmt: skip
def narrow_running_loss(w, xs, ys):
    """Losses in float32, whose total is kept in the weights' dtype."""

    def body(total, batch):
        x, y = batch
        loss = jnp.mean((x.astype(jnp.float32) @ w - y.astype(jnp.float32)) ** 2)
        total = total + loss.astype(total.dtype)
        return total, None

    return jax.lax.scan(body, jnp.zeros((), w.dtype), (xs, ys))[0] / 500.0


def narrow_running_loss_fixed(w, xs, ys):
    def body(total, batch):
        x, y = batch
        loss = jnp.mean((x.astype(jnp.float32) @ w - y.astype(jnp.float32)) ** 2)
        return total + loss, None

    return (jax.lax.scan(body, jnp.float32(0.0), (xs, ys))[0] / 500.0).astype(w.dtype)


@failing(
    "https://github.com/NVIDIA/TransformerEngine/issues/1804", "mxfp8",
    "underflow precision swamping",
    "return block @ w",
    args=lambda: (outlier_in_block(), spared_row()), better=kept(sw.recipes.mxfp8, head="bf16"),
)  # fmt: skip
def outlier_of_block(x, w):
    """Blocks of 32 share a scale, and each has an outlier that the weights hardly read."""
    with jax.named_scope("head"):
        block = jnp.tanh(x) * jnp.where(jnp.arange(64) % 32 == 9, 3e5, 1.0)
        return block @ w


def outlier_in_block():
    x = normal(16, 64)
    x[:, 9::32] = 1.0
    return x


def spared_row():
    w = normal(64, 8, seed=1, scale=0.3)
    w[9::32] = 0.0
    return w


@failing(
    "https://github.com/huggingface/transformers/issues/10956", "bf16", "precision decision",
    "logits = hidden @ head",
    args=lambda: (normal(64, 32, mean=2.0), close_heads(), normal(12, 4, seed=2)),
    native=True,
)  # fmt: skip
def narrowed_logits(hidden, head, table):
    """Greedy tokens of logits that are computed in the dtype of the model and only then widened."""
    logits = hidden @ head
    return table[jnp.argmax(logits.astype(jnp.float32), axis=-1)]


def narrowed_logits_fixed(hidden, head, table):
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    return table[jnp.argmax(logits, axis=-1)]


def close_heads():
    shared = normal(32, 1, seed=1, mean=1.0)
    return (shared + 0.0625 * normal(32, 12, seed=3)).astype("bfloat16").astype("float32")
