"""What a plan keeps small: a divergence, a loss, or the outputs' error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from ..auditing import kl

ObjectiveName = Literal["auto", "kl", "loss", "error"]
WORST = 1e30  # in place of an objective that isn't finite: sums of it and others stay numbers
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
        x = x if abs(x) < WORST else math.copysign(math.inf, x)
        return max(x, 0.0) ** 0.5 if self.root else x


def objective(name: str, outputs: Sequence[jax.ShapeDtypeStruct]) -> Objective:
    scalars = [i for i, x in enumerate(outputs) if x.shape == ()]
    if not outputs:
        raise ValueError("plan: the function returns no floats, so that no error can be measured")
    if name == "auto":
        name = "loss" if len(outputs) == 1 and scalars else "error"
    if name == "loss":
        if len(scalars) != 1:
            count = len(scalars)
            raise ValueError(f"plan: objective='loss' needs one output without axes, not {count}")
        change = lambda a, b: (b[scalars[0]] - a[scalars[0]]).astype(jnp.float32)  # noqa: E731
        return Objective("change of the loss", change, None)
    if name == "kl":
        wide = [i for i, x in enumerate(outputs) if x.ndim and x.shape[-1] > 1]
        if len(outputs) != 1 or not wide:
            shapes = ", ".join(str(tuple(x.shape)) for x in outputs)
            raise ValueError(f"plan: objective='kl' needs logits, one output; there are {shapes}")
        return Objective("KL divergence, in nats", lambda a, b: kl(a[0], b[0]).mean(), _kl_probe)
    return Objective("relative error of the outputs", _error, _error_probe, root=True)


def _kl_probe(key: jax.Array, reference: Outputs) -> list[jax.Array]:
    """The Hessian at the reference is Fisher's, diag(p) - p p^T for each position."""
    (z,) = reference
    p = jax.nn.softmax(z.astype(jnp.float32))
    root, normal = jnp.sqrt(p), jax.random.normal(key, z.shape)
    v = root * normal - p * jnp.sum(root * normal, axis=-1, keepdims=True)
    return [(v / (z.size // z.shape[-1]) ** 0.5).astype(z.dtype)]


LEAST = 1e-30  # of an output's sum of squares: the error of one that is zero is relative to this


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _error(reference: Outputs, outputs: Outputs) -> jax.Array:
    pairs = zip(reference, outputs, strict=True)
    parts = [_squares(b - a) / jnp.maximum(_squares(a), LEAST) for a, b in pairs]
    return jnp.stack(parts).mean()


def _error_probe(key: jax.Array, reference: Outputs) -> list[jax.Array]:
    keys = jax.random.split(key, len(reference))
    return [
        (jax.random.normal(k, x.shape) * (2 / (len(reference) * size)) ** 0.5).astype(x.dtype)
        for k, x in zip(keys, reference, strict=True)
        for size in [jnp.maximum(_squares(x), LEAST)]
    ]
