"""New arrays: constants, ranges and random draws; and what only checks or changes modes."""

from __future__ import annotations

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .._convert import jax_dtype
from .._registry import DRAWS, rule, rules
from .._torch import aten, torch
from ._promotion import common

A = aten


def _dtype(dtype, value=None):
    if dtype is not None:
        return jax_dtype(dtype)
    if isinstance(value, bool):
        return jnp.dtype(jnp.bool_)
    return jax_dtype(torch.int64) if isinstance(value, int) else jnp.dtype(jnp.float32)


@rule(A.full.default)
def full(shape, value, dtype=None, **options):
    return jnp.full(shape, value, _dtype(dtype, value))


@rule(A.new_full.default)
def new_full(x, shape, value, dtype=None, **options):
    return jnp.full(shape, value, x.dtype if dtype is None else jax_dtype(dtype))


@rule(A.full_like.default)
def full_like(x, value, dtype=None, **options):
    return new_full(x, x.shape, value, dtype)


def random_rule(*overloads, draws=lambda *args, **kwargs: True):
    """Registers a rule whose first argument is a seed (uint32[2]) that differs between operations
    that draw; zeros for one that doesn't."""

    def register(function):
        def rule_(*args, seed=(0, 0), **kwargs):
            return function(seed, *args, **kwargs)

        DRAWS.update(dict.fromkeys(overloads, draws))
        rule(*overloads)(rule_)
        return function

    return register


def random_rules(table):
    for overload, function in table.items():
        random_rule(overload)(function)


def _key(seed):
    return jax.random.wrap_key_data(jnp.asarray(seed, jnp.uint32), impl="threefry2x32")


def _around(draw, seed, x, *generator, **options):
    """Draws in float32 whatever the dtype is, so that runs in two dtypes have the same numbers."""
    return draw(_key(seed), x.astype(jnp.float32)).astype(x.dtype)


def _drawn(draw, seed, shape, dtype=None, **options):
    return draw(_key(seed), shape, jnp.float32).astype(_dtype(dtype))


randn, rand = (partial(_drawn, draw) for draw in (jax.random.normal, jax.random.uniform))


@random_rule(A.uniform.default)
def uniform(seed, x, low=0.0, high=1.0, **options):
    return low + (high - low) * rand(seed, x.shape).astype(x.dtype)


@random_rule(A.normal_functional.default)
def normal_like(seed, x, mean=0.0, std=1.0, **options):
    return mean + std * randn(seed, x.shape).astype(x.dtype)


@random_rule(A.normal.Tensor_float, A.normal.float_Tensor, A.normal.Tensor_Tensor)
def normal_around(seed, mean, std=1.0, **options):
    mean, std = common(mean, std)
    return mean + std * normal_like(seed, mean + std)


@random_rule(A.randint.low)
def randint(seed, low, high, shape, dtype=torch.int64, **options):
    return jax.random.randint(_key(seed), shape, low, high).astype(jax_dtype(dtype))


def kept(seed, p, shape):
    return jax.random.uniform(_key(seed), shape, jnp.float32) < np.float32(p)


@random_rule(A.multinomial.default)
def multinomial(seed, x, num_samples, replacement=False, **options):
    logs, shape = jnp.log(x.astype(jnp.float32)), (num_samples, *x.shape[:-1])
    found = jax.random.categorical(_key(seed), logs, shape=shape, replace=replacement)
    return jnp.moveaxis(found, 0, -1)


@random_rule(A.rrelu_with_noise_functional.default)
def rrelu(seed, x, noise, lower=0.125, upper=1 / 3, training=False, **options):
    """A slope drawn for each negative number; the middle one if it isn't training."""
    middle = jnp.full(x.shape, (lower + upper) / 2, x.dtype)
    slope = uniform(seed, x, lower, upper) if training else middle
    slope = jnp.where(x <= 0, slope, jnp.ones_like(x))
    return x * slope, slope if training else noise


@random_rule(A.native_dropout.default)
def native_dropout(seed, x, p, train):
    if not train:
        return x, jnp.ones(x.shape, jnp.bool_)
    some = kept(seed, 1 - p, x.shape)
    return dropped(x, some, p), some


def dropped(x, some, p):
    scale = 1 / (1 - p) if p < 1 else 0.0
    return jnp.where(some, x * scale, jnp.zeros_like(x))


rules({
    A.empty.memory_format: lambda shape, dtype=None, **options: (
        full(shape, 0.0, dtype)),
    A.empty_strided.default: lambda shape, strides, dtype=None, **o: full(shape, 0.0, dtype),
    A.scalar_tensor.default: lambda value, dtype=None, **o: jnp.asarray(value, _dtype(dtype)),
    operator.getitem: lambda x, i: x[i],
    (A._linalg_check_errors.default, A._assert_tensor_metadata.default, A._assert_async.msg,
     A._assert_scalar.default,
     A.sym_constrain_range_for_size.default): lambda *args, **kwargs: None,
})  # fmt: skip


random_rules({
    A.binomial.default: lambda seed, count, p, **options: (
        jax.random.binomial(_key(seed), *(x.astype(jnp.float32) for x in (count, p)))),
    A.randint_like.low_dtype: lambda seed, x, low, high, dtype=None, **options: (
        randint(seed, low, high, x.shape).astype(full_like(x, 0, dtype).dtype)),
    A.poisson.default: partial(_around, jax.random.poisson),
    A._standard_gamma.default: partial(_around, jax.random.gamma),
    A._sample_dirichlet.default: partial(_around, jax.random.dirichlet),
    A.rand.default: rand,
    A.randn.default: randn,
    A.rand_like.default: lambda seed, x, dtype=None, **options: (
        uniform(seed, full_like(x, 0, dtype))),
    A.randn_like.default: lambda seed, x, dtype=None, **options: (
        normal_like(seed, full_like(x, 0, dtype))),
    A.normal.float_float: lambda seed, mean, std, shape, dtype=None, **options: (
        mean + std * randn(seed, shape, dtype)),
    A.randint.default: lambda seed, high, shape, dtype=torch.int64, **options: (
        randint(seed, 0, high, shape, dtype)),
    A.randint_like.default: lambda seed, x, high, dtype=None, **options: (
        randint(seed, 0, high, x.shape).astype(full_like(x, 0, dtype).dtype)),
    A.randperm.default: lambda seed, n, dtype=torch.int64, **options: (
        jax.random.permutation(_key(seed), n).astype(jax_dtype(dtype))),
    A.bernoulli.p: lambda seed, x, p=0.5, **options: kept(seed, p, x.shape).astype(x.dtype),
    A.bernoulli.Tensor: lambda seed, x, p, **options: (
        (jax.random.uniform(_key(seed), x.shape, jnp.float32) < p).astype(x.dtype)),
    A.dropout.default: lambda seed, x, p, train: (
        dropped(x, kept(seed, 1 - p, x.shape), p) if train and p else x),
})  # fmt: skip
