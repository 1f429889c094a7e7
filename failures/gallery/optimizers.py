"""Training steps whose gradients, moments, updates or averages a 16-bit format loses."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.random import bits, key, normal, split

CAREFUL = optax.apply_if_finite(optax.sgd(1e-5), max_consecutive_errors=3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
CLIPPED_FIXED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, eps=6.2e-5))
ADAM = optax.adam(1e-3, b2=0.999)
MOMENTUM = optax.sgd(1e-4, momentum=0.9)


def mlp_params(seed, inputs, hidden, outputs):
    first, second = split(key(seed))
    return {
        "w1": normal(first, (inputs, hidden)) * inputs**-0.5,
        "b1": jnp.zeros(hidden),
        "w2": normal(second, (hidden, outputs)) * hidden**-0.5,
    }


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"][None, :])
    return hidden @ params["w2"]


def squared_error(params, x, y):
    return jnp.mean(jnp.square(mlp(params, x) - y))


def raw_features(params, x):
    hidden = jax.nn.relu(x @ params["w1"])  # <- here
    return hidden @ params["w2"]


def cautious_step(params, state, x, y, scale=1.0, optimizer=CAREFUL):
    """Regression on features that aren't normalised; skips updates that aren't finite."""

    def loss(params):
        return jnp.sum(jnp.abs(raw_features(params, x) - y)) * scale

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return updates, state


def cautious_step_arguments():
    params = mlp_params(0, 8, 16, 1)
    params = {"w1": params["w1"] * 1e-3, "w2": params["w2"]}
    x = 4000.0 * (2.0 + normal(key(1), (64, 8)))
    return params, CAREFUL.init(params), x, 100.0 + normal(key(2), (64, 1))


def cautious_step_fixed(params, state, x, y):
    optimizer = optax.apply_if_finite(optax.sgd(1e-5 * 64), max_consecutive_errors=3)
    return cautious_step(params, state, x, y, 1 / 64, optimizer)


def statically_scaled_step(params, x, y, scale=65536.0):
    """A step with a static loss scale, left out if a gradient isn't finite."""

    def scaled_loss(params):
        logs = jax.nn.log_softmax(mlp(params, x))
        loss = -jnp.mean(jnp.take_along_axis(logs, y[:, None], axis=1))
        return loss * scale  # <- here

    gradients = jax.tree.map(lambda g: g / scale, jax.grad(scaled_loss)(params))  # <- here
    finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]))
    new = jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients)
    return jax.tree.map(lambda w, old: jnp.where(finite, w, old) - old, new, params)


def statically_scaled_step_arguments():
    labels = jax.random.randint(key(2), (16,), 0, 4)
    return mlp_params(0, 8, 16, 4), normal(key(1), (16, 8)), labels


def statically_scaled_step_fixed(params, x, y):
    return statically_scaled_step(params, x, y, scale=1024.0)


def global_norm(gradients):
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))  # <- here


def clipped_or_skipped_step(params, x, y):
    """Clips gradients to a norm of 1, and skips the step if the norm isn't finite."""
    gradients = jax.grad(lambda params: 64.0 * squared_error(params, x, y))(params)
    norm = global_norm(gradients)

    def apply(params):
        share = jnp.minimum(1.0, 1.0 / norm)
        return jax.tree.map(lambda g: -0.1 * share * g, gradients)

    def skip(params):
        return jax.tree.map(jnp.zeros_like, params)

    return jax.lax.cond(jnp.isfinite(norm), apply, skip, params)


def clipped_or_skipped_step_arguments():
    return mlp_params(0, 8, 16, 1), normal(key(1), (16, 8)), 10.0 * normal(key(2), (16, 1))


def layer_norm(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-3)


def language_model(params, tokens):
    """A causal transformer of one layer."""
    x = params["tokens"][tokens]
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    query, keys, value = jnp.split(layer_norm(x) @ params["qkv"], 3, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", query, keys) * x.shape[-1] ** -0.5
    x = x + jax.nn.softmax(jnp.where(causal[None], scores, -1e4)) @ value @ params["out"]
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    return layer_norm(x) @ params["head"]


def language_model_step(params, state, tokens, optimizer=CLIPPED):
    """A step with Adam behind clipping; most of the vocabulary is unused."""

    def loss(params):
        logs = jax.nn.log_softmax(language_model(params, tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], axis=2))

    gradients = jax.grad(loss)(params)
    updates, state = optimizer.update(gradients, state, params)  # <- here
    return updates, state


def language_model_step_arguments():
    """Parameters, the moments of a training that has gone on for long, and a batch."""
    width, used = 8, jnp.arange(16)[:, None] < 4
    shapes = {"tokens": (16, width), "qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 2 * width), "down": (2 * width, width), "head": (width, 16)}
    keys = split(key(0), len(shapes))
    params = {n: normal(k, s) * 0.3 for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    first, second = (jax.tree.map(lambda w, c=c: c * jnp.abs(w), params) for c in (0.01, 0.001))
    for moment in (first, second):
        moment["tokens"] = jnp.where(used, moment["tokens"], 0.0)
    state = optax.tree_utils.tree_set(
        CLIPPED.init(params), count=jnp.array(999), mu=first, nu=second
    )
    return params, state, jax.random.randint(key(1), (2, 9), 0, 4)


def language_model_step_fixed(params, state, tokens):
    return language_model_step(params, state, tokens, CLIPPED_FIXED)


def adam_step(params, state, x, y):
    """A step of Adam with the usual decay of 0.999."""
    gradients = jax.grad(squared_error)(params, x, y)
    updates, state = ADAM.update(gradients, state, params)  # <- here
    return updates


def adam_step_arguments():
    params = mlp_params(0, 8, 16, 1)
    return params, ADAM.init(params), normal(key(1), (16, 8)), normal(key(2), (16, 1))


def averaged_training(params, batches):
    """Trains for some steps; returns how far the weights and their moving average have moved."""

    def step(carry, batch):
        params, average, state = carry
        gradients = jax.grad(squared_error)(params, *batch)
        updates, state = MOMENTUM.update(gradients, state)
        params = jax.tree.map(lambda w, u: w + u, params, updates)  # <- here
        average = jax.tree.map(lambda a, w: 0.9999 * a + 0.0001 * w, average, params)  # <- here
        return (params, average, state), None

    average = jax.tree.map(lambda w: 0.5 * w, params)
    (trained, moved, _), _ = jax.lax.scan(step, (params, average, MOMENTUM.init(params)), batches)
    difference = partial(jax.tree.map, lambda new, old: new - old)
    return difference(trained, params), difference(moved, average)


def averaged_training_arguments():
    params = mlp_params(0, 8, 16, 1) | {"b1": jnp.ones(16)}
    return params, (normal(key(1), (8, 16, 8)), normal(key(2), (8, 16, 1)))


def accumulated_gradients(params, xs, ys):
    """Adds up the gradients of many micro-batches."""

    def add(total, batch):
        gradients = jax.grad(squared_error)(params, *batch)
        return jax.tree.map(lambda t, g: t + g, total, gradients), None  # <- here

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (xs, ys))
    return jax.tree.map(lambda t: t / len(xs), total)


def accumulated_gradients_arguments():
    xs = normal(key(1), (400, 2, 4))
    return mlp_params(0, 4, 8, 1), xs, 3.0 + xs @ jnp.array([[1.0], [-2.0], [0.5], [1.0]])


def stochastically_rounded(x, random):
    """Rounds float32 to the digits of BF16, up with the probability of the digits cut off."""
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    word = (word + (random & 0xFFFF)) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(word, jnp.float32)


def stochastic_update(params, x, y, random):
    """A step of gradient descent whose new weights are rounded up or down at random."""
    gradients = jax.grad(squared_error)(params, x, y)
    moved = jax.tree.map(lambda w, g: w - 1e-3 * g, params, gradients)  # <- here
    new = jax.tree.map(stochastically_rounded, moved, random)
    return jax.tree.map(lambda w, old: w - old, new, params)


def stochastic_update_arguments():
    params = mlp_params(0, 8, 16, 1) | {"b1": jnp.ones(16)}
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)
    keys = split(key(3), 3)
    random = {n: bits(k, w.shape) for k, (n, w) in zip(keys, params.items(), strict=True)}
    return params, normal(key(1), (16, 8)), normal(key(2), (16, 1)), random
