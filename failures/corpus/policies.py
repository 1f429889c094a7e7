"""Mixed precision: autocast policies, and programs with dtypes of their own."""

import jax
import jax.numpy as jnp

from failures.programs import failing, integers, normal, uniform


def dense(x, w):
    return jax.nn.relu(x @ w)


@failing(
    "https://github.com/engichang1467/Open-Rig3R/issues/35", "c=f16", "underflow",
    "hidden = x @ params", "predicted = jnp.tanh(hidden) @ params",
    args=lambda: ({"in": normal(16, 32, scale=0.2), "out": normal(32, 4, seed=1, scale=0.2)},
                  normal(32, 16, seed=2), normal(32, 4, seed=3)),
    better="c=bf16",
)  # fmt: skip
def unscaled_gradients(params, x, y):
    def loss(params):
        hidden = x @ params["in"]
        predicted = jnp.tanh(hidden) @ params["out"]
        return 1e-6 * jnp.mean((predicted - y) ** 2)

    return jax.grad(loss)(params)


@failing(
    "https://github.com/huggingface/transformers/pull/19229",
    "c=f16",
    "overflow",
    "forwarded = (dense(x, wi) * gate) @ wo",
    args=lambda: (
        normal(6, 16),
        normal(16, 64, seed=1, scale=2.0),
        normal(64, 16, seed=2, scale=60.0),
        jnp.full(64, 20.0),
    ),
    better="c=bf16",
)
def t5_block_under_autocast(x, wi, wo, gate):
    forwarded = (dense(x, wi) * gate) @ wo
    return forwarded / jnp.sqrt(jnp.mean((forwarded / 1024.0) ** 2) + 1e-3)


@failing(
    "https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/12019", "c=f16", "overflow nan",
    'jax.lax.conv(image, kernel, (1, 1), "SAME")',
    args=lambda: (normal(1, 8, 8, 8, scale=900.0), normal(8, 8, 3, 3, seed=1, scale=6.0)),
    better="c=bf16",
)  # fmt: skip
def vae_decoder_block(image, kernel):
    wide = jax.lax.conv(image, kernel, (1, 1), "SAME")
    centred = (wide - jnp.mean(wide)) / 1024.0
    return centred / jnp.sqrt(jnp.mean(centred**2) + 1e-6)


@failing(
    "https://github.com/apple/coreai-torch/pull/54", "fp16", "overflow",
    "scale = gain.astype(x.dtype) / jnp.sqrt(variance.astype(x.dtype) + 1e-5)",
    args=lambda: (normal(8, 16, scale=900.0), uniform(16, low=2e4, high=6e4), uniform(16, seed=1)),
    native=True,
)  # fmt: skip
def narrowed_batch_norm(x, variance, gain):
    """Statistics are kept as thousandths in float16, and narrowed after they are restored."""
    variance = 1000.0 * (variance.astype(jnp.float32) / 16.0)
    scale = gain.astype(x.dtype) / jnp.sqrt(variance.astype(x.dtype) + 1e-5)
    return x * scale


def narrowed_batch_norm_fixed(x, variance, gain):
    variance = 1000.0 * (variance.astype(jnp.float32) / 16.0)
    scale = gain.astype(jnp.float32) / jnp.sqrt(variance + 1e-5)
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


@failing(
    "https://github.com/google/flax/issues/612", "fp16", "overflow",
    "squares = jnp.square(x)",
    args=lambda: (normal(8, 64, scale=250.0), uniform(64)),
    native=True,
)  # fmt: skip
def late_upcast_norm(x, gain):
    """Converts to float32 only after the squares."""
    squares = jnp.square(x)
    mean = jnp.mean(squares.astype(jnp.float32), axis=-1, keepdims=True)
    return (x.astype(jnp.float32) * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * gain


def late_upcast_norm_fixed(x, gain):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * gain


@failing(
    "https://github.com/kyegomez/OpenMythos/pull/41", "bf16", "precision decision",
    "scores = jax.nn.softmax(logits.astype(jnp.float32)).astype(logits.dtype)",
    args=lambda: (close_logits(), normal(8, 4, seed=1)), native=True, limit=0.2,
)  # fmt: skip
def narrowed_router(logits, experts):
    """Narrows the probabilities of a router before it takes the largest."""
    scores = jax.nn.softmax(logits.astype(jnp.float32)).astype(logits.dtype)
    return experts[jnp.argmax(scores, axis=-1)]


def narrowed_router_fixed(logits, experts):
    return experts[jnp.argmax(logits.astype(jnp.float32), axis=-1)]


def close_logits():
    steps = integers(96, 8, seed=3, high=4)
    return jnp.float32(2.0**-7) * steps - 2.0**-9 * jnp.arange(8)


@failing(
    "https://github.com/deepspeedai/DeepSpeed/issues/1800", "bf16", "swamping",
    "total = total + gradient.astype(total.dtype)",
    args=lambda: (normal(16, 4, scale=0.2), uniform(400, 8, 16), uniform(400, 8, 4, seed=1)),
    native=True,
)  # fmt: skip
def accumulated_micro_batches(w, xs, ys):
    """Computes gradients in float32 and sums them in the weights' dtype."""

    def loss(w, x, y):
        return jnp.mean((x.astype(jnp.float32) @ w - y.astype(jnp.float32)) ** 2)

    def body(total, batch):
        gradient = jax.grad(loss)(w.astype(jnp.float32), *batch)
        total = total + gradient.astype(total.dtype)
        return total, None

    return jax.lax.scan(body, jnp.zeros_like(w), (xs, ys))[0]


def accumulated_micro_batches_fixed(w, xs, ys):
    def loss(w, x, y):
        return jnp.mean((x.astype(jnp.float32) @ w - y.astype(jnp.float32)) ** 2)

    def body(total, batch):
        return total + jax.grad(loss)(w.astype(jnp.float32), *batch), None

    total = jax.lax.scan(body, jnp.zeros(w.shape, jnp.float32), (xs, ys))[0]
    return total.astype(w.dtype)
