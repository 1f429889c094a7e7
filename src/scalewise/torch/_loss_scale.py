"""Loss scales of an audited training step: a fixed factor, or a ``torch.amp.GradScaler``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._types import PyTree
from ._torch import torch


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A factor of the loss, which is divided out of the gradients."""

    factor: float  # above 0
    skips: bool = False  # whether a step is skipped if one of its gradients isn't finite

    def gradients(self, scaled: PyTree) -> PyTree:
        """Returns the gradients that the optimizer applies, from those of the scaled loss.

        As ``GradScaler`` does, it multiplies by ``1 / factor``, rounded to float32. In a skipped
        step all gradients are zero.
        """
        inverse, leaves = 1 / self.factor, jax.tree.leaves(scaled)
        with jax.named_scope("GradScaler"):
            found = jax.tree.map(lambda g: g * inverse, scaled)
            if not self.skips or not leaves:
                return found
            finite = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(g)) for g in leaves])
            return jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), found)


def value_and_gradients(
    f: Callable[..., jax.Array], scale: LossScale | None
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """Returns a function of the value of ``f``, without the scale, and the gradients that the
    optimizer applies."""

    def gradients(params: PyTree, *others: ArrayLike) -> tuple[jax.Array, PyTree]:
        def scaled(params: PyTree) -> tuple[jax.Array, jax.Array]:
            value = f(params, *others)
            return (value if scale is None else value * scale.factor), value

        (_, value), found = jax.value_and_grad(scaled, has_aux=True)(params)
        return value, found if scale is None else scale.gradients(found)

    return gradients


def as_loss_scale(given: Any) -> LossScale | None:
    if given is None:
        return None
    if isinstance(given, torch.amp.GradScaler):
        if not given.is_enabled():
            raise ValueError(
                "audit: the GradScaler is disabled, as that for 'cuda' is without a GPU; "
                "torch.amp.GradScaler('cpu') does the same"
            )
        return LossScale(given.get_scale(), skips=True)
    if isinstance(given, bool) or not isinstance(given, int | float | np.number):
        name = type(given).__name__
        raise TypeError(f"audit: loss_scale is a number or a torch.amp.GradScaler, not {name}")
    if not given > 0:
        raise ValueError(f"audit: loss_scale is a number above 0, not {given}")
    return LossScale(float(given))
