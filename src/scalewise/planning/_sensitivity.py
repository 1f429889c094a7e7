"""The effect of each rounding on the objective, to second order, from one adjoint pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..interpret import Argument
from ._family import Family
from ._objective import Objective

PROBES = 128  # random directions of the outputs: an expectation's relative error is sqrt(2 / 128)
AT_ONCE = 8  # directions whose adjoints are computed together: memory for time
EXACT = 512  # columns up to which the whole Hessian is computed, each by one product with it


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The objective of a plan ``theta``: ``bias @ theta + theta @ hessian @ theta / 2``.

    Attributes:
        bias: the mean effect of each rounding: the gradient times its error.
        hessian: the effect of their variance, on the diagonal, and of each pair.
        noise: the correlation from which on a pair's element is no noise of random directions.
    """

    bias: np.ndarray
    hessian: np.ndarray
    noise: float


def sensitivity(
    family: Family, aim: Objective, arrays: Sequence[Argument], seed: int
) -> Sensitivity:
    """Differentiates the family of plans at the program itself."""
    if aim.probe is None:
        bias, hessian = jax.jit(lambda a: _twice(family, aim, a))(list(arrays))
    else:
        rows = jax.jit(lambda a, k: _probed(family, aim, a, k))(list(arrays), jax.random.key(seed))
        bias, hessian = np.zeros(family.size), np.asarray(rows, np.float64)
        hessian = hessian.T @ hessian / len(hessian)
    hessian = np.asarray(hessian, np.float64)
    noise = 0.0 if aim.probe is None and family.size <= EXACT else 3 / PROBES**0.5
    return Sensitivity(np.asarray(bias, np.float64), (hessian + hessian.T) / 2, noise)


def _probed(
    family: Family, aim: Objective, arrays: Sequence[Argument], key: jax.Array
) -> jax.Array:
    """Returns the adjoints of random directions of the outputs: a factor of the Hessian."""
    reference, pullback = jax.vjp(lambda t: family.outputs(t, arrays), family.zero)
    assert aim.probe is not None
    probe = aim.probe

    def adjoint(key: jax.Array) -> jax.Array:
        return pullback(probe(key, reference))[0]

    return lax.map(adjoint, jax.random.split(key, PROBES), batch_size=AT_ONCE)


def _twice(
    family: Family, aim: Objective, arrays: Sequence[Argument]
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient and the Hessian; of many columns its diagonal, from random signs."""
    reference = family.outputs(family.zero, arrays)
    at = lambda t: aim.measure(reference, family.outputs(t, arrays))  # noqa: E731
    bias, product = jax.linearize(jax.grad(at), family.zero)
    if family.size <= EXACT:
        return bias, lax.map(product, jnp.eye(family.size), batch_size=AT_ONCE)
    signs = jax.random.rademacher(jax.random.key(0), (PROBES, family.size), jnp.float32)
    diagonal = lax.map(lambda s: s * product(s), signs, batch_size=AT_ONCE).mean(0)
    return bias, jnp.diag(diagonal)
