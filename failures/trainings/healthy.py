"""Training steps that are right in the arithmetic that they use."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from failures.programs import clean

from .models import (
    at_rest,
    convolutional,
    cross_entropy,
    descend,
    image_params,
    language_model,
    language_params,
    pictures,
    recurrent_cell,
    recurrent_params,
    sequences,
    text,
    with_momentum,
    zeros,
)

clean = partial(clean, set="trainings")
MIXED = "p=f32,c=bf16,o=f32"


def language_loss(params, batch):
    return cross_entropy(language_model(params, batch["tokens"]), batch["targets"])


def image_loss(params, batch):
    return cross_entropy(convolutional(params, batch["images"]), batch["labels"])


def moments(params):
    """Returns moments as after a training, much larger than Adam's epsilon."""
    mean = jax.tree.map(lambda p: np.float32(0.003 * np.sign(p)), params)
    square = jax.tree.map(lambda p: np.full(p.shape, 1e-3, np.float32), params)
    return {"mean": mean, "square": square, "count": np.int32(100)}


@clean(
    "https://arxiv.org/abs/1412.6980", MIXED,
    lambda: (language_params(), moments(language_params()), text()),
)  # fmt: skip
def language_step_with_float32_adam(params, state, batch):
    value, gradients = jax.value_and_grad(language_loss)(params, batch)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["square"], gradients)
    count = state["count"] + 1
    rate = 1e-3 * jnp.sqrt(1.0 - 0.999**count) / (1.0 - 0.9**count)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, mean, square)
    return params, {"mean": mean, "square": square, "count": count}, value


@clean("https://arxiv.org/abs/1706.03762", "fp16", lambda: (language_params(), text()))
def language_step_in_half(params, batch):
    value, gradients = jax.value_and_grad(language_loss)(params, batch)
    return descend(params, gradients, 0.1), value


@clean("https://arxiv.org/abs/1905.12322", "bf16", lambda: (at_rest(image_params()), pictures()))
def image_step_with_momentum(state, batch):
    value, gradients = jax.value_and_grad(image_loss)(state["params"], batch)
    return with_momentum(state, gradients, 0.1)["params"], value


ADAMW = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 5, 50)),
)


def optimized(params, batch):
    return params, ADAMW.init(params), batch


@clean(
    "https://arxiv.org/abs/1711.05101", MIXED, lambda: optimized(recurrent_params(), sequences())
)
def recurrent_step_with_adamw(params, state, batch):
    def loss(params):
        start = jnp.zeros((8, 16), batch["series"].dtype)

        def body(hidden, x):
            return recurrent_cell(params, hidden, x), None

        hidden = jax.lax.scan(body, start, jnp.swapaxes(batch["series"], 0, 1))[0]
        return cross_entropy(hidden @ params["head"], batch["labels"])

    for _ in range(2):
        updates, state = ADAMW.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return params, loss(params)


@clean("https://arxiv.org/abs/1710.03740", "fp16", lambda: (image_params(), pictures()))
def image_step_with_scaled_loss(params, batch):
    def loss(params):
        return 128.0 * image_loss(params, batch)

    value, gradients = jax.value_and_grad(loss)(params)
    gradients = jax.tree.map(lambda g: g / 128.0, gradients)
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()
    new = descend(params, gradients, 0.1)
    params = jax.tree.map(lambda n, p: jnp.where(finite, n, p), new, params)
    return params, value / 128.0


MUON = optax.contrib.muon(0.02)


@clean(
    "https://arxiv.org/abs/2502.16982", MIXED,
    lambda: (language_params(), MUON.init(language_params()), text()),
)  # fmt: skip
def language_step_with_float32_muon(params, state, batch):
    value, gradients = jax.value_and_grad(language_loss)(params, batch)
    updates, state = MUON.update(gradients, state, params)
    return optax.apply_updates(params, updates), value


def few_batches():
    batches = [pictures(seed) for seed in range(4)]
    return image_params(), {n: np.stack([x[n] for x in batches]) for n in batches[0]}


@clean("https://arxiv.org/abs/1706.02677", "bf16", few_batches)
def image_step_of_four_batches(params, batches):
    """Adds the gradients of four batches, and averages weights with a decay of 3/4."""

    def add(total, batch):
        gradients = jax.grad(image_loss)(params, batch)
        return jax.tree.map(lambda t, g: t + g, total, gradients), None

    gradients = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]
    new = descend(params, gradients, 0.05)
    return new, jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, params, new)


def wide_norm(x):
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)


@clean(
    "https://arxiv.org/abs/2204.02311", "bf16",
    lambda: (language_params(), zeros(language_params()), text()), native=True,
)  # fmt: skip
def language_step_with_wide_parts(params, velocity, batch):
    """Norms, loss and optimizer in float32, all else in the dtype of the parameters."""

    def loss(params):
        logits = language_model(params, batch["tokens"], norm=wide_norm)
        return cross_entropy(logits.astype(jnp.float32), batch["targets"])

    value, gradients = jax.value_and_grad(loss)(params)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    new = jax.tree.map(lambda p, v: p.astype(jnp.float32) - 0.1 * v, params, velocity)
    return new, value
