"""Programs with correct mixed precision: masks, clamps, parts in float32, loss scales."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from failures.programs import clean, integers, normal
from failures.trainings.models import (
    convolution,
    convolutional,
    cross_entropy,
    image_params,
    language_model,
    language_params,
    pictures,
    recurrent_params,
    sequences,
    text,
    zeros,
)

from .trainings import denoise, denoiser_params, last_state, wide, wide_floats

clean = partial(clean, set="contact", native=True)
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def padded():
    mask = np.arange(12)[None] < np.array([12, 7, 3, 0])[:, None]
    return normal(4, 12, 16), normal(4, 12, 16, seed=1), normal(4, 12, 16, seed=2), mask


@clean("https://github.com/jax-ml/jax/issues/16417", "fp16", padded)
def masked_attention(query, key, value, mask):
    """One sequence is empty: its mask has no key, and its output is zero."""
    scores = jnp.einsum("bqd,bkd->bqk", query * 0.25, key).astype(jnp.float32)
    scores = jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min)
    shares = jnp.where(mask[:, None], jax.nn.softmax(scores), 0.0).astype(value.dtype)
    return shares @ value


@clean("https://arxiv.org/abs/1710.03740", "bf16", lambda: (
    language_params(), ADAMW.init(language_params()), text()))  # fmt: skip
def mixed_language_step(params, state, batch):
    """The model in 16 bits, loss and AdamW in float32."""
    master = wide(params)

    def loss(master):
        low = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
        logits = language_model(low, batch["tokens"]).astype(jnp.float32)
        return cross_entropy(logits, batch["targets"])

    value, gradients = jax.value_and_grad(loss)(master)
    updates, state = ADAMW.update(gradients, wide_floats(state), master)
    return optax.apply_updates(master, updates), state, value


def scaled_state():
    params = recurrent_params()
    return {"params": params, "velocity": zeros(params)}, sequences(), np.int32(10)


@clean("https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/", "fp16",
       scaled_state)  # fmt: skip
def recurrent_step_with_dynamic_scale(state, batch, exponent):
    """The exponent of the scale is an integer; steps that overflow are skipped."""
    scale = 2.0 ** exponent.astype(jnp.float32)

    def loss(params):
        logits = last_state(params, batch["series"]) @ params["head"]
        return scale * cross_entropy(logits.astype(jnp.float32), batch["labels"])

    gradients = jax.tree.map(lambda g: g / scale, wide(jax.grad(loss)(state["params"])))
    finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]).all()
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, wide(state["velocity"]), gradients)
    params = jax.tree.map(lambda p, v: p - 0.1 * v, wide(state["params"]), velocity)
    new, old = {"params": params, "velocity": velocity}, wide(state)
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old), exponent - 1 + finite


@clean("https://arxiv.org/abs/1502.03167", "fp16", lambda: (image_params(), pictures()))
def image_step_with_wide_norm(params, batch):
    def norm(x):
        x = wide(x)
        centred = x - jnp.mean(x, axis=(0, 1, 2))
        return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=(0, 1, 2)) + 1e-5)

    def loss(params):
        x = convolution(batch["images"], params["first"]) + params["shift"]
        x = jax.nn.relu(norm(x)).astype(x.dtype)
        x = jax.nn.relu(convolution(x, params["second"], stride=2))
        return cross_entropy(wide(jnp.mean(x, axis=(1, 2)) @ params["head"]), batch["labels"])

    gradients = wide(jax.grad(loss)(params))
    return jax.tree.map(lambda p, g: p - 0.1 * g, wide(params), gradients)


@clean("https://arxiv.org/abs/2006.11239", "bf16", lambda: (
    denoiser_params(), normal(16, 16, seed=5), normal(16, 16, seed=6)))  # fmt: skip
def denoising_loss(params, data, noise):
    """The schedule in float32, from integers."""
    t = jnp.arange(16) * 60
    betas = jnp.linspace(8.5e-4**0.5, 0.012**0.5, 1000, dtype=jnp.float32) ** 2
    kept = jnp.exp(jnp.cumsum(jnp.log1p(-betas)))[t][:, None]
    noised = jnp.sqrt(kept) * wide(data) + jnp.sqrt(1.0 - kept) * wide(noise)
    guess = denoise(params, noised.astype(data.dtype), t / 1000.0)
    return jnp.mean((wide(guess) - wide(noise)) ** 2)


@clean("https://arxiv.org/abs/1707.06347", "bf16", lambda: (
    language_params(), text(), normal(4, 12, scale=0.1), normal(4, 12, seed=1)))  # fmt: skip
def clipped_policy_loss(params, batch, drift, advantages):
    logs = jax.nn.log_softmax(wide(language_model(params, batch["tokens"])))
    logs = jnp.take_along_axis(logs, batch["targets"][..., None], axis=-1)[..., 0]
    ratio = jnp.exp(logs - jax.lax.stop_gradient(logs) + wide(drift))
    clipped = jnp.clip(ratio, 0.5, 2.0)
    return -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages))


def averaged():
    params = image_params()
    old = jax.tree.map(lambda p: p + normal(*p.shape, seed=p.size, scale=0.1), params)
    return {"params": params, "average": old}, pictures()


@clean("https://arxiv.org/abs/1806.04498", "bf16", averaged)
def image_step_with_wide_average(state, batch):
    def loss(params):
        return cross_entropy(wide(convolutional(params, batch["images"])), batch["labels"])

    gradients = wide(jax.grad(loss)(state["params"]))
    params = jax.tree.map(lambda p, g: p - 0.1 * g, wide(state["params"]), gradients)
    average = jax.tree.map(lambda a, p: a + 1e-4 * (p - a), wide(state["average"]), params)
    return {"params": params, "average": average}


@clean("https://arxiv.org/abs/1708.02002", "fp16", lambda: (
    normal(64, scale=6.0), integers(64, high=2)))  # fmt: skip
def focal_loss(logits, labels):
    """From logits, and with a clamp of what is raised to a power."""
    sign = 1 - 2 * labels
    losses = jax.nn.softplus(sign * logits)
    wrong = jnp.clip(jax.nn.sigmoid(sign * logits), 1e-3, 1.0)
    return jnp.sum(wrong**2 * losses) / 64
