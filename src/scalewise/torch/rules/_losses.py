"""Losses and distances."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._operation import one_step
from .._registry import IN_STEPS, rule
from .._torch import torch
from ._activations import log_sigmoid
from ._elementwise import xlogy
from ._promotion import common, ranked
from ._reductions import vector_norm

A = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # torch's reductions
IN_STEPS.update(
    (A.mse_loss.default, A.l1_loss.default, A.smooth_l1_loss.default, A.huber_loss.default,
     A.kl_div.default, A.binary_cross_entropy_with_logits.default)
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
    log_chance = one_step("log_sigmoid", log_sigmoid, x)
    if pos_weight is not None:
        log_chance = log_chance * (ranked(pos_weight - 1, y)[0] * y + 1)
    loss = (1 - y) * x - log_chance
    return _reduced(loss if weight is None else loss * ranked(weight, loss)[0], reduction)


@rule(A._cdist_forward.default)
def cdist(x, y, p, compute_mode=None):
    return vector_norm(jnp.expand_dims(x, -2) - jnp.expand_dims(y, -3), p, -1)


@rule(A._pdist_forward.default)
def pdist(x, p=2.0):
    pairs = np.array(list(itertools.combinations(range(x.shape[0]), 2)), np.int32).reshape(-1, 2)
    return vector_norm(x[pairs[:, 0]] - x[pairs[:, 1]], p, -1)
