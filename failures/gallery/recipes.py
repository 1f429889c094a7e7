"""Products of narrow operands, and functions under an autocast policy."""

import jax
import jax.numpy as jnp
from jax.random import key, normal, split


def weights(seed, **shapes):
    keys = split(key(seed), len(shapes))
    return {n: normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def retention(params, x):
    """Sums a sequence with decays just below 1; what its rows share is taken out by a norm."""
    inputs = jax.nn.sigmoid(x @ params["in"])
    with jax.named_scope("decays"):
        summed = params["decays"] @ inputs  # <- here
    centred = summed - jnp.mean(summed, axis=0, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=0, keepdims=True) + 1e-3)
    return normed @ params["out"]


def retention_arguments():
    params = weights(0, **{"in": (16, 32), "out": (32, 8)})
    decays = 0.90 + 0.09 * jax.random.uniform(key(1), (32, 64))
    return params | {"decays": decays}, normal(key(2), (64, 16))


def outlier_channel(params, x):
    """A feed-forward layer of which one channel is hundreds of times as large as the others."""
    hidden = jax.nn.gelu(x @ params["up"])
    hidden = hidden * params["gain"][None, :]
    with jax.named_scope("down"):
        return hidden @ params["down"]  # <- here


def outlier_channel_arguments():
    params = weights(0, up=(32, 64), down=(64, 16))
    params |= {"gain": jnp.ones(64).at[5].set(300.0)}
    params["down"] = params["down"].at[5].multiply(1e-3)
    return params, normal(key(1), (16, 32))


def gated(params, x):
    """A gated feed-forward layer with a massive activation, behind a norm."""
    gate, up = jax.nn.silu(x @ params["gate"]), x @ params["up"]
    return (gate * up) @ params["down"]  # <- here


def massive_activation(params, x):
    """Two gated layers; in the second, one feature of one token is hundreds of times larger."""
    for layer in params:
        size = jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-3)
        x = x + gated(layer, x / size)
    return x


def massive_activation_arguments():
    layers = [weights(s, gate=(16, 32), up=(16, 32), down=(32, 16)) for s in (0, 1)]
    for name in ("gate", "up"):
        layers[1][name] = layers[1][name].at[:, 3].multiply(800.0)
    layers[1]["down"] = layers[1]["down"].at[3].multiply(1e-4)
    return layers, normal(key(2), (8, 16))
