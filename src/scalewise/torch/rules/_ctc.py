"""The CTC loss, whose lengths ``torch.export`` wants as Python numbers.

While a model is exported, ``torch.ctc_loss`` is an operation of tensors alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from .._registry import LIBRARY, rule
from .._torch import Tensor, torch
from ._losses import MEAN, NONE

LIBRARY.define("ctc_loss(Tensor log_probs, Tensor targets, Tensor inputs, Tensor lengths, "
               "int blank, int reduction, bool zero_infinity) -> Tensor")  # fmt: skip
_ctc_loss = torch.ctc_loss
LIBRARY.impl("ctc_loss", lambda *args: _ctc_loss(*args), "CPU")
NEVER = -1e30  # the logarithm of the chance of what can't be, whose derivative is finite


def _shape(log_probs: Tensor, *rest: Any) -> Tensor:
    one_each = rest[4] == NONE and log_probs.ndim == 3
    return log_probs.new_empty(log_probs.shape[1:2] if one_each else ())


torch.library.register_fake("scalewise::ctc_loss", _shape, lib=LIBRARY)


@contextlib.contextmanager
def recorded_ctc_loss() -> Iterator[None]:
    def recorded(
        log_probs: Any, targets: Any, inputs: Any, lengths: Any,
        blank: int = 0, reduction: int = MEAN, zero_infinity: bool = False,
    ) -> Any:  # fmt: skip
        inputs, lengths = (torch.as_tensor(n, dtype=torch.int64) for n in (inputs, lengths))
        return torch.ops.scalewise.ctc_loss(
            log_probs, targets, inputs, lengths, blank, reduction, zero_infinity
        )

    with mock.patch.object(torch, "ctc_loss", recorded):
        yield


@rule(torch.ops.scalewise.ctc_loss.default)
def ctc_loss(log_probs, targets, inputs, lengths, blank, reduction, zero_infinity):
    """The sum over all alignments, by the recursion of Graves et al. (2006), section 4.1."""
    if log_probs.ndim == 2:
        log_probs, targets = log_probs[:, None], targets.reshape(1, -1)
        found = ctc_loss(log_probs, targets, inputs.reshape(1), lengths.reshape(1), blank,
                         reduction, zero_infinity)  # fmt: skip
        return found.reshape(())
    if targets.ndim == 1:  # one target after the other
        begins = jnp.cumsum(lengths) - lengths
        at = begins[:, None] + jnp.arange(targets.size)[None]
        targets = targets[jnp.minimum(at, targets.size - 1)]
    losses = -jax.vmap(_log_chance, (1, 0, 0, 0, None))(log_probs, targets, inputs, lengths, blank)
    impossible = losses > -NEVER / 2
    losses = jnp.where(impossible, 0.0 if zero_infinity else jnp.inf, losses)
    if reduction == NONE:
        return losses
    if reduction == MEAN:
        return jnp.mean(losses / jnp.maximum(lengths, 1).astype(losses.dtype))
    return jnp.sum(losses)


def _log_chance(log_probs, target, inputs, length, blank):
    states = 2 * target.size + 1  # a blank before and behind each label
    labels = jnp.full(states, blank, target.dtype).at[1::2].set(target)
    before = jnp.roll(labels, 2)
    skips = (labels != blank) & (labels != before) & (jnp.arange(states) > 1)
    never = jnp.full(states, NEVER, log_probs.dtype)

    def shifted(x, n):
        return jnp.concatenate([never[:n], x[: states - n]])

    def step(chances, given):
        time, row = given
        ways = [chances, shifted(chances, 1), jnp.where(skips, shifted(chances, 2), never)]
        new = jax.nn.logsumexp(jnp.stack(ways), 0) + jnp.maximum(row[labels], NEVER)
        return jnp.where(time < inputs, jnp.maximum(new, NEVER), chances), None

    first = jnp.where(jnp.arange(states) < 2, jnp.maximum(log_probs[0][labels], NEVER), never)
    times = jnp.arange(1, len(log_probs))
    chances, _ = jax.lax.scan(step, first, (times, log_probs[1:]))
    last = chances[2 * length], jnp.where(length > 0, chances[2 * length - 1], NEVER)
    return jnp.logaddexp(*last)
