"""Steps of small convolutional and recurrent classifiers, with one fault in each."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from failures.programs import failing, integers, normal

from .models import (
    CLASSES,
    WIDTH,
    at_rest,
    convolutional,
    cross_entropy,
    descend,
    image_params,
    pictures,
    recurrent_cell,
    recurrent_params,
    sequences,
    with_momentum,
    zeros,
)

failing = partial(failing, set="trainings")
HALF = "p=f32,c=f16,o=f32"


def gradient_norm(gradients):
    return jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))


def scaled_norm(gradients):
    largest = jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(gradients)]).max()
    return largest * gradient_norm(jax.tree.map(lambda g: g / largest, gradients))


@failing(
    "https://github.com/google-deepmind/jax_privacy/issues/14", "fp16", "overflow",
    "return jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))",
    args=lambda: (image_params(), pictures()), inside=(gradient_norm,), change=True, limit=0.05,
)  # fmt: skip
def clipped_step(params, batch, norm=gradient_norm):
    """Scales the loss by 1024, and clips to a norm of 1/2 after it."""

    def loss(params):
        logits = convolutional(params, batch["images"])
        return 1024.0 * cross_entropy(logits, batch["labels"])

    value, gradients = jax.value_and_grad(loss)(params)
    share = jnp.minimum(1.0, 0.5 / norm(gradients))
    return descend(params, jax.tree.map(lambda g: share * g, gradients), 0.5), value


def clipped_step_fixed(params, batch):
    return clipped_step(params, batch, norm=scaled_norm)


def averaged_state():
    params = image_params()
    old = jax.tree.map(lambda p: p + normal(*p.shape, seed=p.size, scale=0.3), params)
    return {"params": params, "average": old}, pictures()


@failing(
    "https://github.com/pytorch/pytorch/issues/64966", "bf16", "swamping precision",
    "lambda a, p: 0.9999 * a + 0.0001 * p, state",
    args=averaged_state, native=True, change=True, limit=0.3,
)  # fmt: skip
def averaging_step(state, batch):
    """Weights in float32 from here on; their average stays in the dtype that it had."""

    def loss(params):
        return cross_entropy(convolutional(params, batch["images"]), batch["labels"])

    gradients = jax.grad(loss)(state["params"])
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), state["params"])
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    params = descend(wide, gradients, 0.5)
    narrow = jax.tree.map(lambda p, a: p.astype(a.dtype), params, state["average"])
    average = jax.tree.map(lambda a, p: 0.9999 * a + 0.0001 * p, state["average"], narrow)
    return {"params": params, "average": average}


def averaging_step_fixed(state, batch):
    def loss(params):
        return cross_entropy(convolutional(params, batch["images"]), batch["labels"])

    gradients = jax.grad(loss)(state["params"])
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), state)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    params = descend(wide["params"], gradients, 0.5)
    average = jax.tree.map(lambda a, p: a + 0.0001 * (p - a), wide["average"], params)
    return {"params": params, "average": average}


def standardised(images):
    centred = images - jnp.mean(images, axis=(1, 2), keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=(1, 2), keepdims=True) + 1e-3)


def standardised_in_units(images):
    return standardised(images / 1024.0 * 8.0)


def counts_of_photons():
    return at_rest(image_params()), pictures() | {"images": normal(8, 8, 8, 3, scale=900.0)}


@failing(
    "https://github.com/pytorch/pytorch/issues/66707", "fp16", "overflow",
    "return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=(1, 2), keepdims=True) + 1e-3)",
    args=counts_of_photons, inside=(standardised,),
)  # fmt: skip
def standardising_step(state, batch, standardise=standardised):
    def loss(params):
        logits = convolutional(params, standardise(batch["images"]))
        return cross_entropy(logits, batch["labels"])

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return with_momentum(state, gradients, 0.1), value


def standardising_step_fixed(state, batch):
    return standardising_step(state, batch, standardise=standardised_in_units)


ADAM = optax.adam(1e-2, eps=1e-12)


def small_targets():
    params = image_params()
    return params, ADAM.init(params), pictures() | {"targets": normal(8, CLASSES, seed=4)}


@failing(
    "https://arxiv.org/abs/1710.03740", HALF, "underflow precision",
    'predicted = convolutional(params, batch["images"])',
    args=small_targets, change=True,
)  # fmt: skip
def unscaled_step(params, state, batch, scale=1.0):
    """A term of a loss with a small weight; its gradients are below the smallest float16."""

    def loss(params):
        predicted = convolutional(params, batch["images"])
        return scale * 1e-7 * jnp.mean((predicted - batch["targets"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    gradients = jax.tree.map(lambda g: g / scale, gradients)
    updates, state = ADAM.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value / scale


def unscaled_step_fixed(params, state, batch):
    return unscaled_step(params, state, batch, scale=2.0**20)


def recurrent(params, series):
    """The sum of all states of a recurrent layer."""

    def body(carry, x):
        hidden, total = carry
        hidden = recurrent_cell(params, hidden, x)
        total = total + hidden
        return (hidden, total), None

    start = jnp.zeros((series.shape[0], WIDTH), series.dtype)
    (_, total), _ = jax.lax.scan(body, (start, start), jnp.swapaxes(series, 0, 1))
    return total


def recurrent_fixed(params, series):
    def body(hidden, x):
        hidden = recurrent_cell(params, hidden, x)
        return hidden, hidden

    start = jnp.zeros((series.shape[0], WIDTH), series.dtype)
    return jnp.sum(jax.lax.scan(body, start, jnp.swapaxes(series, 0, 1))[1], axis=0)


def long_series():
    """Series of 700 steps with a mean, which the states follow."""
    batch = sequences(batch=4, length=700)
    params = recurrent_params()
    params["inputs"][:, 2 * WIDTH :] *= 0.3
    return params, {"series": batch["series"] * 0.5 + 1.0, "labels": batch["labels"]}


@failing(
    "https://github.com/jax-ml/ml_dtypes/issues/63", "bf16", "swamping accumulation precision",
    "total = total + hidden",
    args=long_series, inside=(recurrent,), limit=0.1,
)  # fmt: skip
def recurrent_step(params, batch, summed=recurrent):
    """The head reads the mean state of a long series; only the head is trained."""

    def loss(head):
        pooled = summed(params, batch["series"]) / 700.0
        return cross_entropy(pooled @ head, batch["labels"]), pooled

    (value, pooled), gradient = jax.value_and_grad(loss, has_aux=True)(params["head"])
    return params | {"head": params["head"] - 0.1 * gradient}, value, pooled


def recurrent_step_fixed(params, batch):
    return recurrent_step(params, batch, summed=recurrent_fixed)


def orthogonal(gradient):
    """Newton and Schulz's iteration towards the nearest orthogonal matrix."""
    x = gradient / (jnp.sqrt(jnp.sum(gradient * gradient)) + 1e-12)
    for _ in range(3):
        square = x @ x.T
        x = 1.5 * x - 0.5 * square @ x
    return x


def orthogonal_fixed(gradient):
    largest = jnp.max(jnp.abs(gradient))
    return orthogonal(gradient / largest)


@failing(
    "https://github.com/davda54/sam/issues/7", "fp16", "underflow nan overflow",
    "x = gradient / (jnp.sqrt(jnp.sum(gradient * gradient)) + 1e-12)",
    args=lambda: (image_params(), pictures()), inside=(orthogonal,), change=True,
)  # fmt: skip
def orthogonal_step(params, batch, direction=orthogonal):
    """Trains the head with Muon, by a loss that is small."""

    def loss(head):
        logits = convolutional(params | {"head": head}, batch["images"])
        return 1e-3 * cross_entropy(logits, batch["labels"])

    gradient = jax.grad(loss)(params["head"])
    return params | {"head": params["head"] - 0.25 * direction(gradient)}


def orthogonal_step_fixed(params, batch):
    return orthogonal_step(params, batch, direction=orthogonal_fixed)


def correction(decay, count):
    return 1.0 - jnp.asarray(decay, count.dtype) ** count


def correction_fixed(decay, count):
    return -jnp.expm1(count * math.log(decay))


def fresh_moments():
    params = image_params()
    state = {"mean": zeros(params), "square": zeros(params), "count": np.float32(1.0)}
    return params, state, pictures()


@failing(
    "https://github.com/tenstorrent/tt-metal/issues/55935", "bf16",
    "precision overflow nan cancellation amplified swamping",
    "return 1.0 - jnp.asarray(decay, count.dtype) ** count",
    args=fresh_moments, inside=(correction,), change=True, limit=0.3,
)  # fmt: skip
def corrected_step(params, state, batch, correct=correction):
    """Adam's second moment without a first one; the first step."""

    def loss(params):
        return cross_entropy(convolutional(params, batch["images"]), batch["labels"])

    value, gradients = jax.value_and_grad(loss)(params)
    count = state["count"]
    square = jax.tree.map(lambda v, g: v + 0.001 * (g * g - v), state["square"], gradients)
    share = correct(0.999, count)

    def new(p, g, v):
        return p - 0.05 * g / (jnp.sqrt(v / share) + 1e-3)

    params = jax.tree.map(new, params, gradients, square)
    return params, {"square": square, "count": count + 1.0}, value


def corrected_step_fixed(params, state, batch):
    return corrected_step(params, state, batch, correct=correction_fixed)


def binary_cross_entropy(logits, labels):
    p = jax.nn.sigmoid(logits)
    return -jnp.mean(labels * jnp.log(p) + (1.0 - labels) * jnp.log(1.0 - p))


def binary_cross_entropy_fixed(logits, labels):
    return -jnp.mean(
        labels * jax.nn.log_sigmoid(logits) + (1.0 - labels) * jax.nn.log_sigmoid(-logits)
    )


def several_labels():
    params = image_params()
    params["head"] = params["head"] * 14.0
    labels = np.float32(integers(8, CLASSES, seed=3, high=2))
    return at_rest(params), pictures() | {"labels": labels}


@failing(
    "https://arxiv.org/abs/1708.02002", "bf16", "cancellation overflow nan precision underflow",
    "p = jax.nn.sigmoid(logits)",
    "return -jnp.mean(labels * jnp.log(p) + (1.0 - labels) * jnp.log(1.0 - p))",
    args=several_labels, inside=(binary_cross_entropy,),
)  # fmt: skip
def labelling_step(state, batch, compare=binary_cross_entropy):
    def loss(params):
        return compare(convolutional(params, batch["images"]), batch["labels"])

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return with_momentum(state, gradients, 0.05), value


def labelling_step_fixed(state, batch):
    return labelling_step(state, batch, compare=binary_cross_entropy_fixed)


def normalised(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-10)


def normalised_fixed(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-5)


ADAMW = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 50))
)


def blank_pictures():
    """Two pictures are blank, and none of their features is active."""
    params = image_params()
    params["shift"] = -np.abs(params["shift"])
    batch = pictures()
    batch["images"][2:4] = 0.0
    return params, ADAMW.init(params), batch


@failing(
    "https://github.com/kornia/kornia/issues/4224", "fp16", "underflow nan overflow",
    "return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-10)",
    args=blank_pictures, inside=(normalised,), native=True,
)  # fmt: skip
def normalising_step(params, state, batch, normalise=normalised):
    """Cosines with a direction of each class; the optimizer is in float32."""

    def loss(params):
        pooled = convolutional(params, batch["images"], head=False)
        return cross_entropy(8.0 * normalise(pooled) @ params["head"], batch["labels"])

    value, gradients = jax.value_and_grad(loss)(params)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    updates, state = ADAMW.update(gradients, state, params)
    return optax.apply_updates(params, updates), value


def normalising_step_fixed(params, state, batch):
    return normalising_step(params, state, batch, normalise=normalised_fixed)


STEPS = 1024


def remaining(step):
    progress = step / STEPS
    return 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def remaining_fixed(step):
    return jnp.sin(0.5 * jnp.pi * ((STEPS - step) / STEPS)) ** 2


@failing(
    "https://github.com/google-research/big_vision/issues/41", "bf16",
    "cancellation swamping precision amplified",
    "progress = step / STEPS", "return 0.5 * (1.0 + jnp.cos(jnp.pi * progress))",
    args=lambda: (image_params(), pictures(), np.int32(1003)), inside=(remaining,), limit=0.1,
)  # fmt: skip
def last_steps(params, batch, step, schedule=remaining):
    """One of the last steps of a cosine schedule; returns the updates."""

    def loss(params):
        return cross_entropy(convolutional(params, batch["images"]), batch["labels"])

    value, gradients = jax.value_and_grad(loss)(params)
    rate = 0.5 * schedule(step)
    return jax.tree.map(lambda g: -rate * g, gradients), step + 1, value


def last_steps_fixed(params, batch, step):
    return last_steps(params, batch, step, schedule=remaining_fixed)


def normaliser(logits):
    return jnp.log(jnp.sum(jnp.exp(logits), axis=-1))


def large_logits():
    params = image_params()
    params["head"] = params["head"] * 40.0
    return at_rest(params), pictures()


@failing(
    "https://arxiv.org/abs/2002.05709", "fp16", "overflow nan",
    "return jnp.log(jnp.sum(jnp.exp(logits), axis=-1))",
    args=large_logits, inside=(normaliser,),
)  # fmt: skip
def classifying_step(state, batch, normalise=normaliser):
    def loss(params):
        logits = convolutional(params, batch["images"])
        chosen = jnp.take_along_axis(logits, batch["labels"][:, None], axis=-1)[:, 0]
        return jnp.mean(normalise(logits) - chosen)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return with_momentum(state, gradients, 0.05), value


def classifying_step_fixed(state, batch):
    return classifying_step(state, batch, normalise=partial(jax.nn.logsumexp, axis=-1))
