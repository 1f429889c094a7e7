"""Failures of low-precision programs whose fault is how a device's matrix units add up products."""

import jax
import jax.numpy as jnp

import scalewise as sw
from scalewise.devices import MatrixUnits

from ..programs import Program
from .short import case


def pooled(x, w):
    return (x @ w) / 4096.0  # <- here


def weight_gradient(w, x, g):
    def loss(w):
        return jnp.sum((x @ w) * g) / 8192.0  # <- here

    return jax.grad(loss)(w)


def split_over_k(x, w):
    return (x @ w) / 4096.0  # <- here


def half_accumulator(x, w):
    return (x @ w) / 4096.0  # <- here


def uniform(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), shape)


LIMIT = 2e-4  # an error beside exact sums
DEEPSEEK = "DeepSeek-V3, arXiv 2412.19437, 3.3.2"
# whose products lose accuracy by the sums of a device's matrix units, not by their operands
ACCUMULATORS: dict[str, Program] = {
    "A long sum of positive products": case(
        f"{DEEPSEEK}: 14 bits are kept by an H100's FP8 products",
        pooled,
        lambda: (uniform(4, 1024), uniform(1024, 4, seed=1)),
        "fp8",
        ("accumulation",),
        device="h100",
        limit=LIMIT,
    ),
    "The gradient of a weight over many tokens": case(
        f"{DEEPSEEK}; the sum is over the tokens of a batch",
        weight_gradient,
        lambda: (
            uniform(8, 4) - 0.5,
            uniform(1024, 8, seed=1),
            uniform(1024, 4, seed=2),
        ),
        "fp8",
        ("accumulation",),
        device="h100",
        limit=LIMIT,
    ),
    "A sum split in four is still too long": case(
        f"{DEEPSEEK}; split K, as cuBLAS does it for few rows and columns",
        split_over_k,
        lambda: (uniform(4, 4096), uniform(4096, 4, seed=1)),
        "fp8",
        ("accumulation",),
        device=MatrixUnits("h100", splits=4),
        limit=LIMIT,
    ),
    "An accumulator in FP16": case(
        "Fasi et al. 2021, doi 10.7717/peerj-cs.330: tensor cores that accumulate in FP16",
        half_accumulator,
        lambda: (uniform(4, 1024), uniform(1024, 4, seed=1)),
        sw.recipes.fp16.with_operands(scaling=sw.Unit()),
        ("accumulation",),
        device=MatrixUnits("h100", result="fp16"),
        limit=LIMIT,
    ),
}
