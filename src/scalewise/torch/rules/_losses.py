"""Losses and distances."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._operation import one_step
from .._registry import IN_STEPS, LIBRARY, rule
from .._torch import Tensor, aten, torch
from ._elementwise import relu, xlogy
from ._promotion import common, ranked
from ._reductions import vector_norm

A = aten
NONE, MEAN, SUM = 0, 1, 2  # torch's reductions
REDUCTIONS = "none", "mean", "sum"
IN_STEPS.update(
    (A.mse_loss.default, A.l1_loss.default, A.smooth_l1_loss.default, A.huber_loss.default,
     A.kl_div.default, A.binary_cross_entropy.default, A.binary_cross_entropy_with_logits.default)
)  # fmt: skip


def _mean(x):
    return jnp.sum(x) / x.size


def _reduced(x, reduction):
    if reduction == NONE:
        return x
    return one_step("sum", jnp.sum, x) if reduction == SUM else one_step("mean", _mean, x)


def _loss(overload):
    """Registers a loss whose function gives one number for each of two arrays'."""

    def register(function):
        def loss(x, y, reduction=MEAN, *args, **options):
            return _reduced(function(*common(x, y), *args, **options), reduction)

        rule(overload)(loss)
        return function

    return register


_loss(A.mse_loss.default)(lambda x, y: lax.square(x - y))
_loss(A.l1_loss.default)(lambda x, y: jnp.abs(x - y))


@dataclasses.dataclass(frozen=True)
class _SmoothL1:
    """As torch's kernel for a CPU, which computes in float32."""

    beta: float

    def __call__(self, x, y):
        size = jnp.abs(x - y)
        near = 0.5 * size * size / self.beta
        return jnp.where(size < self.beta, near, size - 0.5 * self.beta)


@_loss(A.smooth_l1_loss.default)
def smooth_l1_loss(x, y, beta=1.0):
    return one_step("smooth_l1", _SmoothL1(beta), x, y) if beta else jnp.abs(x - y)


@_loss(A.huber_loss.default)
def huber_loss(x, y, delta=1.0):
    size = jnp.abs(x - y)
    near = 0.5 * size * size
    return jnp.where(size <= delta, near, delta * (size - 0.5 * delta))


@_loss(A.kl_div.default)
def kl_div(x, target, log_target=False):
    if log_target:
        return jnp.exp(target) * (target - x)
    return xlogy(target, target) - target * x


@rule(A.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(x, y, weight=None, pos_weight=None, reduction=MEAN):
    x, y = common(x, y)
    log_chance = one_step("log_sigmoid", jax.nn.log_sigmoid, x)
    if pos_weight is not None:
        log_chance = log_chance * (ranked(pos_weight - 1, y)[0] * y + 1)
    loss = (1 - y) * x - log_chance
    return _reduced(loss if weight is None else loss * ranked(weight, loss)[0], reduction)


@rule(A.binary_cross_entropy.default)
def binary_cross_entropy(x, y, weight=None, reduction=MEAN):
    x, y = common(x, y)
    loss = (y - 1) * jnp.maximum(jnp.log1p(-x), -100) - y * jnp.maximum(jnp.log(x), -100)
    return _reduced(loss if weight is None else loss * ranked(weight, loss)[0], reduction)


@rule(A.multilabel_margin_loss_forward.default)
def multilabel_margins(x, y, reduction=MEAN):
    """Also returns which classes are targets; a row's targets end before its first negative one."""
    counts = (jnp.cumsum(y < 0, -1) == 0)[..., None]
    classes = lax.broadcasted_iota(y.dtype, (*x.shape, x.shape[-1]), x.ndim)
    targets = jnp.any(counts & (y[..., None] == classes), -2)
    own = jnp.take_along_axis(x, jnp.maximum(y, 0), -1)
    margins = relu(1 - own[..., None] + x[..., None, :])
    margins = jnp.where(counts & ~targets[..., None, :], margins, jnp.zeros_like(margins))
    loss = jnp.sum(margins, (-2, -1)) / x.shape[-1]
    return _reduced(loss, reduction), targets.astype(x.dtype)


@rule(A._cdist_forward.default)
def cdist(x, y, p, compute_mode=None):
    return vector_norm(jnp.expand_dims(x, -2) - jnp.expand_dims(y, -3), p, -1)


@rule(A._pdist_forward.default)
def pdist(x, p=2.0):
    pairs = np.array(list(itertools.combinations(range(x.shape[0]), 2)), np.int32).reshape(-1, 2)
    return vector_norm(x[pairs[:, 0]] - x[pairs[:, 1]], p, -1)


# ``torch.export`` wants lengths as Python numbers: while a model is exported, the CTC loss is an
# operation of tensors alone.
LIBRARY.define("ctc_loss(Tensor log_probs, Tensor targets, Tensor inputs, Tensor lengths, "
               "int blank, int reduction, bool zero_infinity) -> Tensor")  # fmt: skip
LIBRARY.impl("ctc_loss", lambda *args: torch.ctc_loss(*args), "CPU")
NEVER = -1e30  # the logarithm of the chance of what can't be, whose derivative is finite


def _shape(log_probs: Tensor, *rest: Any) -> Tensor:
    one_each = rest[4] == NONE and log_probs.ndim == 3
    return log_probs.new_empty(log_probs.shape[1:2] if one_each else ())


torch.library.register_fake("scalewise::ctc_loss", _shape, lib=LIBRARY)


class RecordedCTCLoss(torch.overrides.TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.nn.functional.ctc_loss or function is torch.ctc_loss:
            return _recorded(*args, **kwargs or {})
        return function(*args, **kwargs or {})


def _recorded(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str | int = MEAN, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    given = (torch.as_tensor(n, dtype=torch.int64) for n in (input_lengths, target_lengths))
    reduction = REDUCTIONS.index(reduction) if isinstance(reduction, str) else reduction
    return torch.ops.scalewise.ctc_loss(log_probs, targets, *given, blank, reduction, zero_infinity)


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
