"""The kernel that rounds to blocks gives, interpreted, the bits of XLA's own operations."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import nightly
from scalewise import autoscale, recipes
from scalewise.autoscaling import _block_kernel as kernel
from scalewise.autoscaling._block_kernel import BlockRounding
from scalewise.autoscaling._keys import hadamard_transform
from scalewise.formats import MXFP8_E4M3, NVFP4
from scalewise.scaled import Amax, Mx

SIGNS = np.array([1, -1, -1, 1] * 4, np.float32)
RULES = {
    "mxfp8": BlockRounding(MXFP8_E4M3, Mx("rceil"), (1, 0), jnp.bfloat16),
    "mxfp8_floor": BlockRounding(MXFP8_E4M3, None, (1, 0), jnp.float32),
    "rows": BlockRounding(NVFP4, None, (1,), jnp.bfloat16),
    "columns": BlockRounding(NVFP4, Amax(False, 17 / 16), (0,), jnp.float32),
    "squares": BlockRounding(NVFP4, None, (1, 0), jnp.bfloat16, tile=16),
    "transformed": BlockRounding(NVFP4, None, (0,), jnp.bfloat16, operands=("signs",)),
    "drawn": BlockRounding(NVFP4, None, (1,), jnp.bfloat16, "stochastic", operands=("key",)),
    "both": BlockRounding(NVFP4, None, (0,), jnp.bfloat16, "stochastic", operands=("key", "signs")),
}


def exactly(f, **options):
    """``f`` without XLA's excess precision, which leaves out a cast to bfloat16 and back."""
    exact = {"xla_allow_excess_precision": False}
    return jax.jit(partial(f, **options), compiler_options=exact)


def matrix(binades: int) -> jax.Array:
    """128 x 192 numbers of many magnitudes, with zeros, infinities and NaN in some blocks."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(-binades, binades + 1, (128, 12)).repeat(16, 1)
    x = rng.standard_normal((128, 192)) * 2.0**exponents
    x[:32, :64], x[40, 70], x[90, 3], x[127, 191], x[1, 100] = 0, np.inf, -np.inf, np.nan, -0.0
    return jnp.asarray(x, jnp.float32 if binades else jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize("name", nightly(RULES, but=["mxfp8", "both"]))
def test_the_kernel_gives_the_bits_of_the_operations_that_it_replaces(name):
    rule = RULES[name]
    # the sums of a transform are exact in any order if the numbers have few binades
    x = matrix(0 if "signs" in rule.operands else 20)
    given = {"key": jax.random.key_data(jax.random.key(3)), "signs": jnp.asarray(SIGNS)}
    signs = given["signs"] if "signs" in rule.operands else None
    rounded = x.astype(rule.dtype)
    if signs is not None:
        rounded = hadamard_transform(rounded, rule.axes[0], signs).astype(rule.dtype)
    largest = kernel.largest(rule, x, signs)
    assert largest == kernel.amax(rounded.astype(jnp.float32), (0, 1), False)
    if rule.fmt is NVFP4:
        given["whole"] = kernel.tensor_scale_of(largest, rule.fmt, rule.scaling)
        rule = dataclasses.replace(rule, operands=(*rule.operands, "whole"))
    operands = [given[n] for n in rule.operands]
    found = exactly(kernel.by_kernel, rule=rule, interpret=True)(x, *operands)
    expected = exactly(kernel.by_xla, rule=rule)(x, *operands)
    for a, b, t in zip(found, expected, rule.types(x.shape), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) == (t.shape, t.dtype)
        nan = np.isnan(np.asarray(b, np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(a, np.float32)), nan)
        codes = [np.asarray(z).view(np.uint8) for z in (a, b)]
        np.testing.assert_array_equal(*(np.where(nan, 0, c) for c in codes))


@pytest.mark.parametrize("name", ["mxfp8", *nightly(["nvfp4"])])
def test_a_cpu_rounds_as_if_no_device_with_the_kernel_were_named(name):
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    x, w = matrix(0)[:, 64:] * 0.1, matrix(0)[:, :128] * 0.1
    x, w = (jnp.nan_to_num(z, posinf=1, neginf=-1) for z in (x, w))
    found = []
    for device in (None, "b200"):
        recipe = getattr(recipes, name)
        recipe = dataclasses.replace(recipe, device=device, narrow="always")
        step = autoscale(jax.value_and_grad(loss, argnums=(0, 1)), recipe)
        found.append(jax.jit(step)(w, x))
    jax.tree.map(np.testing.assert_array_equal, *found)
