"""Healthy programs after the libraries' longer examples."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from failures.programs import clean, integers, normal, uniform

POLICY = "p=f32,c=bf16,o=f32"


class ActorCritic(nn.Module):
    """The two heads of the PPO example."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x))
        return nn.log_softmax(nn.Dense(4)(x)), nn.Dense(1)(x)


def actor_args():
    x = normal(6, 8)
    return jax.tree.map(jnp.asarray, ActorCritic().init(jax.random.key(0), x)), x


@clean("https://github.com/google/flax/tree/main/examples/ppo", POLICY, actor_args)
def linen_ppo_heads(params, x):
    return ActorCritic().apply(params, x)


class Sentiment(nn.Module):
    """Means of embeddings, as in the sst2 example."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(2)(nn.tanh(nn.Dense(8)(jnp.mean(nn.Embed(30, 8)(tokens), axis=1))))


def sentiment_args():
    tokens = integers(4, 6, high=30)
    return jax.tree.map(jnp.asarray, Sentiment().init(jax.random.key(0), tokens)), tokens


@clean("https://github.com/google/flax/tree/main/examples/sst2", "bf16", sentiment_args)
def linen_sst2_logits(params, tokens):
    return Sentiment().apply(params, tokens)


def small_convnet():
    return nnx.Sequential(
        nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(0)), nnx.relu, nnx.Conv(4, 4, (3, 3), rngs=nnx.Rngs(1))
    )


@clean(
    "https://flax.readthedocs.io/en/latest/mnist_tutorial.html",
    "fp16",
    lambda: (nnx.state(small_convnet()), uniform(2, 8, 8, 1)),
)
def nnx_mnist_features(state, x):
    return jnp.mean(nnx.merge(nnx.graphdef(small_convnet()), state)(x), axis=(1, 2))


@clean(
    "https://optax.readthedocs.io/en/latest/api/optimizer_schedules.html",
    POLICY,
    lambda: ({"w": normal(8, 4, scale=0.3)}, normal(16, 8, seed=1), normal(16, 4, seed=2)),
)
def scheduled_momentum(params, x, y):
    optimizer = optax.sgd(optax.cosine_decay_schedule(0.125, 100), 0.875)
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params))
    return loss, optax.apply_updates(params, updates)


@clean(
    "https://optax.readthedocs.io/en/latest/api/losses.html",
    "bf16",
    lambda: (normal(6, 8), normal(6, 8, seed=1)),
)
def distilled_divergence(student, teacher):
    return jnp.mean(optax.kl_divergence(jax.nn.log_softmax(student), jax.nn.softmax(teacher)))


def coder(x, noise):
    hidden = jax.nn.relu(hk.Linear(16)(x))
    mean, scale = hk.Linear(4)(hidden), jax.nn.softplus(hk.Linear(4)(hidden))
    return hk.Linear(12)(jax.nn.relu(hk.Linear(16)(mean + scale * noise)))


def coder_args():
    x, noise = uniform(4, 12), normal(4, 4)
    return hk.without_apply_rng(hk.transform(coder)).init(jax.random.key(0), x, noise), x, noise


@clean("https://github.com/google-deepmind/dm-haiku/tree/main/examples/vae.py", POLICY, coder_args)
def haiku_autoencoder(params, x, noise):
    return hk.without_apply_rng(hk.transform(coder)).apply(params, x, noise)


def field():
    return eqx.nn.MLP(2, 2, 16, 1, jax.nn.tanh, key=jax.random.key(0))


@clean(
    "https://docs.kidger.site/diffrax/examples/neural_ode/",
    POLICY,
    lambda: (eqx.filter(field(), eqx.is_array), normal(2), jnp.float32(0.25)),
)
def equinox_neural_ode(params, y, dt):
    vector = eqx.combine(params, eqx.filter(field(), eqx.is_array, inverse=True))
    path = [y]
    for _ in range(4):
        path.append(path[-1] + dt * vector(path[-1]))
    return jnp.stack(path)


@clean(
    "https://docs.kidger.site/equinox/examples/score_based_diffusion/",
    "float32",
    lambda: (normal(4, 8), uniform(4, low=0.2, high=4.0), normal(4, 8, seed=1)),
)
def noised_images(image, time, noise):
    mean = image * jnp.exp(-0.5 * time)[:, None]
    deviation = jnp.sqrt(-jnp.expm1(-time))
    return mean + deviation[:, None] * noise


@clean(
    "https://num.pyro.ai/en/stable/examples/gp.html",
    "float32",
    lambda: (uniform(8, high=5.0), normal(8)),
)
def kernel_likelihood(x, y):
    kernel = jnp.exp(-0.5 * (x[:, None] - x[None]) ** 2) + 0.25 * jnp.eye(8)
    whitened = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(kernel), y, lower=True)
    return -0.5 * jnp.sum(whitened**2)
