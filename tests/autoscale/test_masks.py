"""Residuals of two kinds of numbers, such as attention scores and the largest number as a mask."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly

MOST = float(jnp.finfo(jnp.float32).max)
FORMATS = ["fp16", "e5m2", "e4m3fn"]


MASKS = {
    "selected": lambda s, keep, causal: jnp.where(keep, s, -MOST),
    "added": lambda s, keep, causal: s + jnp.where(keep, 0, -MOST),
    "two": lambda s, keep, causal: (
        s + jnp.where(keep, 0, -MOST / 2) + jnp.where(causal, 0, -MOST / 2)[None]
    ),
    "scaled": lambda s, keep, causal: (
        jnp.where(keep, s, -MOST) * jnp.linspace(0.2, 1, s.shape[1])[None, :, None]
    ),
    "none": lambda s, keep, causal: s,
}
SHARES = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,  # reads its operand in the backward pass
    "layers": lambda s: jax.lax.scan(lambda c, w: (jax.nn.sigmoid(s * w) + c, None), s * 0,
                                     jnp.linspace(0.5, 1, 3))[0],
}  # fmt: skip


# Masks that the program gets as arguments, whose numbers it doesn't know.
GIVEN = {
    "given": lambda s, padding, causal: s + padding,
    "two given": lambda s, padding, causal: s + padding + causal[None],
    "chosen": lambda s, padding, causal: jnp.where(padding < 0, padding, s),
}


def attention(mask, shares, p, x, given):
    scores, bias = ((x @ p[n]) @ jnp.swapaxes(x, 1, 2) / 8 for n in ("scores", "bias"))
    if mask in GIVEN:
        masked = GIVEN[mask](bias, *given)
    else:
        masked = MASKS[mask](bias, *(m == 0 for m in given))
    return jnp.mean(SHARES[shares](scores + masked) @ jnp.sin(x) @ p["scores"])


def given(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    p, x = {"scores": draw(64, 64) / 8, "bias": draw(64, 64) / 8}, draw(4, 64, 64)
    kept = x[:, None, :, 0] > -0.8, jnp.tril(jnp.ones((64, 64), bool))
    return p, x, [jnp.where(k, 0, -MOST / 2) for k in kept]


@functools.cache
def gradients(mask, shares, recipe=None):
    step = jax.grad(lambda p, *rest: attention(mask, shares, p, *rest))
    return jax.jit(step if recipe is None else sw.autoscale(step, NARROW[recipe]))(*given())


def gradient_error(mask, shares, recipe):
    want, got, norm = gradients(mask, shares), gradients(mask, shares, recipe), jnp.linalg.norm
    return max(float(norm(got[n] - want[n]) / norm(want[n])) for n in want)


NARROW = {
    "fp16": sw.recipes.fp16,
    "fp8": sw.recipes.fp8,
    "fp16 alone": dataclasses.replace(sw.recipes.bf16, residuals="fp16"),
    **{fmt: dataclasses.replace(sw.recipes.bf16, residuals=fmt) for fmt in FORMATS[1:]},
}


MASKED = [mask for mask in (*MASKS, *GIVEN) if mask != "none"]
CASES = list(itertools.product(NARROW, SHARES, MASKED))
# Of a softmax no operand is stored; of a sigmoid and of layers it is. E4M3 has the shortest reach.
FEW = [
    *(("e4m3fn", "sigmoid", mask) for mask in MASKED), ("fp16", "sigmoid", "given"),
    ("e4m3fn", "softmax", "added"), ("e4m3fn", "layers", "two given"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "shares", "mask"), nightly(CASES, but=FEW))
def test_a_mask_leaves_gradients_as_they_are(recipe, shares, mask):
    alone = gradient_error("none", shares, recipe)
    assert gradient_error(mask, shares, recipe) < 1.5 * alone + 1e-4
