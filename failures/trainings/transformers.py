"""Steps of a small causal language model, with one fault in each."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from failures.programs import failing, integers, normal

from .models import (
    VOCABULARY,
    WIDTH,
    at_rest,
    attention,
    cross_entropy,
    descend,
    embedding,
    features,
    language_model,
    language_params,
    layer_norm,
    text,
    with_momentum,
    zeros,
)

failing = partial(failing, set="trainings")
MIXED, HALF = "p=f32,c=bf16,o=f32", "p=f32,c=f16,o=f32"


def adam(params, gradients, state, rate=1e-2, eps=1e-8, scale=1.0):
    """Adam written out. With a scale its moments are those of gradients times the scale."""
    count = state["count"] + 1
    gradients = jax.tree.map(lambda g: scale * g, gradients)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["square"], gradients)
    correction = jnp.sqrt(1.0 - 0.99**count) / (1.0 - 0.9**count)

    def new(p, m, v):
        return p - rate * correction * m / (jnp.sqrt(v) + scale * eps)

    params = jax.tree.map(new, params, mean, square)
    return params, {"mean": mean, "square": square, "count": count}


def first(params):
    return {"mean": zeros(params), "square": zeros(params), "count": np.int32(0)}


def rarely_used_tokens():
    params = language_params()
    return params, first(params), text()


@failing(
    "https://github.com/google-deepmind/optax/issues/1754", "fp16", "underflow nan overflow",
    "return p - rate * correction * m / (jnp.sqrt(v) + scale * eps)",
    "square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state",
    args=rarely_used_tokens, inside=(adam,),
)  # fmt: skip
def language_step_with_adam(params, state, batch, scale=1.0, eps=1e-8):
    """Most tokens of the vocabulary have small gradients, some none."""

    def loss(params):
        return 0.01 * cross_entropy(language_model(params, batch["tokens"]), batch["targets"])

    value, gradients = jax.value_and_grad(loss)(params)
    params, _ = adam(params, gradients, state, eps=eps, scale=scale)
    return params, value


def language_step_with_adam_fixed(params, state, batch):
    return language_step_with_adam(params, state, batch, scale=2048.0, eps=1e-7)


def additive_attention(query, key, value):
    scores = jnp.einsum("bqd,bkd->bqk", query * query.shape[-1] ** -0.5, key)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], scores.dtype))
    scores = scores + (1.0 - causal) * -1e9
    return jax.nn.softmax(scores) @ value


@failing(
    "https://github.com/huggingface/transformers/pull/17306", "fp16", "overflow nan",
    "scores = scores + (1.0 - causal) * -1e9",
    args=lambda: (language_params(), text()), inside=(additive_attention,),
)  # fmt: skip
def language_step_with_mask(params, batch, attend=additive_attention):
    def loss(params):
        logits = language_model(params, batch["tokens"], attend=attend)
        return cross_entropy(logits, batch["targets"])

    value, gradients = jax.value_and_grad(loss)(params)
    return descend(params, gradients, 0.1), value


def language_step_with_mask_fixed(params, batch):
    return language_step_with_mask(params, batch, attend=attention)


ADAMW = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 10, 100), weight_decay=0.01),
)


def confident():
    """A model that is sure of the wrong tokens at some places."""
    params = language_params()
    params["head"] = params["head"] * 6.0
    return params, ADAMW.init(params), text()


def logs_of_probabilities(logits, targets):
    probabilities = jax.nn.softmax(logits)
    chosen = jnp.take_along_axis(probabilities, targets[..., None], axis=-1)
    return -jnp.mean(jnp.log(chosen))


@failing(
    "https://github.com/pytorch/pytorch/issues/40497", "fp16", "underflow nan overflow",
    "probabilities = jax.nn.softmax(logits)", "return -jnp.mean(jnp.log(chosen))",
    args=confident, inside=(logs_of_probabilities,), native=True,
)  # fmt: skip
def language_step_with_adamw(params, state, batch, compare=logs_of_probabilities):
    """Model and loss in the dtype of the parameters, the optimizer in float32."""

    def loss(params):
        return compare(language_model(params, batch["tokens"]), batch["targets"])

    value, gradients = jax.value_and_grad(loss)(params)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    updates, state = ADAMW.update(gradients, state, params)
    return optax.apply_updates(params, updates), value


def language_step_with_adamw_fixed(params, state, batch):
    return language_step_with_adamw(params, state, batch, compare=cross_entropy)


def late_attention(query, key, value):
    scores = jnp.einsum("bqd,bkd->bqk", query, key)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = scores / jnp.sqrt(jnp.asarray(query.shape[-1], scores.dtype))
    return jax.nn.softmax(jnp.where(causal, scores, -6e4)) @ value


def grown_scores():
    """Queries and keys have grown together, until each token attends to itself."""
    params = language_params()
    query, _, value = np.split(params["qkv"], 3, axis=1)
    query = 52.0 * np.linalg.qr(query)[0]
    return at_rest(params | {"qkv": np.concatenate([2.0 * query, query, value], axis=1)}), text()


@failing(
    "https://arxiv.org/abs/2302.05442", "fp16", "overflow nan",
    'scores = jnp.einsum("bqd,bkd->bqk", query, key)',
    args=grown_scores, inside=(late_attention,),
)  # fmt: skip
def language_step_with_momentum(state, batch, attend=late_attention):
    def loss(params):
        logits = language_model(params, batch["tokens"], attend=attend)
        return cross_entropy(logits, batch["targets"])

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return with_momentum(state, gradients, 0.05), value


def language_step_with_momentum_fixed(state, batch):
    return language_step_with_momentum(state, batch, attend=attention)


def rotations(positions):
    frequencies = 1000.0 ** (-jnp.arange(WIDTH // 2) / (WIDTH // 2))
    return jnp.einsum("bt,d->btd", positions.astype(jnp.float32), frequencies)


def rotations_fixed(positions):
    frequencies = 1000.0 ** (-jnp.arange(WIDTH // 2) / (WIDTH // 2))
    return positions.astype(jnp.float32)[..., None] * frequencies


def packed():
    """Documents that begin late in a long sequence."""
    start = np.array([[1001], [2003], [1507], [777]], np.int32)
    positions = start + np.arange(12, dtype=np.int32)
    return at_rest(language_params()), text() | {"positions": positions}


@failing(
    "https://github.com/huggingface/transformers/pull/29285", MIXED, "precision amplified",
    'return jnp.einsum("bt,d->btd", positions.astype(jnp.float32), frequencies)',
    args=packed, inside=(rotations,), change=True,
)  # fmt: skip
def packed_step(state, batch, angles_of=rotations):
    """A learned content, and sines and cosines of the positions in the packed sequence."""

    def embed(params, tokens):
        angles = angles_of(batch["positions"])
        places = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return params["tokens"][tokens] + 2.0 * places

    def loss(params):
        logits = language_model(params, batch["tokens"], embed=embed)
        return cross_entropy(logits, batch["targets"])

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return with_momentum(state, gradients, 0.1), value


def packed_step_fixed(state, batch):
    return packed_step(state, batch, angles_of=rotations_fixed)


def plain_attention(query, key, value):
    scores = jnp.einsum("bqd,bkd->bqk", query * query.shape[-1] ** -0.5, key)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], scores.dtype))
    raised = jnp.exp(scores) * causal
    return raised / jnp.sum(raised, axis=-1, keepdims=True) @ value


def sharp_scores():
    params = language_params()
    query, key, value = np.split(params["qkv"], 3, axis=1)
    params["qkv"] = np.concatenate([2.5 * query, query + key, value], axis=1)
    return at_rest(params), text()


@failing(
    "https://github.com/idiap/fast-transformers/issues/32", "fp16", "overflow nan",
    "raised = jnp.exp(scores) * causal",
    "return raised / jnp.sum(raised, axis=-1, keepdims=True) @ value",
    args=sharp_scores, inside=(plain_attention,),
)  # fmt: skip
def sharp_step(state, batch, attend=plain_attention):
    def loss(params):
        logits = language_model(params, batch["tokens"], attend=attend)
        return cross_entropy(logits, batch["targets"])

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return with_momentum(state, gradients, 0.05), value


def sharp_step_fixed(state, batch):
    return sharp_step(state, batch, attend=attention)


def fast_norm(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean
    return (x - mean) * jax.lax.rsqrt(jnp.maximum(variance, 0.0) + 1e-3)


NESTEROV = optax.sgd(0.1, momentum=0.9, nesterov=True)


def shifted_residuals():
    """The residual stream has a large mean, in all of its features."""
    params = language_params()
    params["tokens"] = params["tokens"] + 12.0
    return params, NESTEROV.init(params), text()


@failing(
    "https://github.com/google/flax/issues/2030", "fp16", "cancellation amplified swamping",
    "variance = jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean",
    args=shifted_residuals, inside=(fast_norm,), native=True, change=True, limit=0.1,
)  # fmt: skip
def language_step_with_nesterov(params, state, batch, norm=fast_norm):
    """The optimizer in float32, the model in the dtype of its parameters."""

    def loss(params):
        logits = language_model(params, batch["tokens"], norm=norm)
        return cross_entropy(logits, batch["targets"])

    value, gradients = jax.value_and_grad(loss)(params)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    updates, state = NESTEROV.update(gradients, state, wide)
    return jax.tree.map(lambda p, u: p + u, wide, updates), value


def language_step_with_nesterov_fixed(params, state, batch):
    return language_step_with_nesterov(params, state, batch, norm=layer_norm)


def many_batches():
    texts = [text(seed % 3, batch=1) for seed in range(900)]
    batches = {name: np.stack([x[name] for x in texts]) for name in texts[0]}
    return language_params(), batches


def summed_gradients(loss, params, batches):
    def add(total, batch):
        gradients = jax.grad(loss)(params, batch)
        total = jax.tree.map(lambda t, g: t + g, total, gradients)
        return total, None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]


@failing(
    "https://github.com/huggingface/accelerate/issues/2719", "bf16", "swamping accumulation",
    "total = jax.tree.map(lambda t, g: t + g, total, gradients)",
    args=many_batches, inside=(summed_gradients,), change=True, limit=0.1,
)  # fmt: skip
def accumulating_step(params, batches, summed=summed_gradients):
    """Adds the gradients of 900 micro-batches of one sentence each; there are three sentences."""

    def loss(params, batch):
        return cross_entropy(language_model(params, batch["tokens"]), batch["targets"])

    gradients = summed(loss, params, batches)
    return descend(params, gradients, 0.01)


def accumulating_step_fixed(params, batches):
    """Sums within groups, then the sums."""

    def grouped(loss, params, batches):
        groups = jax.tree.map(lambda x: x.reshape(30, 30, *x.shape[1:]), batches)
        sums = jax.lax.map(lambda group: summed_gradients(loss, params, group), groups)
        return jax.tree.map(lambda g: jnp.sum(g, axis=0), sums)

    return accumulating_step(params, batches, summed=grouped)


def drifted_head():
    """Nothing holds back a shift that all logits share; it has grown to hundreds."""
    params = language_params()
    direction = np.linalg.qr(normal(WIDTH, 1, seed=77))[0]
    params["down"] = params["down"] + 30.0 * np.abs(normal(2 * WIDTH, 1)) @ direction.T
    params["head"] = params["head"] + 150.0 * direction
    return at_rest(params), text()


@failing(
    "https://arxiv.org/abs/2204.02311", MIXED, "precision cancellation swamping amplified",
    'logits = features(params, batch["tokens"]) @ params["head"]',
    args=drifted_head, change=True,
)  # fmt: skip
def drifted_step(state, batch):
    def loss(params):
        logits = features(params, batch["tokens"]) @ params["head"]
        return cross_entropy(logits, batch["targets"])

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return with_momentum(state, gradients, 0.05), value


def drifted_step_fixed(state, batch):
    def loss(params):
        head = params["head"] - jnp.mean(params["head"], axis=1, keepdims=True)
        return cross_entropy(features(params, batch["tokens"]) @ head, batch["targets"])

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return with_momentum(state, gradients, 0.05), value


@failing(
    "https://arxiv.org/abs/2010.06192", "bf16", "swamping precision",
    "return jax.tree.map(lambda p, g: p - 2e-3 * g, params, gradients), value",
    args=lambda: (language_params(), text()), change=True, limit=0.3,
)  # fmt: skip
def fine_tuning_language_step(params, batch):
    """A rate whose steps are smaller than the distance of neighbouring weights."""

    def loss(params):
        return cross_entropy(language_model(params, batch["tokens"]), batch["targets"])

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 2e-3 * g, params, gradients), value


def late_in_training():
    params = language_params()
    gathered = jax.tree.map(lambda p: normal(*p.shape, seed=p.size, scale=0.05), params)
    return {"params": params, "gathered": gathered, "count": np.float32(256.0)}, text()


@failing(
    "https://github.com/EleutherAI/gpt-neox/pull/1016", "bf16", "swamping decision precision",
    'count = state["count"] + 1.0',
    args=late_in_training, change=True,
)  # fmt: skip
def every_fourth_step(state, batch):
    """Gathers gradients, and uses them in every fourth step; counts steps as floats."""

    def loss(params):
        return cross_entropy(language_model(params, batch["tokens"]), batch["targets"])

    params, gathered = state["params"], state["gathered"]
    gathered = jax.tree.map(lambda s, g: s + g, gathered, jax.grad(loss)(params))
    count = state["count"] + 1.0
    due = count % 4.0 == 0.0
    params = jax.tree.map(lambda p, s: jnp.where(due, p - 0.2 * s, p), params, gathered)
    gathered = jax.tree.map(lambda s: jnp.where(due, 0.0, s), gathered)
    return {"params": params, "gathered": gathered, "count": count}


def every_fourth_step_fixed(state, batch):
    def loss(params):
        return cross_entropy(language_model(params, batch["tokens"]), batch["targets"])

    params, gathered = state["params"], state["gathered"]
    gathered = jax.tree.map(lambda s, g: s + g, gathered, jax.grad(loss)(params))
    count = state["count"].astype(jnp.int32) + 1
    due = count % 4 == 0
    params = jax.tree.map(lambda p, s: jnp.where(due, p - 0.2 * s, p), params, gathered)
    gathered = jax.tree.map(lambda s: jnp.where(due, 0.0, s), gathered)
    return {"params": params, "gathered": gathered, "count": count}


SMOOTHING = 5e-7


def smoothed_divergence(logits, targets):
    known = jax.nn.one_hot(targets, VOCABULARY, dtype=bool)
    wanted = jnp.where(known, 1.0 - SMOOTHING, SMOOTHING / (VOCABULARY - 1))
    logs = jax.nn.log_softmax(logits)
    return jnp.mean(jnp.sum(wanted * (jnp.log(wanted) - logs), axis=-1))


def smoothed_cross_entropy(logits, targets):
    known = jax.nn.one_hot(targets, VOCABULARY, dtype=bool)
    wanted = jnp.where(known, 1.0 - SMOOTHING, SMOOTHING / (VOCABULARY - 1))
    logs = jax.nn.log_softmax(logits)
    return jnp.mean(jnp.sum(jax.scipy.special.xlogy(wanted, wanted) - wanted * logs, axis=-1))


@failing(
    "https://github.com/google-deepmind/optax/issues/1020", "fp16", "underflow nan overflow",
    "wanted = jnp.where(known, 1.0 - SMOOTHING, SMOOTHING / (VOCABULARY - 1))",
    "return jnp.mean(jnp.sum(wanted * (jnp.log(wanted) - logs), axis=-1))",
    args=lambda: (language_params(), text()), inside=(smoothed_divergence,),
)  # fmt: skip
def smoothed_step(params, batch, compare=smoothed_divergence):
    """A divergence from labels that are smoothed by half a millionth."""

    def loss(params):
        return compare(language_model(params, batch["tokens"]), batch["targets"])

    value, gradients = jax.value_and_grad(loss)(params)
    return descend(params, gradients, 0.1), value


def smoothed_step_fixed(params, batch):
    return smoothed_step(params, batch, compare=smoothed_cross_entropy)


def mostly_padding():
    """Three of four tokens are the same."""
    tokens = integers(160, 13, seed=5, high=VOCABULARY)
    tokens = np.where(integers(160, 13, seed=6, high=4) > 0, 3, tokens).astype("int32")
    return language_params(), {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@failing(
    "https://github.com/pytorch/pytorch/issues/117844", "bf16", "swamping accumulation precision",
    'return params["tokens"][tokens] + params["positions"][: tokens.shape[1]]',
    args=mostly_padding, inside=(embedding,), change=True, limit=0.1,
)  # fmt: skip
def padded_step(params, batch, embed=embedding):
    """The gradients of a frequent token are added one by one, where it is looked up."""

    def loss(params):
        logits = language_model(params, batch["tokens"], embed=embed)
        return 4.0 * cross_entropy(logits, batch["targets"])

    value, gradients = jax.value_and_grad(loss)(params)
    return descend(params, gradients, 0.5), value


def padded_step_fixed(params, batch):
    def embed(params, tokens):
        chosen = jax.nn.one_hot(tokens, VOCABULARY, dtype=params["tokens"].dtype)
        return chosen @ params["tokens"] + params["positions"][: tokens.shape[1]]

    return padded_step(params, batch, embed=embed)


def massive():
    """One feature of the hidden layer is large, for one token."""
    params = language_params() | {"gate": normal(WIDTH, 2 * WIDTH, seed=9, scale=0.25)}
    for name in ("up", "gate"):
        params[name][:, 3] *= 400.0
    params["down"][3] *= 1e-5
    return at_rest(params), text()


def gated(params, x):
    hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    return hidden @ params["down"]


@failing(
    "https://arxiv.org/abs/2402.17762", HALF, "overflow nan",
    "hidden = jax.nn.silu(x @ params", "return hidden @ params",
    args=massive, inside=(gated,), better=MIXED,
)  # fmt: skip
def gated_step(state, batch):
    """A gated layer under the attention of :func:`features`, in place of its own."""

    def loss(params):
        x = embedding(params, batch["tokens"])
        x = x + gated(params, layer_norm(x))
        return cross_entropy(layer_norm(x) @ params["head"], batch["targets"])

    value, gradients = jax.value_and_grad(loss)(state["params"])
    return with_momentum(state, gradients, 0.05), value
