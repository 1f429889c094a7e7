"""What a plan changes, as a number: a divergence, a loss, or the outputs' error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

ObjectiveName = Literal["auto", "kl", "loss", "error"]
Outputs = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """A number that grows with what a plan changes."""

    words: str  # what the number is, for people
    measure: Callable[[Outputs, Outputs], jax.Array]  # of the reference's outputs and a plan's
    # Random cotangents of the outputs whose second moment is the Hessian, where the gradient is
    # zero; None to differentiate twice.
    probe: Callable[[jax.Array, Outputs], list[jax.Array]] | None
    root: bool = False  # whether people read its square root

    def shown(self, x: float) -> float:
        return max(x, 0.0) ** 0.5 if self.root else x


def objective(name: str, outputs: Sequence[jax.ShapeDtypeStruct]) -> Objective:
    scalars = [i for i, x in enumerate(outputs) if x.shape == ()]
    if not outputs:
        raise ValueError("plan: the function returns no floats, so that no error can be measured")
    if name == "auto":
        name = "loss" if len(outputs) == 1 and scalars else "error"
    if name == "loss":
        if len(scalars) != 1:
            raise ValueError(
                "plan: objective='loss' needs one output without axes, the loss; the function has "
                f"{len(scalars)} of them"
            )
        return Objective("change of the loss", _change(scalars[0]), None)
    if name == "kl":
        wide = [i for i, x in enumerate(outputs) if x.ndim and x.shape[-1] > 1]
        if len(outputs) != 1 or not wide:
            shapes = ", ".join(str(tuple(x.shape)) for x in outputs)
            raise ValueError(
                "plan: objective='kl' needs one output, the logits of at least two classes on the "
                f"last axis; the function returns {shapes}"
            )
        return Objective("KL divergence, in nats", _kl, _kl_probe)
    return Objective("relative error of the outputs", _error, _error_probe, root=True)


def _change(i: int) -> Callable[[Outputs, Outputs], jax.Array]:
    return lambda reference, outputs: (outputs[i] - reference[i]).astype(jnp.float32)


def _kl(reference: Outputs, outputs: Outputs) -> jax.Array:
    (a,), (b,) = reference, outputs
    return kl(a, b).mean()


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


def _kl_probe(key: jax.Array, reference: Outputs) -> list[jax.Array]:
    """The Hessian at the reference is Fisher's, diag(p) - p p^T for each position."""
    (z,) = reference
    p = jax.nn.softmax(z.astype(jnp.float32))
    root, normal = jnp.sqrt(p), jax.random.normal(key, z.shape)
    v = root * normal - p * jnp.sum(root * normal, axis=-1, keepdims=True)
    return [(v / (z.size // z.shape[-1]) ** 0.5).astype(z.dtype)]


def _energy(x: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(jnp.square(x.astype(jnp.float32))), 1e-30)


def _error(reference: Outputs, outputs: Outputs) -> jax.Array:
    parts = [_energy(b - a) / _energy(a) for a, b in zip(reference, outputs, strict=True)]
    return jnp.stack(parts).mean()


def _error_probe(key: jax.Array, reference: Outputs) -> list[jax.Array]:
    keys = jax.random.split(key, len(reference))
    return [
        (jax.random.normal(k, x.shape) * (2 / (len(reference) * _energy(x))) ** 0.5).astype(x.dtype)
        for k, x in zip(keys, reference, strict=True)
    ]
