"""Healthy training steps, recurrences, distributions and solvers."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from failures.programs import clean, integers, normal, uniform

POLICY = "p=f32,c=bf16,o=f32"


@clean("https://docs.jax.dev/en/latest/jaxopt.html", "bf16",
       lambda: (normal(64, 8), normal(64, seed=1), normal(8, seed=2)),
)  # fmt: skip
def ridge_gradient(x, y, w):
    return x.T @ (x @ w - y) / 64.0 + 0.1 * w


@clean("https://docs.kidger.site/diffrax/", "fp16", lambda: (normal(16), uniform(16, seed=1)))
def heun_steps(x, rate):
    def body(x, _):
        slope = -rate * x
        after = -rate * (x + 0.25 * slope)
        return x + 0.125 * (slope + after), None

    return jax.lax.scan(body, x, None, length=8)[0]


@clean("https://github.com/google-deepmind/rlax", "bf16",
       lambda: (normal(16, 6), integers(16, high=6), normal(16, seed=1), normal(16, 6, seed=2)),
)  # fmt: skip
def double_q_learning(values, actions, rewards, selector):
    best = jnp.argmax(selector, axis=-1)
    rows = jnp.arange(16)
    target = rewards + 0.9 * values[rows, best]
    return jnp.mean(optax.huber_loss(values[rows, actions], target))


@clean("https://github.com/google-deepmind/jraph", "fp16",
       lambda: (normal(20, 8), normal(8, 8, seed=1, scale=0.3), integers(60, high=20),
                integers(60, seed=1, high=20)),
)  # fmt: skip
def graph_convolution(nodes, w, senders, receivers):
    ones = jnp.ones(60, nodes.dtype)
    degree = jax.ops.segment_sum(ones, receivers, 20) + 1.0
    messages = jax.ops.segment_sum((nodes @ w)[senders], receivers, 20)
    return jax.nn.relu(messages / degree[:, None])


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.LayerNorm()(x)
        hidden = nn.silu(nn.Dense(24)(hidden)) * nn.Dense(24)(hidden)
        return x + nn.Dense(8)(hidden)


def gated_args():
    x = normal(12, 8)
    return jax.tree.map(jnp.asarray, Gated().init(jax.random.key(0), x)), x


@clean("https://arxiv.org/abs/2002.05202", POLICY, gated_args)
def swiglu_step(params, x):
    gradients = jax.grad(lambda p: jnp.mean(Gated().apply(p, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


@clean("https://github.com/google-deepmind/distrax", "fp16",
       lambda: (normal(32), normal(32, seed=1), 0.5 + uniform(32, seed=2)),
)  # fmt: skip
def gaussian_log_density(x, mean, deviation):
    z = (x - mean) / deviation
    return -0.5 * jnp.square(z) - jnp.log(deviation) - 0.5 * jnp.log(2.0 * jnp.pi)


@clean("https://docs.kidger.site/equinox/examples/train_rnn/", "bf16",
       lambda: (normal(10, 4), eqx.nn.GRUCell(4, 8, key=jax.random.key(0)).weight_ih,
                eqx.nn.GRUCell(4, 8, key=jax.random.key(0)).weight_hh))  # fmt: skip
def gated_recurrence(xs, wi, wh):
    def body(hidden, x):
        inputs, states = jnp.split(wi @ x, 3), jnp.split(wh @ hidden, 3)
        reset = jax.nn.sigmoid(inputs[0] + states[0])
        keep = jax.nn.sigmoid(inputs[1] + states[1])
        new = jnp.tanh(inputs[2] + reset * states[2])
        return keep * hidden + (1.0 - keep) * new, None

    return jax.lax.scan(body, jnp.zeros(8, xs.dtype), xs)[0]


@clean("https://flax.readthedocs.io/en/latest/nnx_basics.html", "bf16", lambda: (normal(8, 6),))
def nnx_batch_norm_inference(x):
    layer = nnx.BatchNorm(6, rngs=nnx.Rngs(0), use_running_average=True)
    return jax.nn.gelu(layer(x))


def lookup(tokens):
    return hk.Linear(5)(jnp.mean(hk.Embed(20, 8)(tokens), axis=1))


LOOKUP = hk.without_apply_rng(hk.transform(lookup))


def lookup_args():
    tokens = integers(6, 4, high=20)
    return LOOKUP.init(jax.random.key(0), tokens), tokens, integers(6, seed=1, high=5)


@clean("https://github.com/google-deepmind/dm-haiku", POLICY, lookup_args)
def haiku_embedding_loss(params, tokens, labels):
    logits = LOOKUP.apply(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@clean("https://arxiv.org/abs/2305.13245", "bf16",
       lambda: (normal(2, 6, 4, 8), normal(2, 6, 2, 8, seed=1), normal(2, 6, 2, 8, seed=2)),
)  # fmt: skip
def grouped_query_attention(query, key, value):
    query = query.reshape(2, 6, 2, 2, 8)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key) / jnp.sqrt(8.0).astype(query.dtype)
    causal = jnp.tril(jnp.ones((6, 6), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value).reshape(2, 6, 32)


@clean("https://optax.readthedocs.io/en/latest/_collections/examples/lookahead_mnist.html", POLICY,
       lambda: ({"w": normal(8, 4)}, normal(16, 8, seed=1), normal(16, 4, seed=2)),
)  # fmt: skip
def nesterov_with_schedule(params, x, y):
    optimizer = optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9, nesterov=True)
    state = optimizer.init(params)
    for _ in range(2):
        gradients = jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


@clean("https://arxiv.org/abs/2010.02502", "bf16",
       lambda: (normal(4, 16), normal(4, 16, seed=1), uniform(4, 1, seed=2, low=0.2, high=0.9)),
)  # fmt: skip
def implicit_sampler_step(image, noise, kept):
    start = (image - jnp.sqrt(1.0 - kept) * noise) / jnp.sqrt(kept)
    return jnp.sqrt(0.95) * jnp.clip(start, -2.0, 2.0) + jnp.sqrt(0.05) * noise
