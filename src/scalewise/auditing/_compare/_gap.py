"""How far two models' probabilities of tokens are apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CLIP = 0.2  # PPO's


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far the probabilities of two models, a trainer's and a rollout engine's, are apart.

    Of tokens that are drawn from the rollout's probabilities, one at each position.

    Attributes:
        kl: the mean of KL(rollout || trainer), in nats.
        mean, largest: differences of the tokens' log probabilities.
        ratio: the largest of trainer's probability by rollout's.
        clipped: the share of tokens whose ratio is more than 20 % from 1, which PPO would clip.
    """

    kl: float
    mean: float
    largest: float
    ratio: float
    clipped: float


def kl(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the divergence of softmax(b) from softmax(a), along the last axis.

    Exact for small differences, too, where the difference of two logarithms is rounding noise: it
    sums p (exp(d) - 1 - d), d being the difference of log probabilities.
    """
    p, q = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (a, b))
    d = q - p
    small = d**2 * (0.5 + d * (1 / 6 + d / 24))
    terms = jnp.exp(p) * jnp.where(jnp.abs(d) < 0.05, small, jnp.expm1(d) - d)
    # classes that the reference excludes (-inf, or finfo.min) don't count
    return jnp.sum(jnp.where(jnp.isfinite(p) & (p > -1e30), terms, 0.0), axis=-1)


@jax.jit
def _gap(key: jax.Array, trainer: jax.Array, rollout: jax.Array) -> tuple[jax.Array, ...]:
    token = jax.random.categorical(key, rollout)[..., None]
    logs = [jax.nn.log_softmax(x) for x in (trainer, rollout)]
    ours, theirs = (jnp.take_along_axis(x, token, -1)[..., 0] for x in logs)
    apart = jnp.abs(ours - theirs)
    ratio = jnp.exp(ours - theirs)
    clipped = jnp.mean(jnp.abs(ratio - 1) > np.float32(CLIP))
    return kl(rollout, trainer).mean(), apart.mean(), apart.max(), ratio.max(), clipped


def gap(trainer: Any, rollout: Any, seed: int = 0) -> Gap:
    """Compares the logits of two models, with the classes on the last axis."""
    arrays = (jnp.asarray(x, jnp.float32) for x in (trainer, rollout))
    return Gap(*(float(x) for x in _gap(jax.random.key(seed), *arrays)))
