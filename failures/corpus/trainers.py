"""Training steps, layers and transforms as programs combine them."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import scalewise as sw
from failures.programs import failing, integers, normal, uniform


def accumulate(params, batches):
    def body(total, batch):
        x, y = batch
        gradient = jax.grad(lambda p: jnp.mean((x @ p - y) ** 2))(params)
        total = total + gradient
        return total, None

    return jax.lax.scan(body, jnp.zeros_like(params), batches)[0]


@failing(
    "https://github.com/huggingface/accelerate/issues/2719", "bf16", "swamping precision",
    "total = total + gradient",
    args=lambda: (normal(8, 4, scale=0.1), (uniform(600, 2, 8, low=0.5, high=1.0),
                                            uniform(600, 2, 4, seed=1, low=2.0, high=3.0))),
    inside=(accumulate,),
)  # fmt: skip
def gradients_of_micro_steps(params, batches):
    return accumulate(params, batches) / 600.0


class MaskedAttention(nn.Module):
    @nn.compact
    def __call__(self, x, keep):
        bias = jnp.where(keep, 0.0, -1e9)
        size = x.shape[-1]
        query, key, value = (nn.Dense(size, name=n)(x) for n in ("q", "k", "v"))
        scores = query @ key.T / size**0.5 + bias + bias.T
        return (jax.nn.softmax(scores) @ value) * keep.T


def masked_attention_args():
    x, keep = normal(6, 8), (jnp.arange(6) < 4)[None, :]
    return MaskedAttention().init(jax.random.key(0), x, keep), x, keep


@failing(
    "https://github.com/huggingface/transformers/issues/9295", "fp16", "overflow nan",
    "bias = jnp.where(keep, 0.0, -1e9)", "scores = query @ key.T / size**0.5 + bias + bias.T",
    args=masked_attention_args, inside=(MaskedAttention.__call__,),
)  # fmt: skip
def doubly_masked_layer(params, x, keep):
    return MaskedAttention().apply(params, x, keep)


@failing(
    "https://arxiv.org/abs/1710.03740", "bf16", "swamping precision",
    "params = optax.apply_updates(params, updates)", "updates, _ = optimizer.update(",
    args=lambda: ({"w": 1.0 + 0.2 * normal(16, 8)}, normal(32, 16), normal(32, 8, seed=1)),
    change=True, limit=0.3,
)  # fmt: skip
def fine_tuning_step(params, x, y):
    optimizer = optax.adam(2e-4)
    gradients = jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    params = optax.apply_updates(params, updates)
    return params


@failing(
    "https://github.com/pytorch/pytorch/issues/40497", "fp16", "overflow nan",
    "centred = jnp.log(jnp.sum(jnp.exp(inputs), axis=-1))",
    args=lambda: (normal(10, 12, scale=6.0), normal(12, 12, seed=1)),
)  # fmt: skip
def rematerialised_evidence(x, w):
    """A gradient through a block that is computed again."""

    @jax.checkpoint
    def block(x, w):
        inputs = x @ w
        centred = jnp.log(jnp.sum(jnp.exp(inputs), axis=-1))
        return jnp.mean(centred)

    return jax.grad(block)(x, w)


def rematerialised_evidence_fixed(x, w):
    return jax.grad(lambda x, w: jnp.mean(jax.nn.logsumexp(x @ w, axis=-1)))(x, w)


@jax.custom_vjp
def inverse_root(x):
    return 1.0 / jnp.sqrt(x)


def inverse_root_forward(x):
    return inverse_root(x), x


def inverse_root_backward(x, g):
    cubed = x * x * x
    return (-0.5 * g / jnp.sqrt(cubed),)


inverse_root.defvjp(inverse_root_forward, inverse_root_backward)


@failing(
    "https://github.com/jax-ml/jax/issues/14399", "fp16", "underflow overflow nan",
    "return jax.grad(lambda x: jnp.mean(inverse_root(x)) / 8.0)(x)",
    args=lambda: (uniform(32, low=5e-4, high=2e-3),),
)  # fmt: skip
def gradient_of_inverse_root(x):
    """JAX gives the operations of a custom backward pass the line that calls the function."""
    return jax.grad(lambda x: jnp.mean(inverse_root(x)) / 8.0)(x)


def gradient_of_inverse_root_fixed(x):
    root = 1.0 / jnp.sqrt(x)
    return -0.5 * (0.125 / 32.0) * root * root * root


@failing(
    "https://github.com/pytorch/pytorch/issues/117844", "bf16", "swamping precision",
    "table = table.at[tokens].add(gradients)",
    args=lambda: (jnp.zeros((4, 8)), integers(3000, high=2), uniform(3000, 8, low=0.5, high=1.0)),
)  # fmt: skip
def token_gradients(table, tokens, gradients):
    """Gradients of two frequent tokens, chunk by chunk as micro batches bring them."""

    def body(table, chunk):
        tokens, gradients = chunk
        table = table.at[tokens].add(gradients)
        return table, None

    chunks = tokens.reshape(-1, 5), gradients.reshape(-1, 5, 8)
    return jax.lax.scan(body, table, chunks)[0]


@failing(
    "https://arxiv.org/abs/2209.05433", "fp8_current", "underflow precision",
    "hidden = x @ weights",
    args=lambda: ({"a": normal(16, 32, scale=0.3), "b": normal(32, 4, seed=1, scale=0.3)},
                  spiky_inputs(), normal(64, 4, seed=3)),
    better=dataclasses.replace(sw.recipes.fp8_current, keep={"first": "bf16"}),
)  # fmt: skip
def spiky_features(params, x, y):
    """One input of the first layer is a million times the others, and its weights are zero."""

    def loss(params):
        with jax.named_scope("first"):
            weights = params["a"] * jnp.where(jnp.arange(16) == 3, 0.0, 1.0)[:, None]
            hidden = x @ weights
        return jnp.mean((jnp.tanh(hidden) @ params["b"] - y) ** 2)

    return jax.grad(loss)(params)["b"]


def spiky_inputs():
    x = normal(64, 16, seed=2)
    x[:, 3] *= 1e7
    return x


@failing(
    "https://arxiv.org/abs/2105.04906", "fp16", "underflow nan overflow",
    "spread = jnp.sqrt(variance + 1e-8)",
    args=lambda: (collapsed_batch(),),
)  # fmt: skip
def variance_penalty_gradient(z):
    """The gradient of a hinge on standard deviations, with a dimension that has collapsed."""

    def loss(z):
        variance = jnp.mean((z - jnp.mean(z, axis=0)) ** 2, axis=0)
        spread = jnp.sqrt(variance + 1e-8)
        return jnp.mean(jax.nn.relu(1.0 - spread))

    return jax.grad(loss)(z)


def collapsed_batch():
    z = normal(32, 8, scale=0.5)
    z[:, 2] = 0.25
    return z


@failing(
    "https://github.com/google/flax/issues/2030", "c=f16", "overflow nan",
    "energy = x @ params", "out = energy @ params",
    args=lambda: ({"k": normal(32, 32, scale=40.0), "v": normal(32, 8, seed=1)},
                  normal(16, 32, seed=2, scale=400.0)),
    better="c=bf16",
)  # fmt: skip
def unnormalised_energy(params, x):
    energy = x @ params["k"]
    out = energy @ params["v"]
    return out / jnp.max(jnp.abs(out.astype(jnp.float32)))


@failing(
    "https://arxiv.org/abs/1909.13719", "bf16", "decision precision",
    "score = logits + bonus * scale", "chosen = jnp.argmax(score, axis=-1)",
    args=lambda: (60.0 + 0.25 * jnp.round(normal(40, 6)), normal(6, seed=1), normal(6, 3, seed=2)),
)  # fmt: skip
def greedy_choice(logits, bonus, actions):
    scale = 0.125
    score = logits + bonus * scale
    chosen = jnp.argmax(score, axis=-1)
    return actions[chosen]


@failing(
    "https://github.com/pytorch/pytorch/issues/71013", "fp16", "overflow",
    "power = jnp.real(spectrum) ** 2 + jnp.imag(spectrum) ** 2",
    args=lambda: (normal(4, 256, scale=30.0),),
)  # fmt: skip
def spectral_flatness(signal):
    spectrum = jnp.fft.rfft(signal)
    power = jnp.real(spectrum) ** 2 + jnp.imag(spectrum) ** 2
    power = power[:, 1:]
    return power / jnp.max(power, axis=-1, keepdims=True)


@failing(
    "https://arxiv.org/abs/1506.02438", "bf16", "cancellation precision swamping",
    "deltas = rewards + discount * after - values",
    args=lambda: (normal(128, scale=0.5), jnp.round(200.0 + 2.0 * normal(129, seed=1))),
)  # fmt: skip
def advantages(rewards, values_and_last):
    """Generalised advantages, where values are large beside rewards."""
    values, after = values_and_last[:-1], values_and_last[1:]
    discount = 1.0
    deltas = rewards + discount * after - values

    def body(carry, delta):
        carry = delta + 0.9 * carry
        return carry, carry

    return jax.lax.scan(body, jnp.zeros((), rewards.dtype), deltas, reverse=True)[1]


@failing(
    "https://arxiv.org/abs/2402.03300", "fp16", "underflow nan overflow",
    "return centred / (jnp.std(rewards, axis=-1, keepdims=True) + 1e-8)",
    args=lambda: (groups_of_rewards(),),
)  # fmt: skip
def group_advantages(rewards):
    """Rewards normalised within groups, one of which has a single reward throughout."""
    centred = rewards - jnp.mean(rewards, axis=-1, keepdims=True)
    return centred / (jnp.std(rewards, axis=-1, keepdims=True) + 1e-8)


def groups_of_rewards():
    rewards = integers(6, 8, high=2).astype("float32")
    rewards[2] = 1.0
    return rewards


@partial(jax.jit, static_argnames="steps")
def settle(x, target, steps):
    def condition(state):
        return state[1] < steps

    def body(state):
        x, i = state
        x = x - 0.002 * (x - target)
        return x, i + 1

    return jax.lax.while_loop(condition, body, (x, 0))[0]


@failing(
    "https://arxiv.org/abs/2010.06192", "bf16", "swamping precision",
    "x = x - 0.002 * (x - target)",
    args=lambda: (normal(16), normal(16, seed=1)), inside=(settle.__wrapped__,), limit=0.05,
)  # fmt: skip
def relaxed_to_target(x, target):
    return settle(x, target, 300)
