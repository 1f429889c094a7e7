"""Healthy samplers, recurrences, graph networks and steps after libraries' examples."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from failures.programs import clean, integers, normal, uniform

POLICY = "p=f32,c=bf16,o=f32"


@clean("https://huggingface.co/docs/diffusers/api/schedulers/ddim", "fp16",
       lambda: (normal(4, 16), normal(4, 16, seed=1)),
)  # fmt: skip
def deterministic_denoising(x, noise):
    before, after = 0.4, 0.55
    clean_image = (x - (1.0 - before) ** 0.5 * noise) / before**0.5
    clean_image = jnp.clip(clean_image, -1.0, 1.0)
    return after**0.5 * clean_image + (1.0 - after) ** 0.5 * noise


@clean("https://blackjax-devs.github.io/blackjax/", "fp16",
       lambda: (normal(12), normal(12, seed=1), uniform(12, seed=2, low=0.5, high=2.0)),
)  # fmt: skip
def leapfrog_steps(position, momentum, precision):
    slope = jax.grad(lambda q: 0.5 * jnp.sum(precision * q * q))

    def body(state, _):
        position, momentum = state
        momentum = momentum - 0.1 * slope(position)
        position = position + 0.2 * momentum
        return (position, momentum - 0.1 * slope(position)), None

    return jax.lax.scan(body, (position, momentum), None, length=6)[0]


@clean("https://github.com/google-deepmind/jraph/blob/master/jraph/_src/models.py", "bf16",
       lambda: (normal(12, 8), normal(8, 8, seed=1, scale=0.3), normal(16, seed=2, scale=0.2),
                integers(40, high=12), integers(40, seed=1, high=12)),
)  # fmt: skip
def attentive_graph(nodes, w, attention, senders, receivers):
    hidden = nodes @ w
    pairs = jnp.concatenate([hidden[senders], hidden[receivers]], axis=-1)
    scores = jax.nn.leaky_relu(pairs @ attention)
    top = jax.ops.segment_max(scores, receivers, num_segments=12)
    weights = jnp.exp(scores - top[receivers])
    total = jax.ops.segment_sum(weights, receivers, num_segments=12)
    weights = weights / jnp.maximum(total, 1e-3)[receivers]
    return jax.ops.segment_sum(weights[:, None] * hidden[senders], receivers, num_segments=12)


@clean("https://github.com/lindermanlab/S5", "bf16",
       lambda: (uniform(8, low=0.5, high=0.9), normal(24, 8)),
)  # fmt: skip
def diagonal_state_space(decay, inputs):
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    decays = jnp.broadcast_to(decay, inputs.shape)
    return jax.lax.associative_scan(combine, (decays, inputs))[1]


@clean("https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/recurrent.html", "bf16",
       lambda: (normal(4, 10, 6),),
)  # fmt: skip
def nnx_gated_units(x):
    cell = nnx.GRUCell(6, 8, rngs=nnx.Rngs(0))

    def body(carry, step):
        return cell(carry, step)

    return jax.lax.scan(body, jnp.zeros((4, 8), x.dtype), x.swapaxes(0, 1))[1]


@clean("https://github.com/google-deepmind/rlax/blob/master/rlax/_src/multistep.py", "fp16",
       lambda: (normal(20), uniform(20, seed=1), normal(21, seed=2)),
)  # fmt: skip
def lambda_returns(rewards, discounts, values):
    def body(after, step):
        reward, discount, value = step
        after = reward + discount * (0.1 * value + 0.9 * after)
        return after, after

    return jax.lax.scan(body, values[-1], (rewards, discounts, values[1:]), reverse=True)[1]


@clean("https://optax.readthedocs.io/en/latest/api/contrib.html", POLICY,
       lambda: ({"in": normal(8, 16, scale=0.3), "out": normal(16, 4, seed=1, scale=0.25)},
                normal(16, 8, seed=2), normal(16, 4, seed=3)),
)  # fmt: skip
def muon_regression(params, x, y):
    def loss(params):
        return jnp.mean((jax.nn.relu(x @ params["in"]) @ params["out"] - y) ** 2)

    optimizer = optax.contrib.muon(1e-2)
    gradients = jax.grad(loss)(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


@clean("https://docs.kidger.site/equinox/examples/train_rnn/", POLICY, lambda: (normal(8, 12, 2),))
def equinox_sequence_gradients(x):
    cell = eqx.nn.GRUCell(2, 8, dtype=jnp.float32, key=jax.random.key(0))
    head = eqx.nn.Linear(8, 1, dtype=jnp.float32, key=jax.random.key(1))

    def one(models, steps):
        cell, head = models
        state = jnp.zeros(8, x.dtype)
        return head(jax.lax.scan(lambda s, i: (cell(i, s), None), state, steps)[0])

    def loss(models):
        return jnp.mean(jax.vmap(lambda s: one(models, s))(x) ** 2)

    return eqx.filter(eqx.filter_grad(loss)((cell, head)), eqx.is_array)


@clean("https://optax.readthedocs.io/en/latest/_collections/examples/ctc.html", "float32",
       lambda: (normal(2, 12, 6), integers(2, 4, high=5)),
)  # fmt: skip
def alignment_loss(logits, labels):
    zeros = jnp.zeros(logits.shape[:2], logits.dtype)
    return optax.ctc_loss(logits, zeros, labels + 1, jnp.zeros(labels.shape, logits.dtype))


@clean("https://flax.readthedocs.io/en/latest/guides/training_techniques/use_checkpointing.html",
       "fp16", lambda: (normal(2, 16, 8),),
)  # fmt: skip
def linen_mixer_features(x):
    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(epsilon=1e-5)(x).swapaxes(1, 2)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(y))).swapaxes(1, 2)
            return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm(epsilon=1e-5)(x))))

    model = Mixer()
    return model.apply(model.init(jax.random.key(0), x), x)
